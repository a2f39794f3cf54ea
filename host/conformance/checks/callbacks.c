/* SPDX-License-Identifier: Apache-2.0
 *
 * What goes on while a strategy is inside the model: errors on their way out, abort and destroy from there, what the model gives that
 * nobody can use, and its optional slots.
 */
#include <string.h>

#include "conformance/checks/check.h"

#define LR 0.3

/* ---- the model's own error ---- */

static void check_origin(stg_error* error, const void* maker) {
  if (!CHECK(error != NULL)) return;
  const stg_error* last = error;
  while (last->cause != NULL) last = last->cause;
  CHECK_THAT(last != error && last->owner == maker, "the last cause is the object that its maker made, by its owner");
  CHECK_THAT(error->flags == (STG_ERROR_INSTANCE_USABLE | STG_ERROR_RETRYABLE), "the flags are usable and retryable, not %u",
             error->flags);
  error->release(error);
}

/* What the model's error says of an instance is about the model's own; that trying again can help is handed on. */
static void errors_of_the_model_are_causes(void) {
  session s;
  batch b;
  stg_status status;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, 1);
  s.model.fail_flags = STG_ERROR_INSTANCE_DRAINING | STG_ERROR_RETRYABLE;
  s.model.fail_replica = (int32_t)the_host.num_devices - 1;
  for (s.model.fail_in = MLP_IN_STEP; s.model.fail_in <= MLP_IN_BACKWARD; ++s.model.fail_in) {
    check_origin(train_on(&s, &b, LR), &s.model);
  }
  s.model.fail_replica = -1;
  memset(&status, 0, sizeof status);
  status.struct_size = sizeof status;
  SUCCEEDS(the_host.api->status(s.strategy, &status));
  CHECK_THAT(status.state == STG_STATE_FIT, "the instance is not draining: state %u", status.state);
  SUCCEEDS(train_on(&s, &b, LR));
  close_session(&s);
}

/* ---- a storage's own error ---- */

static int64_t num_storage_errors;

static void release_storage_error(stg_error* self) {
  (void)self;
  --num_storage_errors;
}

static stg_error* begin_nothing(void* self, stg_string path, void** transaction) {
  static const char text[] = "the tape is full";
  static stg_error error;
  (void)path;
  (void)transaction;
  memset(&error, 0, sizeof error);
  error.code = STG_RESOURCE_EXHAUSTED;
  error.flags = STG_ERROR_INSTANCE_DRAINING | STG_ERROR_RETRYABLE;
  error.replica = error.rank = error.device.index = -1;
  error.message.data = text;
  error.message.size_bytes = sizeof text - 1;
  error.release = release_storage_error;
  error.owner = self;
  ++num_storage_errors;
  return &error;
}

static stg_error* commit_nothing(void* self, void* transaction) {
  (void)self;
  (void)transaction;
  return NULL;
}

static void roll_nothing_back(void* self, void* transaction) {
  (void)self;
  (void)transaction;
}

static void errors_of_the_storage_are_causes(void) {
  session s;
  batch b;
  stg_storage storage;
  stg_host services;
  stg_checkpoint_args args;
  memset(&storage, 0, sizeof storage);
  memset(&services, 0, sizeof services);
  memset(&args, 0, sizeof args);
  storage.struct_size = sizeof storage;
  storage.self = &storage;
  storage.begin = begin_nothing;
  storage.commit = commit_nothing;
  storage.rollback = roll_nothing_back;
  services.struct_size = sizeof services;
  services.storage = &storage;
  args.struct_size = sizeof args;
  args.path.data = "last";
  args.path.size_bytes = 4;
  new_mlp(&s.model, 1);
  s.strategy = make_strategy(1, 0, &services);
  if (s.strategy == NULL || !SUCCEEDS(set_up(&s, STG_STAGE_FIT, NULL))) return;
  stg_error* error = the_host.api->save(s.strategy, NULL, &args);
  if (error != NULL && error->code == STG_UNIMPLEMENTED) {
    error->release(error); /* a strategy may have no checkpoints */
  } else {
    if (error != NULL) CHECK(text_has(error->message, "the tape is full"));
    check_origin(error, &storage);
  }
  CHECK_THAT(num_storage_errors == 0, "the storage's error is released once: %d are left", (int)num_storage_errors);
  make_batch(&b, 6, 1);
  SUCCEEDS(train_on(&s, &b, LR));
  close_session(&s);
}

/* ---- abort and destroy from inside ---- */

static void check_aborted(session* s, stg_error* error) {
  stg_status status;
  if (error != NULL) CHECK((error->flags & STG_ERROR_INSTANCE_DRAINING) != 0);
  FAILS(error, STG_ABORTED, "abort");
  memset(&status, 0, sizeof status);
  status.struct_size = sizeof status;
  SUCCEEDS(the_host.api->status(s->strategy, &status));
  CHECK_THAT(status.state == STG_STATE_DRAINING, "the instance is draining: state %u", status.state);
  s->model.aborts = NULL;
  close_session(s);
}

static void an_abort_in_setup(void) {
  session s;
  new_mlp(&s.model, 1);
  s.strategy = make_strategy(1, 0, NULL);
  if (s.strategy == NULL) return;
  s.model.aborts = s.strategy;
  s.model.abort_in = MLP_IN_REPLICATE;
  check_aborted(&s, set_up(&s, STG_STAGE_FIT, NULL));
}

static void an_abort_in_teardown(void) {
  session s;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  s.model.aborts = s.strategy;
  s.model.abort_in = MLP_IN_DESTROY;
  check_aborted(&s, the_host.api->teardown(s.strategy, NULL));
}

static void a_destroy_from_inside_is_ignored(void) {
  session s;
  batch b;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, 1);
  s.model.destroys = s.strategy; /* on the last replica: on a thread of the strategy's, where it has any */
  stg_error* error = train_on(&s, &b, LR);
  s.model.destroys = NULL;
  if (SUCCEEDS(error)) SUCCEEDS(train_on(&s, &b, LR));
  close_session(&s);
}

/* ---- what nobody can use is released all the same ---- */

static void bad_denominators_are_released(void) {
  static const int64_t shape[] = {2};
  session s;
  batch b;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, 1);
  for (int i = 0; i < 4; ++i) {
    const int64_t before = num_live_tensors;
    stg_tensor* denominator = new_float32(i == 0, shape);
    if (i == 1) denominator->dlpack_major = 9;
    if (i == 2) set_element(denominator, 0, -1);
    if (i == 3) denominator->view.device.kind = STG_DEVICE_CUDA;
    if (i == 3) denominator->view.data = (void*)4096;
    s.model.denominator = denominator;
    stg_error* error = train_on(&s, &b, LR);
    CHECK_THAT(error != NULL, "denominator %d is refused", i);
    if (error != NULL) error->release(error);
    CHECK_THAT(num_live_tensors == before, "denominator %d: %d tensors are left", i, (int)(num_live_tensors - before));
  }
  SUCCEEDS(train_on(&s, &b, LR));
  close_session(&s);
}

/* The model's shares, one of which can't be, or a count that is a lie (1: the truth). */
static uint64_t told_shares = 1;
static int bad_share;

static stg_error* split_badly(void* self, stg_replica* replica, const stg_tree* whole, uint64_t num_shares, stg_tree* shares,
                              uint64_t* num_filled) {
  stg_error* error = mlp_split(self, replica, whole, num_shares, shares, num_filled);
  if (bad_share) shares[0].root.as.entries[1].value.as.tensor->dlpack_major = 9;
  if (told_shares != 1) *num_filled = told_shares;
  return error;
}

static int open_with_split(session* out) {
  new_mlp(&out->model, 1);
  out->model.table.split = the_host.num_devices > 1 ? split_badly : mlp_split;
  out->strategy = make_strategy(1, 0, NULL);
  return out->strategy != NULL && SUCCEEDS(set_up(out, STG_STAGE_FIT, NULL));
}

static void bad_shares_are_released(void) {
  static const uint64_t told[] = {1, 0, 99};
  session s;
  batch b;
  if (!open_with_split(&s)) return;
  make_batch(&b, 6, 1);
  for (int i = 0; i < 3 && the_host.num_devices > 1; ++i) {
    const int64_t tensors = num_live_tensors, trees = num_live_trees;
    told_shares = told[i];
    bad_share = i == 0;
    FAILS(train_on(&s, &b, LR), STG_INVALID_ARGUMENT, i == 0 ? "share" : "split");
    CHECK_THAT(num_live_tensors == tensors && num_live_trees == trees, "split %d: %d tensors and %d trees are left", i,
               (int)(num_live_tensors - tensors), (int)(num_live_trees - trees));
  }
  told_shares = 1;
  bad_share = 0;
  SUCCEEDS(train_on(&s, &b, LR));
  close_session(&s);
}

/* ---- optional slots ---- */

static void a_split_of_the_models_own(void) {
  session s;
  weights expected;
  bad_share = 0;
  told_shares = 1;
  if (!open_with_split(&s)) return;
  first_weights(&expected);
  for (int step = 0; step < 5; ++step) {
    batch b;
    stg_step_result result;
    make_batch(&b, 9, (uint32_t)step);
    update_reference(&expected, &b, LR); /* which equals the shares one after the other */
    stg_tree tree = batch_tree(&b, 0);
    if (!SUCCEEDS(train_batch(&s, NULL, &tree, LR, STG_BATCH_LAST_MICRO_BATCH, &result, NULL))) break;
    CHECK(result.num_weights == the_host.num_devices);
    double left = 9;
    for (uint64_t i = 0; i < result.num_weights; ++i) {
      const double wanted = i + 1 == result.num_weights ? left : (double)i + 1;
      CHECK_THAT(result.weights[i] == wanted, "share %d has the model's %g rows, not %g", (int)i, wanted, result.weights[i]);
      left -= wanted;
    }
    release_tree(&result.outputs);
    check_weights(&s, &expected, 1e-6, "after a step");
    read_weights_of(&s, &expected);
  }
  close_session(&s);
}

static void a_transfer_of_the_models_own(void) {
  session s;
  batch b;
  stg_step_result result;
  stg_step_args args;
  new_mlp(&s.model, 1);
  s.model.table.transfer = mlp_transfer;
  s.strategy = make_strategy(1, 0, NULL);
  if (s.strategy == NULL || !SUCCEEDS(set_up(&s, STG_STAGE_FIT, NULL))) return;
  make_batch(&b, 6, 1);
  for (int64_t index = 3; index < 5; ++index) {
    stg_tree tree = batch_tree(&b, 0);
    memset(&args, 0, sizeof args);
    memset(&result, 0, sizeof result);
    args.struct_size = sizeof args;
    args.batch = &tree;
    args.dataloader_index = index;
    result.struct_size = sizeof result;
    if (SUCCEEDS(the_host.api->validation_step(s.strategy, NULL, &args, &result))) release_tree(&result.outputs);
    CHECK_THAT(s.model.dataloader_index == index, "transfer is told dataloader %d, not %d", (int)index,
               (int)s.model.dataloader_index);
  }
  SUCCEEDS(train_on(&s, &b, LR));
  close_session(&s);
}

static void half_a_slot_is_no_function(void) {
  session s;
  batch b;
  new_mlp(&s.model, 0);
  s.model.table.struct_size = STG_MODEL_MIN_SIZE + 4; /* 0xab from there on: half of a pointer */
  s.strategy = make_strategy(1, 0, NULL);
  if (s.strategy == NULL) return;
  make_batch(&b, 6, 1);
  if (SUCCEEDS(set_up(&s, STG_STAGE_FIT, NULL))) SUCCEEDS(train_on(&s, &b, LR));
  close_session(&s);
}

/* ---- lent tensors ---- */

static void* release_elsewhere(void* tree) {
  release_tree(tree);
  return NULL;
}

/* Releasing a state may run anything of the strategy's, but nothing of the model's, wherever that happens. */
static void states_outlive_the_model_on_any_thread(void) {
  session s;
  stg_tree state, gradients;
  pthread_t thread;
  batch b;
  stg_step_result result;
  if (!open_session(&s, 0, STG_CREATE_CALLER_THREAD_ONLY, STG_STAGE_FIT)) return;
  s.model.only_caller = 1;
  make_batch(&b, 6, 1);
  memset(&state, 0, sizeof state);
  memset(&gradients, 0, sizeof gradients);
  SUCCEEDS(the_host.api->export_state(s.strategy, NULL, 0, &state));
  stg_tree tree = batch_tree(&b, 0);
  if (SUCCEEDS(training_step(&s, &tree, &result))) release_tree(&result.outputs);
  SUCCEEDS(the_host.api->backward(s.strategy, NULL, STG_BATCH_LAST_MICRO_BATCH));
  stg_error* error = the_host.api->gradients(s.strategy, NULL, &gradients);
  if (error != NULL) FAILS(error, STG_UNIMPLEMENTED, NULL); /* a function that a strategy may lack */
  destroy_strategy(s.strategy);
  s.strategy = NULL;
  CHECK_THAT(s.model.num_replicas == 0 && s.model.num_references == 0, "the model is let go by destroy: %d replicas are left",
             (int)s.model.num_replicas);
  pthread_create(&thread, NULL, release_elsewhere, &state);
  pthread_join(thread, NULL);
  pthread_create(&thread, NULL, release_elsewhere, &gradients);
  pthread_join(thread, NULL);
  close_session(&s);
}

DEFINE_CHECKS(callback_checks,
              {"model-error-is-last-cause",
               "An error that the model made is the last cause, the same object, and only RETRYABLE of its flags is handed on",
               "C1", NEEDS_STRATEGY, errors_of_the_model_are_causes},
              {"storage-error-is-last-cause", "So is one that the host's storage made, and it is released once", "C1",
               NEEDS_STRATEGY | IS_ONCE, errors_of_the_storage_are_causes},
              {"abort-in-setup", "An abort from inside replicate ends setup as aborted, and the instance is draining", "F4",
               NEEDS_STRATEGY | IS_ONCE, an_abort_in_setup},
              {"abort-in-teardown", "An abort from inside destroy_replica ends teardown as aborted, and the instance is draining",
               "F4", NEEDS_STRATEGY | IS_ONCE, an_abort_in_teardown},
              {"destroy-inside-ignored", "A destroy from inside a step, on whatever thread, does nothing", "F1", NEEDS_STRATEGY,
               a_destroy_from_inside_is_ignored},
              {"bad-denominators-released",
               "Denominators of 2 elements, DLPack 9, -1 and of another device are refused and released", "D2",
               NEEDS_STRATEGY | IS_ONCE, bad_denominators_are_released},
              {"bad-shares-released", "Shares of the model's split that nobody can use are refused and released", "D2",
               NEEDS_STRATEGY | NEEDS_DEVICES | IS_ONCE, bad_shares_are_released},
              {"model-split", "Uneven shares of the model's own split train like the same rows on one device", "H",
               NEEDS_STRATEGY, a_split_of_the_models_own},
              {"model-transfer", "The model's transfer gets the share and the index of the dataloader", "H", NEEDS_STRATEGY,
               a_transfer_of_the_models_own},
              {"half-a-slot-is-absent", "A slot that the table's size cuts in two is not called", "B1", NEEDS_STRATEGY | IS_ONCE,
               half_a_slot_is_no_function},
              {"caller-thread-lends-no-replica",
               "With caller_thread_only a state and gradients that are kept keep no replica alive", "D3",
               NEEDS_STRATEGY | NEEDS_CALLER_THREAD | IS_ONCE, states_outlive_the_model_on_any_thread});
