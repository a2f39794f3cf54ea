/* SPDX-License-Identifier: Apache-2.0
 *
 * Errors (rules C1 to C4): what each has, how long it lives, whose it is; and a model that fails at each of its calls in turn.
 */
#include <string.h>

#include "conformance/checks/check.h"

#define LR 0.2

/* ---- what each has ---- */

static int is_utf8(stg_string text) {
  uint64_t num_following = 0;
  for (uint64_t i = 0; i < text.size_bytes; ++i) {
    const unsigned char byte = (unsigned char)text.data[i];
    if (num_following > 0) {
      if ((byte & 0xc0) != 0x80) return 0;
      --num_following;
    } else if (byte >= 0xf8 || (byte & 0xc0) == 0x80) {
      return 0;
    } else {
      num_following = byte < 0x80 ? 0 : byte < 0xe0 ? 1 : byte < 0xf0 ? 2 : 3;
    }
  }
  return num_following == 0;
}

/* `of_instance`: the flags must say what can be done with it. Releases the error. */
static void check_form(stg_error* error, int of_instance, const char* name) {
  const uint32_t known = STG_ERROR_RETRYABLE | STG_ERROR_INSTANCE_USABLE | STG_ERROR_INSTANCE_DRAINING;
  if (!CHECK_THAT(error != NULL, "%s fails", name)) return;
  const int is_usable = (error->flags & STG_ERROR_INSTANCE_USABLE) != 0,
            is_draining = (error->flags & STG_ERROR_INSTANCE_DRAINING) != 0;
  CHECK_THAT(error->code >= STG_CANCELLED && error->code <= STG_UNAUTHENTICATED, "%s: a code from 1 to 16, not %u", name,
             error->code);
  CHECK_THAT((error->flags & ~known) == 0, "%s: flags from 0 to 7, not %u", name, error->flags);
  if (of_instance) CHECK_THAT(is_usable != is_draining, "%s: either usable or draining, flags %u", name, error->flags);
  CHECK_THAT(error->replica >= -1 && error->replica < (int32_t)the_host.num_devices, "%s: replica %d", name, error->replica);
  CHECK_THAT(error->rank == -1 || error->rank == 0, "%s: rank %d", name, error->rank);
  const int is_no_device = error->device.kind == STG_DEVICE_NONE && error->device.index == -1;
  CHECK_THAT(is_no_device || error->device.kind == STG_DEVICE_CPU, "%s: device {%u, %d}", name, error->device.kind,
             error->device.index);
  CHECK_THAT(error->message.data != NULL && error->message.size_bytes > 0, "%s: a message", name);
  CHECK_THAT(error->message.data == NULL || is_utf8(error->message), "%s: its message is UTF-8", name);
  if (CHECK_THAT(error->release != NULL, "%s: a release", name)) error->release(error);
}

static void errors_are_well_formed(void) {
  session s;
  batch b;
  stg_tree tree, out;
  uint32_t decision = 0;
  const stg_strategy_api* api = the_host.api;
  stg_error* of_create = NULL;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, 1);
  make_strategy_from("{\"devices\": -1}", 0, NULL, &of_create);
  check_form(of_create, 0, "create with a bad config");
  check_form(api->status(NULL, NULL), 0, "status of nothing");
  check_form(api->status(s.strategy, NULL), 1, "status without an output");
  check_form(api->backward(s.strategy, NULL, 0), 1, "backward before a forward");
  check_form(api->reduce_boolean_decision(s.strategy, NULL, 1, 77, &decision), 1, "a decision of an unknown mode");
  check_form(set_up(&s, STG_STAGE_FIT, NULL), 1, "a second setup");
  memset(&tree, 0, sizeof tree);
  memset(&out, 0, sizeof out);
  tree.root.type = 77;
  check_form(api->broadcast(s.strategy, NULL, &tree, 0, &out), 1, "broadcast of a value of type 77");
  s.model.fail_replica = (int32_t)the_host.num_devices - 1;
  s.model.fail_in = MLP_IN_STEP;
  check_form(train_on(&s, &b, LR), 1, "a step whose model fails");
  s.model.fail_replica = -1;
  the_host.api->abort(s.strategy);
  check_form(train_on(&s, &b, LR), 1, "a step after abort");
  close_session(&s);
}

/* ---- how long it lives ---- */

static void errors_outlive_the_instance(void) {
  session s;
  char text[512];
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  stg_error* error = the_host.api->backward(s.strategy, NULL, 0);
  stg_error* other = set_up(&s, 44, NULL); /* must not disturb the first one */
  if (other != NULL) other->release(other);
  if (CHECK(error != NULL && error->message.size_bytes > 0)) {
    const uint64_t size_bytes = error->message.size_bytes < sizeof text ? error->message.size_bytes : sizeof text;
    memcpy(text, error->message.data, size_bytes);
    destroy_strategy(s.strategy);
    s.strategy = NULL;
    CHECK_THAT(memcmp(text, error->message.data, size_bytes) == 0, "the message is the same after destroy: %.*s",
               (int)error->message.size_bytes, error->message.data);
    error->release(error);
  }
  close_session(&s);
}

static void* release_elsewhere(void* error) {
  ((stg_error*)error)->release(error);
  return NULL;
}

static void a_cause_is_released_once(void) {
  for (int where = MLP_IN_STEP; where <= MLP_IN_BACKWARD; ++where) {
    session s;
    batch b;
    pthread_t thread;
    if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
    make_batch(&b, 6, 1);
    s.model.fail_replica = (int32_t)the_host.num_devices - 1;
    s.model.fail_in = where;
    stg_error* error = train_on(&s, &b, LR);
    if (CHECK(error != NULL)) {
      CHECK_THAT(s.model.num_errors == 1, "the model's error lives as long as the one that it caused: %d alive",
                 (int)s.model.num_errors);
      if (pthread_create(&thread, NULL, release_elsewhere, error) == 0) pthread_join(thread, NULL);
    }
    CHECK_THAT(s.model.num_errors == 0, "and is released with it, once: %d alive", (int)s.model.num_errors);
    close_session(&s);
  }
}

/* ---- a model that fails at each of its calls ---- */

typedef struct life {
  session s;
  batch b;
  stg_error* error; /* the first one */
} life;

static int go_on(life* of, stg_error* error) {
  if (error == NULL) return 1;
  if (error->code == STG_UNIMPLEMENTED && of->error == NULL) {
    error->release(error);
    return 1;
  }
  of->error = error;
  return 0;
}

static void live(life* of) {
  stg_step_result result;
  if (!go_on(of, set_up(&of->s, STG_STAGE_FIT, NULL))) return;
  for (int i = 0; i < 2; ++i) {
    if (!go_on(of, train_on(&of->s, &of->b, LR))) return;
  }
  stg_tree tree = batch_tree(&of->b, 0);
  stg_error* error = validation_step(&of->s, &tree, &result);
  if (error == NULL) release_tree(&result.outputs);
  if (!go_on(of, error)) return;
  if (!go_on(of, train_on(&of->s, &of->b, LR))) return;
  go_on(of, the_host.api->teardown(of->s.strategy, NULL));
}

static int comes_from(const stg_error* error, const mlp* model) {
  while (error->cause != NULL) error = error->cause;
  return error->owner == model;
}

/* 1: the model was told to fail, and did. */
static int fail_at(int64_t number) {
  life of;
  stg_status status;
  memset(&of, 0, sizeof of);
  memset(&status, 0, sizeof status);
  status.struct_size = sizeof status;
  new_mlp(&of.s.model, 1);
  make_batch(&of.b, 6, 1);
  of.s.strategy = make_strategy(1, 0, NULL);
  if (of.s.strategy == NULL) return 0;
  of.s.model.fail_at = number;
  live(&of);
  const int has_failed = of.s.model.num_calls >= number;
  if (has_failed && CHECK_THAT(of.error != NULL, "the error of the model's call number %d comes back", (int)number)) {
    CHECK_THAT(comes_from(of.error, &of.s.model), "the error of the model's call number %d is the cause; it is: %.*s",
               (int)number, (int)of.error->message.size_bytes, of.error->message.data);
    SUCCEEDS(the_host.api->status(of.s.strategy, &status));
    const int is_draining = (of.error->flags & STG_ERROR_INSTANCE_DRAINING) != 0;
    CHECK_THAT(is_draining == (status.state == STG_STATE_DRAINING), "call number %d: flags %u, state %u", (int)number,
               of.error->flags, status.state);
    if (status.state == STG_STATE_FIT) SUCCEEDS(train_on(&of.s, &of.b, LR)); /* usable means usable */
    if (status.state == STG_STATE_CREATED && SUCCEEDS(set_up(&of.s, STG_STAGE_FIT, NULL))) SUCCEEDS(train_on(&of.s, &of.b, LR));
  }
  if (of.error != NULL) of.error->release(of.error);
  close_session(&of.s);
  CHECK_THAT(of.s.model.num_errors == 0, "call number %d: %d errors of the model are not released", (int)number,
             (int)of.s.model.num_errors);
  CHECK_THAT(num_live_tensors == 0 && num_live_trees == 0, "call number %d leaves %d tensors and %d trees behind", (int)number,
             (int)num_live_tensors, (int)num_live_trees);
  return has_failed;
}

static void the_model_fails_at_every_call(void) {
  int64_t number = 1;
  while (number < 500 && count_failures() < 20 && fail_at(number)) ++number;
  CHECK_THAT(number > 8, "the model is called at all: it failed %d times", (int)number - 1);
}

/* ---- gradients that can't be ---- */

static void bad_gradients_are_refused(void) {
  static const char* const names[] = {
      "", "an index of 99", "a second gradient", "another shape", "another dtype", "no gradient at all"};
  for (int with_bind = 0; with_bind < 2; ++with_bind) {
    for (int bad = MLP_BAD_INDEX; bad <= MLP_BAD_MISSING; ++bad) {
      session s;
      batch b;
      if (!open_session(&s, !with_bind, 0, STG_STAGE_FIT)) return;
      make_batch(&b, 6, 1);
      const int64_t before = num_live_tensors;
      s.model.bad_gradient = bad;
      stg_error* error = train_on(&s, &b, LR);
      CHECK_THAT(error != NULL, "%s is refused", names[bad]);
      if (error != NULL) error->release(error);
      CHECK_THAT(num_live_tensors == before, "%s: %d tensors are left", names[bad], (int)(num_live_tensors - before));
      s.model.bad_gradient = MLP_BAD_NONE;
      SUCCEEDS(train_on(&s, &b, LR));
      close_session(&s);
    }
  }
}

static void unknown_loss_kinds_are_refused(void) {
  session s;
  new_mlp(&s.model, 1);
  s.model.is_sum = 77;
  s.strategy = make_strategy(1, 0, NULL);
  if (s.strategy == NULL) return;
  FAILS(set_up(&s, STG_STAGE_FIT, NULL), STG_INVALID_ARGUMENT, "77");
  s.model.is_sum = 0;
  SUCCEEDS(set_up(&s, STG_STAGE_FIT, NULL));
  close_session(&s);
}

static void models_are_checked(void) {
  session s;
  new_mlp(&s.model, 1);
  s.strategy = make_strategy(1, 0, NULL);
  if (s.strategy == NULL) return;
  const stg_model whole = s.model.table;
  static const uint64_t sizes[] = {0, STG_MODEL_MIN_SIZE - 8, UINT64_MAX};
  for (int i = 0; i < 3; ++i) {
    s.model.table.struct_size = sizes[i];
    FAILS(set_up(&s, STG_STAGE_FIT, NULL), STG_INVALID_ARGUMENT, NULL);
  }
  s.model.table = whole;
  for (uint64_t offset = offsetof(stg_model, replicate); offset < STG_MODEL_MIN_SIZE; offset += 8) {
    memset((char*)&s.model.table + offset, 0, 8);
    FAILS(set_up(&s, STG_STAGE_FIT, NULL), STG_INVALID_ARGUMENT, NULL);
    s.model.table = whole;
  }
  CHECK_THAT(s.model.num_references == 0 && s.model.num_replicas == 0, "a model that is refused is let go");
  SUCCEEDS(set_up(&s, STG_STAGE_FIT, NULL));
  close_session(&s);
}

/* A table from later headers: slots behind those that are known. */
static void newer_tables_are_taken(void) {
  struct {
    stg_model known;
    uint64_t later[4];
  } table;
  struct {
    stg_host known;
    uint64_t later[4];
  } services;
  session s;
  batch b;
  stg_setup_args args;
  memset(&services, 0, sizeof services);
  memset(services.later, 0xab, sizeof services.later);
  services.known.struct_size = sizeof services;
  new_mlp(&s.model, 1);
  s.strategy = make_strategy(1, 0, &services.known);
  if (s.strategy == NULL) return;
  memset(&table, 0xab, sizeof table);
  table.known = s.model.table;
  table.known.struct_size = sizeof table;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.model = &table.known;
  make_batch(&b, 6, 1);
  if (SUCCEEDS(the_host.api->setup(s.strategy, NULL, &args))) SUCCEEDS(train_on(&s, &b, LR));
  close_session(&s);
}

DEFINE_CHECKS(error_checks,
              {"errors-well-formed",
               "Errors of 9 kinds have a code from 1 to 16, known flags, either usable or draining, a message in UTF-8, places "
               "that there are, and a release",
               "C1", NEEDS_STRATEGY | IS_ONCE, errors_are_well_formed},
              {"error-outlives-instance", "An error's message is the same after another error and after destroy", "C1",
               NEEDS_STRATEGY | IS_ONCE, errors_outlive_the_instance},
              {"cause-released-once",
               "A model's error lives as long as the one that it caused, and is released with it once, on whatever thread", "C1",
               NEEDS_STRATEGY, a_cause_is_released_once},
              {"model-fails-at-every-call",
               "A model that fails at its n-th call, for every n of a setup, 3 batches and an evaluation: each error comes back "
               "as cause, nothing is left, and the instance goes on",
               "C1", NEEDS_STRATEGY, the_model_fails_at_every_call},
              {"bad-gradients-refused",
               "A gradient of index 99, a second one, one of another shape or dtype, and none at all are refused and released, "
               "and the next batch works",
               "E2", NEEDS_STRATEGY | IS_ONCE, bad_gradients_are_refused},
              {"unknown-loss-kind-refused", "A model whose loss_kind is 77 is refused", "B2", NEEDS_STRATEGY | IS_ONCE,
               unknown_loss_kinds_are_refused},
              {"model-table-checked",
               "A model's table of 0, 80 or 2^64 - 1 bytes, or with one of its 7 needed functions null, is refused and let go",
               "B1", NEEDS_STRATEGY | IS_ONCE, models_are_checked},
              {"newer-tables-taken",
               "Tables of a model and of services with 32 bytes behind what is known are taken, and those not called", "B1",
               NEEDS_STRATEGY | IS_ONCE, newer_tables_are_taken});
