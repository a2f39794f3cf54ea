/* SPDX-License-Identifier: Apache-2.0
 *
 * What goes wrong stays where it went wrong: the error says which replica, everything is given back, and the next batch works.
 */
#include <string.h>

#include "conformance/checks/check.h"

#define LR 0.3

/* ---- a model that fails ---- */

static void check_model_error(stg_error* error) {
  const int32_t replica = (int32_t)the_host.num_devices - 1;
  if (!CHECK(error != NULL)) return;
  CHECK_THAT(error->replica == replica, "the error names replica %d, not %d", (int)replica, (int)error->replica);
  CHECK_THAT(error->device.kind == STG_DEVICE_CPU && error->device.index == replica, "and device cpu:%d, not %d", (int)replica,
             (int)error->device.index);
  CHECK((error->flags & STG_ERROR_INSTANCE_USABLE) != 0);
  const stg_error* cause = error;
  while (cause->cause != NULL) cause = cause->cause;
  CHECK_THAT(cause != error && cause->code == STG_DATA_LOSS && text_has(cause->message, MLP_FAILURE_TEXT),
             "the model's own error is the cause; it is: %.*s", (int)cause->message.size_bytes, cause->message.data);
  error->release(error);
}

static void model_error_comes_back(int where) {
  session s;
  weights expected;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  first_weights(&expected);
  for (int step = 0; step < 6; ++step) {
    batch b;
    make_batch(&b, 9, (uint32_t)step);
    if (step == 3) { /* the batch whose error is reported changes nothing */
      s.model.fail_replica = (int32_t)the_host.num_devices - 1;
      s.model.fail_in = where;
      check_model_error(train_on(&s, &b, LR));
      s.model.fail_replica = -1;
      check_weights(&s, &expected, 0, "after the failed batch");
      CHECK_THAT(s.model.num_graphs == 0, "its graphs are released: %d left", (int)s.model.num_graphs);
      continue;
    }
    update_reference(&expected, &b, LR);
    if (!SUCCEEDS(train_on(&s, &b, LR))) break;
    check_weights(&s, &expected, 1e-6, "after a step");
    read_weights_of(&s, &expected);
  }
  close_session(&s);
}

static void error_in_step(void) { model_error_comes_back(MLP_IN_STEP); }
static void error_in_backward(void) { model_error_comes_back(MLP_IN_BACKWARD); }

static void an_error_clears_the_gradients(void) {
  session s;
  batch lost, failing, b;
  weights expected;
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&lost, 4, 1);
  make_batch(&failing, 4, 2);
  make_batch(&b, 9, 3);
  first_weights(&expected);
  update_reference(&expected, &b, LR);
  stg_tree first = batch_tree(&lost, 0), second = batch_tree(&failing, 0);
  if (SUCCEEDS(train_batch(&s, NULL, &first, LR, 0, &result, NULL))) release_tree(&result.outputs);
  s.model.fail_replica = (int32_t)the_host.num_devices - 1;
  s.model.fail_in = MLP_IN_STEP;
  check_model_error(training_step(&s, &second, &result));
  s.model.fail_replica = -1;
  SUCCEEDS(train_on(&s, &b, LR));
  check_weights(&s, &expected, 1e-6, "after a new window");
  close_session(&s);
}

static void error_in_setup(void) {
  session s;
  batch b;
  new_mlp(&s.model, 1);
  s.model.fail_replica = (int32_t)the_host.num_devices - 1;
  s.model.fail_in = MLP_IN_REPLICATE;
  s.strategy = make_strategy(1, 0, NULL);
  if (s.strategy == NULL) return;
  check_model_error(set_up(&s, STG_STAGE_FIT, NULL));
  CHECK_THAT(s.model.num_replicas == 0 && s.model.num_references == 0, "a failed setup lets the model go");
  s.model.fail_replica = -1;
  make_batch(&b, 4, 1);
  if (SUCCEEDS(set_up(&s, STG_STAGE_FIT, NULL))) SUCCEEDS(train_on(&s, &b, LR));
  close_session(&s);
}

/* ---- batches that can't be ---- */

static void rows_that_disagree(void) {
  session s;
  batch b;
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 8, 1);
  stg_tree tree = batch_tree(&b, 0);
  tree.root.as.entries[1].value.as.tensor->view.shape[0] = 6;
  stg_error* error = training_step(&s, &tree, &result);
  if (CHECK(error != NULL)) {
    CHECK(text_has(error->message, "inputs") && text_has(error->message, "targets"));
    CHECK(text_has(error->message, "8") && text_has(error->message, "6"));
  }
  FAILS(error, STG_INVALID_ARGUMENT, NULL);
  CHECK_THAT(tree.release == NULL, "a moved batch is consumed on an error too");
  SUCCEEDS(train_on(&s, &b, LR));
  close_session(&s);
}

static void no_rows(void) {
  session s;
  batch b;
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 0, 1);
  stg_tree tree = batch_tree(&b, 0);
  FAILS(training_step(&s, &tree, &result), STG_INVALID_ARGUMENT, NULL);
  tree = batch_tree(&b, 0);
  if (SUCCEEDS(validation_step(&s, &tree, &result))) {
    CHECK_THAT(result.num_weights == 1 && result.weights[0] == 0, "in evaluation it runs on the root alone");
    release_tree(&result.outputs);
  }
  close_session(&s);
}

static void trees_that_can_not_be(void) {
  session s;
  stg_step_result result;
  stg_value self[1];
  stg_tree tree;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  memset(&tree, 0, sizeof tree);
  memset(self, 0, sizeof self);
  self[0].type = STG_LIST;
  self[0].count = 1;
  self[0].as.items = self; /* a cycle: as deep as one likes */
  tree.root = self[0];
  FAILS(training_step(&s, &tree, &result), STG_INVALID_ARGUMENT, NULL);
  tree.root.type = 77;
  tree.root.count = 0;
  FAILS(training_step(&s, &tree, &result), STG_INVALID_ARGUMENT, NULL);
  tree.root.type = STG_TENSOR;
  tree.root.as.tensor = NULL;
  FAILS(training_step(&s, &tree, &result), STG_INVALID_ARGUMENT, NULL);
  close_session(&s);
}

/* ---- order of calls ---- */

static void order_is_checked(void) {
  session s;
  batch b;
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 5, 1);
  FAILS(the_host.api->backward(s.strategy, NULL, 0), STG_FAILED_PRECONDITION, NULL);
  FAILS(optimizer_step(&s, LR, NULL), STG_FAILED_PRECONDITION, NULL);
  FAILS(set_up(&s, STG_STAGE_FIT, NULL), STG_FAILED_PRECONDITION, NULL);
  stg_tree first = batch_tree(&b, 0), second = batch_tree(&b, 0);
  if (SUCCEEDS(training_step(&s, &first, &result))) release_tree(&result.outputs);
  if (SUCCEEDS(training_step(&s, &second, &result))) release_tree(&result.outputs); /* drops the graphs of the first */
  SUCCEEDS(the_host.api->backward(s.strategy, NULL, STG_BATCH_LAST_MICRO_BATCH));
  CHECK(s.model.num_graphs == 0);
  FAILS(the_host.api->backward(s.strategy, NULL, 0), STG_FAILED_PRECONDITION, NULL);
  SUCCEEDS(the_host.api->zero_grad(s.strategy, NULL));
  FAILS(optimizer_step(&s, LR, NULL), STG_FAILED_PRECONDITION, NULL);
  close_session(&s);
}

/* ---- time ---- */

static void check_time_error(session* s, stg_error* error) {
  batch b;
  make_batch(&b, 6, 2);
  if (!CHECK(error != NULL)) return;
  const int is_usable = (error->flags & STG_ERROR_INSTANCE_USABLE) != 0,
            is_draining = (error->flags & STG_ERROR_INSTANCE_DRAINING) != 0;
  CHECK_THAT(is_usable != is_draining, "it says whether the instance is usable or draining: flags %u", error->flags);
  error->release(error);
  s->model.slow_replica = -1;
  if (is_usable) {
    SUCCEEDS(train_on(s, &b, LR));
    return;
  }
  stg_status status;
  memset(&status, 0, sizeof status);
  status.struct_size = sizeof status;
  SUCCEEDS(the_host.api->status(s->strategy, &status));
  CHECK(status.state == STG_STATE_DRAINING);
  FAILS(train_on(s, &b, LR), STG_FAILED_PRECONDITION, NULL);
}

static stg_call call_until(uint64_t deadline_ns, const uint32_t* cancel) {
  stg_call call;
  memset(&call, 0, sizeof call);
  call.struct_size = sizeof call;
  call.deadline_ns = deadline_ns;
  call.cancel = cancel;
  return call;
}

static void a_deadline_ends_the_call(void) {
  session s;
  batch b;
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, 1);
  s.model.slow_replica = (int32_t)the_host.num_devices - 1;
  const stg_call call = call_until(clock_ns() + 50000000u, NULL);
  stg_tree tree = batch_tree(&b, 0);
  stg_error* error = train_batch(&s, &call, &tree, LR, STG_BATCH_LAST_MICRO_BATCH, &result, NULL);
  if (error == NULL && the_host.num_devices == 1) { /* the calling thread alone never blocked, so nobody read the clock */
    CHECK(s.model.num_steps == 1);
    release_tree(&result.outputs);
    close_session(&s);
    return;
  }
  if (CHECK(error != NULL))
    CHECK_THAT(error->code == STG_DEADLINE_EXCEEDED, "the code is deadline_exceeded, not %u", error->code);
  check_time_error(&s, error);
  close_session(&s);
}

static void a_cancel_flag_ends_the_call(void) {
  session s;
  batch b;
  stg_step_result result;
  const uint32_t cancel = 1;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, 1);
  const stg_call call = call_until(0, &cancel);
  stg_tree tree = batch_tree(&b, 0);
  stg_error* error = train_batch(&s, &call, &tree, LR, STG_BATCH_LAST_MICRO_BATCH, &result, NULL);
  if (CHECK(error != NULL)) CHECK_THAT(error->code == STG_CANCELLED, "the code is cancelled, not %u", error->code);
  check_time_error(&s, error);
  close_session(&s);
}

static void* abort_soon(void* strategy) {
  the_host.api->abort(strategy);
  return NULL;
}

static void an_abort_ends_the_instance(void) {
  session s;
  batch b;
  pthread_t thread;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, 1);
  SUCCEEDS(train_on(&s, &b, LR));
  pthread_create(&thread, NULL, abort_soon, s.strategy);
  stg_error* error = train_on(&s, &b, LR); /* in time or not: both are right */
  if (error != NULL) {
    CHECK(error->code == STG_ABORTED || error->code == STG_FAILED_PRECONDITION);
    error->release(error);
  }
  pthread_join(thread, NULL);
  FAILS(train_on(&s, &b, LR), STG_FAILED_PRECONDITION, NULL);
  FAILS(the_host.api->teardown(s.strategy, NULL), STG_FAILED_PRECONDITION, NULL);
  close_session(&s);
}

DEFINE_CHECKS(failure_checks,
              {"model-error-in-step",
               "A model's error in a step comes back as cause with replica and device, changes nothing, and the next batch works",
               "C1", NEEDS_STRATEGY, error_in_step},
              {"model-error-in-backward", "So does one in backward, half of whose gradients were reported", "C1", NEEDS_STRATEGY,
               error_in_backward},
              {"error-clears-gradients", "An error clears the gradients of the micro-batches before it", "H", NEEDS_STRATEGY,
               an_error_clears_the_gradients},
              {"model-error-in-setup", "An error in setup lets the model go, and setup can be tried again", "C1", NEEDS_STRATEGY,
               error_in_setup},
              {"rows-that-disagree-refused",
               "Tensors of 8 and 6 rows are refused with both paths and numbers, and the moved batch is consumed", "C4",
               NEEDS_STRATEGY, rows_that_disagree},
              {"no-rows", "A batch of no rows is an error in training and runs on the root in evaluation", "H", NEEDS_STRATEGY,
               no_rows},
              {"tree-nonsense-refused", "A cycle, a value of type 77 and a null tensor are refused", "E1",
               NEEDS_STRATEGY | IS_ONCE, trees_that_can_not_be},
              {"step-order",
               "backward and optimizer_step without a forward are refused, and a second forward drops the first's graphs", "H",
               NEEDS_STRATEGY, order_is_checked},
              {"deadline-ends-call",
               "A deadline that passes in a replica ends the call, and the error says whether the instance is usable or draining",
               "F4", NEEDS_STRATEGY | IS_TIMED, a_deadline_ends_the_call},
              {"cancel-flag-ends-call", "A cancel flag that is set ends the call as cancelled", "F4", NEEDS_STRATEGY,
               a_cancel_flag_ends_the_call},
              {"abort-leaves-destroy", "An abort from another thread leaves only destroy", "F4", NEEDS_STRATEGY,
               an_abort_ends_the_instance});
