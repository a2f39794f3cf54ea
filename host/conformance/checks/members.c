/* SPDX-License-Identifier: Apache-2.0
 *
 * Members of the interface that many strategies lack: announced batches, gradients for a host's own optimizer, reductions of trees, and
 * what moves a tree without changing it. A strategy that says "unimplemented" is not asked for more.
 */
#include <stdlib.h>
#include <string.h>

#include "conformance/checks/check.h"

#define LR 0.2

/* ---- announced batches ---- */

static stg_error* announce(const session* s, stg_tree* tree, uint64_t* ticket) {
  stg_transfer_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.batch = tree;
  args.device.index = -1;
  return the_host.api->announce_batch(s->strategy, NULL, &args, STG_STAGE_FIT, ticket);
}

static stg_error* train_announced(const session* s, uint64_t ticket) {
  stg_update_args update;
  stg_step_args args;
  stg_step_result result;
  memset(&update, 0, sizeof update);
  memset(&args, 0, sizeof args);
  memset(&result, 0, sizeof result);
  update.struct_size = sizeof update;
  update.lr = LR;
  args.struct_size = sizeof args;
  args.announced = ticket;
  args.update = &update;
  args.flags = STG_BATCH_LAST_MICRO_BATCH;
  result.struct_size = sizeof result;
  stg_error* error = the_host.api->train_batch(s->strategy, NULL, &args, &result, NULL);
  if (error == NULL) release_tree(&result.outputs);
  return error;
}

static void announced_batches_train_alike(void) {
  session with, without;
  batch b;
  uint64_t ticket = 0;
  if (!open_session(&with, 0, 0, STG_STAGE_FIT) || !open_session(&without, 0, 0, STG_STAGE_FIT)) return;
  for (int step = 0; step < 3; ++step) {
    make_batch(&b, 5 + 2 * step, the_host.seed + (uint32_t)step);
    stg_tree tree = batch_tree(&b, 0);
    if (!SUCCEEDS(announce(&with, &tree, &ticket))) break;
    CHECK_THAT(ticket != 0 && tree.release == NULL, "a ticket is not 0, and the batch is consumed");
    SUCCEEDS(train_announced(&with, ticket));
    SUCCEEDS(train_on(&without, &b, LR));
    check_equal_weights(&with, &without, "after an announced batch");
  }
  stg_error* error = train_announced(&with, ticket);
  if (CHECK_THAT(error != NULL, "a ticket is used up by one step")) error->release(error);
  close_session(&with);
  close_session(&without);
}

/* ---- gradients ---- */

static void gradients_are_the_reduced_ones(void) {
  static const char* const names[] = {"hidden.weight", "hidden.bias", "out.weight", "out.bias"};
  session s;
  batch b;
  weights at, gradient;
  stg_step_result result;
  stg_tree out;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 7, the_host.seed);
  first_weights(&at);
  memset(&gradient, 0, sizeof gradient);
  memset(&out, 0, sizeof out);
  run_reference(&at, 7, b.inputs, b.targets, NULL, 0, 1, NULL, &gradient);
  stg_tree tree = batch_tree(&b, 0);
  if (SUCCEEDS(training_step(&s, &tree, &result))) release_tree(&result.outputs);
  SUCCEEDS(the_host.api->backward(s.strategy, NULL, STG_BATCH_LAST_MICRO_BATCH));
  if (SUCCEEDS(the_host.api->gradients(s.strategy, NULL, &out))) {
    for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
      const stg_value* value = find_key(&out.root, names[p]);
      if (!CHECK_THAT(value != NULL && value->type == STG_TENSOR, "%s has a gradient", names[p])) continue;
      for (int64_t i = 0; i < mlp_numel[p]; ++i) {
        const double got = element(value->as.tensor, i);
        CHECK_THAT(is_close(got, gradient.of[p][i], 1e-6), "%s[%d] is %g, expected %g", names[p], (int)i, got, gradient.of[p][i]);
      }
    }
  }
  release_tree(&out);
  close_session(&s);
}

/* ---- reductions of trees ---- */

static void trees_are_reduced(void) {
  static const double expected[] = {2.5, 15, -3, 7.5};
  static const char* const keys[] = {"numbers"};
  static const double numbers[] = {-3, 7.5, 1.5, 4, 4, 1};
  static const int64_t shape[] = {2, 3};
  session s;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  for (uint32_t op = STG_REDUCE_MEAN; op <= STG_REDUCE_MAX; ++op) {
    stg_tree out;
    stg_tensor* tensor = new_float32(2, shape);
    for (int i = 0; i < 6; ++i) set_element(tensor, i, numbers[i]);
    stg_tree tree = new_dict(1, keys, &tensor), view = borrowed(&tree);
    memset(&out, 0, sizeof out);
    if (SUCCEEDS(the_host.api->reduce(s.strategy, NULL, &view, op, &out))) {
      const stg_value* value = find_key(&out.root, "numbers");
      const int is_tensor = value != NULL && value->type == STG_TENSOR;
      if (is_tensor && the_host.num_devices == 1 && value->as.tensor->view.num_dims == 2) {
        CHECK_THAT(element(value->as.tensor, 1) == 7.5, "what one device leaves as it is, is as it was");
      } else if (CHECK_THAT(is_tensor && value->as.tensor->view.num_dims == 0, "op %u gives a number", op)) {
        const double got = element(value->as.tensor, 0);
        CHECK_THAT(is_close(got, expected[op], 1e-6), "op %u gives %g, not %g", op, expected[op], got);
      }
      release_tree(&out);
    }
    release_tree(&tree);
  }
  stg_tensor* tensor = new_float32(2, shape);
  stg_tree out, tree = new_dict(1, keys, &tensor);
  memset(&out, 0, sizeof out);
  FAILS_AS(the_host.api->reduce(s.strategy, NULL, &tree, 77, &out), STG_INVALID_ARGUMENT, STG_UNIMPLEMENTED);
  close_session(&s);
}

/* ---- what moves a tree ---- */

static void check_same_batch(const stg_tree* out, const batch* b, const char* what) {
  const stg_value *inputs = find_key(&out->root, "inputs"), *targets = find_key(&out->root, "targets");
  if (!CHECK_THAT(out->root.type == STG_DICT && out->root.count == 2, "%s: a dict of 2", what)) return;
  CHECK_THAT(text_has(out->root.as.entries[0].key, "inputs"), "%s: keys are in their order", what);
  if (!CHECK_THAT(inputs != NULL && inputs->type == STG_TENSOR && targets != NULL && targets->type == STG_TENSOR,
                  "%s: both tensors", what))
    return;
  CHECK_THAT(count_elements(inputs->as.tensor) == b->num_rows * MLP_NUM_FEATURES, "%s: all of the inputs", what);
  for (int64_t i = 0; i < b->num_rows; ++i) {
    CHECK_THAT(element(inputs->as.tensor, i * MLP_NUM_FEATURES) == (double)b->inputs[i][0], "%s: row %d of the inputs", what,
               (int)i);
    CHECK_THAT(element(targets->as.tensor, i) == (double)b->targets[i], "%s: row %d of the targets", what, (int)i);
  }
}

static void moves_keep_all(void) {
  session s;
  batch b;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, the_host.seed);
  static const char* const names[] = {"to_host", "all_gather", "batch_to_device"};
  for (int which = 0; which < 3; ++which) {
    for (int is_moved = 0; is_moved < 2; ++is_moved) {
      stg_tree out, tree = batch_tree(&b, 0), view = borrowed(&tree);
      stg_tree* given = is_moved ? &tree : &view;
      stg_transfer_args args;
      memset(&args, 0, sizeof args);
      memset(&out, 0, sizeof out);
      args.struct_size = sizeof args;
      args.batch = given;
      args.device.index = -1;
      stg_error* error = which == 0   ? the_host.api->to_host(s.strategy, NULL, given, &out)
                         : which == 1 ? the_host.api->all_gather(s.strategy, NULL, given, &out)
                                      : the_host.api->batch_to_device(s.strategy, NULL, &args, &out);
      if (error != NULL) {
        FAILS(error, STG_UNIMPLEMENTED, NULL);
      } else {
        CHECK_THAT((tree.release == NULL) == is_moved, "%s consumes what is moved and nothing else", names[which]);
        check_same_batch(&out, &b, names[which]);
        release_tree(&out);
      }
      release_tree(&tree);
    }
  }
  close_session(&s);
}

/* ---- flags ---- */

static void unknown_flags_are_refused(void) {
  const uint64_t unknown = UINT64_C(1) << 40;
  const stg_create_args create = {sizeof create, plain_config(), NULL, unknown};
  session s;
  batch b;
  stg_strategy* made = NULL;
  stg_step_args args;
  stg_step_result result;
  stg_tree out;
  const stg_strategy_api* api = the_host.api;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, 1);
  memset(&args, 0, sizeof args);
  memset(&result, 0, sizeof result);
  memset(&out, 0, sizeof out);
  args.struct_size = sizeof args;
  args.flags = unknown;
  result.struct_size = sizeof result;
  FAILS_AS(api->create(&create, &made), STG_UNIMPLEMENTED, STG_INVALID_ARGUMENT);
  CHECK(made == NULL);
  stg_tree tree = batch_tree(&b, 0);
  args.batch = &tree;
  FAILS_AS(api->training_step(s.strategy, NULL, &args, &result), STG_UNIMPLEMENTED, STG_INVALID_ARGUMENT);
  tree = batch_tree(&b, 0);
  FAILS_AS(api->train_batch(s.strategy, NULL, &args, &result, NULL), STG_UNIMPLEMENTED, STG_INVALID_ARGUMENT);
  FAILS_AS(api->backward(s.strategy, NULL, unknown), STG_UNIMPLEMENTED, STG_INVALID_ARGUMENT);
  FAILS_AS(api->export_state(s.strategy, NULL, unknown, &out), STG_UNIMPLEMENTED, STG_INVALID_ARGUMENT);
  tree = batch_tree(&b, 0);
  FAILS_AS(api->import_state(s.strategy, NULL, &tree, unknown, NULL), STG_UNIMPLEMENTED, STG_INVALID_ARGUMENT);
  close_session(&s);
}

/* ---- one caller per replica ---- */

static void a_replica_has_one_caller(void) {
  session s;
  batch b;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, 1);
  SUCCEEDS(train_on(&s, &b, LR));
  s.model.slow_replica = 0;
  SUCCEEDS(train_on(&s, &b, LR));
  CHECK_THAT(s.model.num_overlaps == 0, "a replica is called by one thread at a time: %d calls came into another",
             (int)s.model.num_overlaps);
  close_session(&s);
}

DEFINE_CHECKS(member_checks,
              {"announced-batch-alike",
               "3 announced batches train like the same ones handed over, bitwise, and a ticket is used up by one step", "H",
               NEEDS_STRATEGY, announced_batches_train_alike},
              {"gradients-reduced", "gradients gives the reduced gradient of each parameter by its name, to 1e-6", "H",
               NEEDS_STRATEGY, gradients_are_the_reduced_ones},
              {"tree-reduced-by-each-op",
               "reduce makes one number of a tensor of 6, by mean, sum, min and max, and refuses op 77", "H", NEEDS_STRATEGY,
               trees_are_reduced},
              {"moves-keep-all", "to_host, all_gather and batch_to_device give back the same tree, moved or borrowed", "E3",
               NEEDS_STRATEGY, moves_keep_all},
              {"unknown-flags-refused",
               "A flag of 2^40 is refused by create, training_step, train_batch, backward, export_state and import_state", "B2",
               NEEDS_STRATEGY | IS_ONCE, unknown_flags_are_refused},
              {"replica-one-caller", "No call of a replica begins while another of it runs, though its step takes 300 ms", "F1",
               NEEDS_STRATEGY | IS_ONCE, a_replica_has_one_caller});
