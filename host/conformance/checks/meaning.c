/* SPDX-License-Identifier: Apache-2.0
 *
 * What a strategy means, beyond what training.c compares with a loop: replicas that agree, runs that repeat, what a model and a host
 * are told, states and what is wrong with them.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "conformance/checks/check.h"

#define LR 0.2

/* ---- numbers ---- */

static void replicas_are_equal(void) {
  session s;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  for (int step = 0; step < 5; ++step) {
    batch b;
    make_batch(&b, 3 + 2 * step, the_host.seed + (uint32_t)step);
    SUCCEEDS(train_on(&s, &b, LR));
    for (int32_t replica = 1; replica < (int32_t)the_host.num_devices; ++replica) {
      for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
        CHECK_THAT(
            memcmp(mlp_parameter(&s.model, 0, p), mlp_parameter(&s.model, replica, p), (size_t)mlp_numel[p] * sizeof(float)) == 0,
            "after step %d parameter %d of replica %d is that of the root, bitwise", step, p, (int)replica);
      }
    }
  }
  close_session(&s);
}

static void train_two(session* a, session* b) {
  for (int step = 0; step < 5; ++step) {
    batch rows;
    make_batch(&rows, 4 + 3 * step, the_host.seed + (uint32_t)step);
    SUCCEEDS(train_on(a, &rows, LR));
    SUCCEEDS(train_on(b, &rows, LR));
    check_equal_weights(a, b, "after a step");
  }
}

static void runs_repeat(void) {
  session a, b;
  if (!open_session(&a, 0, 0, STG_STAGE_FIT) || !open_session(&b, 0, 0, STG_STAGE_FIT)) return;
  train_two(&a, &b);
  close_session(&a);
  close_session(&b);
}

static void the_callers_thread_changes_nothing(void) {
  session a, b;
  if (!open_session(&a, 0, 0, STG_STAGE_FIT) || !open_session(&b, 0, STG_CREATE_CALLER_THREAD_ONLY, STG_STAGE_FIT)) return;
  train_two(&a, &b);
  close_session(&a);
  close_session(&b);
}

static void one_row_runs_on_one_replica(void) {
  session s;
  batch b;
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 1, the_host.seed);
  stg_tree tree = batch_tree(&b, 0);
  if (SUCCEEDS(train_batch(&s, NULL, &tree, LR, STG_BATCH_LAST_MICRO_BATCH, &result, NULL))) {
    CHECK_THAT(result.num_weights == 1 && result.weights[0] == 1, "one row is the share of one replica, of weight 1: %u replicas",
               (unsigned)result.num_weights);
    release_tree(&result.outputs);
  }
  CHECK_THAT(s.model.num_steps == 1, "the model runs once, not %d times", (int)s.model.num_steps);
  close_session(&s);
}

static void zero_grad_drops_the_window(void) {
  session s;
  batch lost, b;
  weights expected;
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&lost, 4, the_host.seed);
  make_batch(&b, 7, the_host.seed + 1);
  first_weights(&expected);
  update_reference(&expected, &b, LR);
  stg_tree tree = batch_tree(&lost, 0);
  if (SUCCEEDS(train_batch(&s, NULL, &tree, LR, 0, &result, NULL))) release_tree(&result.outputs);
  SUCCEEDS(the_host.api->zero_grad(s.strategy, NULL));
  SUCCEEDS(train_on(&s, &b, LR));
  check_weights(&s, &expected, 1e-6, "after a micro-batch that was dropped");
  close_session(&s);
}

static double distance_of(const weights* a, const weights* b) {
  double sum = 0;
  for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
    for (int64_t i = 0; i < mlp_numel[p]; ++i) sum += (a->of[p][i] - b->of[p][i]) * (a->of[p][i] - b->of[p][i]);
  }
  return sqrt(sum);
}

static void clipping_limits_the_gradient(void) {
  session s;
  batch b;
  weights before, after;
  stg_step_args args;
  stg_update_args update;
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 7, the_host.seed);
  memset(&args, 0, sizeof args);
  memset(&update, 0, sizeof update);
  memset(&result, 0, sizeof result);
  args.struct_size = sizeof args;
  update.struct_size = sizeof update;
  result.struct_size = sizeof result;
  update.lr = 1;
  update.clip = STG_CLIP_NORM;
  update.clip_limit = 0.01;
  stg_tree tree = batch_tree(&b, 0);
  args.batch = &tree;
  args.update = &update;
  args.flags = STG_BATCH_LAST_MICRO_BATCH;
  read_weights_of(&s, &before);
  if (SUCCEEDS(the_host.api->train_batch(s.strategy, NULL, &args, &result, NULL))) {
    release_tree(&result.outputs);
    read_weights_of(&s, &after);
    const double moved = distance_of(&before, &after);
    CHECK_THAT(moved > 0.0099 && moved < 0.0101, "with the norm clipped to 0.01 and a rate of 1 the weights move by 0.01, not %g",
               moved);
  }
  close_session(&s);
}

static stg_error* update_with(const session* s, const batch* b, double lr, double limit, uint64_t clip) {
  stg_step_args args;
  stg_update_args update;
  stg_step_result result;
  memset(&args, 0, sizeof args);
  memset(&update, 0, sizeof update);
  memset(&result, 0, sizeof result);
  args.struct_size = sizeof args;
  update.struct_size = sizeof update;
  result.struct_size = sizeof result;
  update.lr = lr;
  update.clip = clip;
  update.clip_limit = limit;
  stg_tree tree = batch_tree(b, 0);
  args.batch = &tree;
  args.update = &update;
  args.flags = STG_BATCH_LAST_MICRO_BATCH;
  stg_error* error = the_host.api->train_batch(s->strategy, NULL, &args, &result, NULL);
  if (error == NULL) release_tree(&result.outputs);
  return error;
}

static void updates_are_checked(void) {
  session s;
  batch b;
  weights expected;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 7, the_host.seed);
  first_weights(&expected);
  FAILS(update_with(&s, &b, NAN, 0, STG_CLIP_NONE), STG_INVALID_ARGUMENT, "lr");
  FAILS(update_with(&s, &b, INFINITY, 0, STG_CLIP_NONE), STG_INVALID_ARGUMENT, "lr");
  FAILS(update_with(&s, &b, LR, 1, 77), STG_INVALID_ARGUMENT, "77");
  FAILS_AS(update_with(&s, &b, LR, -1, STG_CLIP_NORM), STG_INVALID_ARGUMENT, STG_UNIMPLEMENTED);
  check_weights(&s, &expected, 0, "after updates that were refused");
  SUCCEEDS(update_with(&s, &b, LR, 0, STG_CLIP_NONE));
  close_session(&s);
}

/* ---- what a host and a model are told ---- */

static stg_status status_of(const session* s) {
  stg_status status;
  memset(&status, 0, sizeof status);
  status.struct_size = sizeof status;
  SUCCEEDS(the_host.api->status(s->strategy, &status));
  return status;
}

static void check_status(const session* s, uint64_t num_micro_batches, uint64_t num_updates, uint64_t has_graph,
                         const char* when) {
  const stg_status now = status_of(s);
  CHECK_THAT(now.state == STG_STATE_FIT && now.stage == STG_STAGE_FIT, "%s: state %u, stage %u", when, now.state, now.stage);
  CHECK_THAT(now.num_micro_batches == num_micro_batches, "%s: %u micro-batches since the update, not %u", when,
             (unsigned)num_micro_batches, (unsigned)now.num_micro_batches);
  CHECK_THAT(now.num_updates == num_updates, "%s: %u updates, not %u", when, (unsigned)num_updates, (unsigned)now.num_updates);
  CHECK_THAT(now.has_graph == has_graph, "%s: a graph waits: %u, not %u", when, (unsigned)has_graph, (unsigned)now.has_graph);
}

static void status_counts(void) {
  session s;
  batch b;
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 7, the_host.seed);
  check_status(&s, 0, 0, 0, "after setup");
  for (uint64_t i = 0; i < 2; ++i) {
    stg_tree tree = batch_tree(&b, 0);
    if (SUCCEEDS(training_step(&s, &tree, &result))) release_tree(&result.outputs);
    check_status(&s, i, 0, 1, "after a forward");
    SUCCEEDS(the_host.api->backward(s.strategy, NULL, 0));
    check_status(&s, i + 1, 0, 0, "after its backward");
  }
  SUCCEEDS(optimizer_step(&s, LR, NULL));
  check_status(&s, 0, 1, 0, "after the update");
  SUCCEEDS(train_on(&s, &b, LR));
  check_status(&s, 0, 2, 0, "after train_batch");
  close_session(&s);
}

static void models_are_told_where(void) {
  session s;
  batch b;
  stg_step_args args;
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 7, the_host.seed);
  for (uint32_t stage = STG_STAGE_FIT; stage <= STG_STAGE_PREDICT; ++stage) {
    stg_tree tree = batch_tree(&b, 0);
    memset(&args, 0, sizeof args);
    memset(&result, 0, sizeof result);
    args.struct_size = sizeof args;
    result.struct_size = sizeof result;
    args.batch = &tree;
    args.batch_index = 11 + stage;
    args.dataloader_index = 22 + stage;
    args.global_step = 33 + stage;
    const stg_strategy_api* api = the_host.api;
    stg_error* error = stage == STG_STAGE_FIT        ? api->training_step(s.strategy, NULL, &args, &result)
                       : stage == STG_STAGE_VALIDATE ? api->validation_step(s.strategy, NULL, &args, &result)
                       : stage == STG_STAGE_TEST     ? api->test_step(s.strategy, NULL, &args, &result)
                                                     : api->predict_step(s.strategy, NULL, &args, &result);
    if (error != NULL) {
      FAILS(error, STG_UNIMPLEMENTED, NULL);
      continue;
    }
    release_tree(&result.outputs);
    const stg_step_context* told = &s.model.last_context;
    CHECK_THAT(told->stage == stage, "stage %u, not %u", stage, told->stage);
    CHECK_THAT(told->batch_index == args.batch_index && told->dataloader_index == args.dataloader_index &&
                   told->global_step == args.global_step,
               "batch %d, dataloader %d, global step %d; the model was told %d, %d, %d", (int)args.batch_index,
               (int)args.dataloader_index, (int)args.global_step, (int)told->batch_index, (int)told->dataloader_index,
               (int)told->global_step);
    CHECK_THAT(told->num_replicas == (int32_t)the_host.num_devices && told->replica == 0, "replica 0 of %d, not %d of %d",
               (int)the_host.num_devices, told->replica, told->num_replicas);
    CHECK_THAT(told->device.kind == STG_DEVICE_CPU && told->device.index == 0, "device {%u, %d}", told->device.kind,
               told->device.index);
  }
  close_session(&s);
}

/* ---- states ---- */

/* The state of `s`, a copy, with parameter hidden.bias renamed to hidden.bia, and a key nobody knows. 0: it can't be had. */
static int spoiled_state(const session* s, stg_tree* state, stg_entry* entries, stg_tree* view) {
  memset(state, 0, sizeof *state);
  if (!SUCCEEDS(the_host.api->export_state(s->strategy, NULL, STG_EXPORT_COPY, state))) return 0;
  if (!CHECK(state->root.type == STG_DICT && state->root.count < 15)) return 0;
  memcpy(entries, state->root.as.entries, state->root.count * sizeof *entries);
  memset(&entries[state->root.count], 0, sizeof *entries);
  entries[state->root.count].key.data = "nobody_knows";
  entries[state->root.count].key.size_bytes = 12;
  const stg_value* model = find_key(&state->root, "model");
  for (uint32_t i = 0; model != NULL && i < model->count; ++i) {
    if (text_has(model->as.entries[i].key, "hidden.bias")) --model->as.entries[i].key.size_bytes;
  }
  memset(view, 0, sizeof *view);
  view->root = state->root;
  view->root.count = state->root.count + 1;
  view->root.as.entries = entries;
  return 1;
}

static int lists(const stg_tree* report, const char* list, const char* name) {
  const stg_value* names = find_key(&report->root, list);
  for (uint32_t i = 0; names != NULL && names->type == STG_LIST && i < names->count; ++i) {
    const stg_string text = {names->as.items[i].as.utf8, names->as.items[i].count};
    if (text_has(text, name)) return 1;
  }
  return 0;
}

static void imports_report(void) {
  session s;
  stg_tree state, view, report;
  stg_entry entries[16];
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  memset(&report, 0, sizeof report);
  if (spoiled_state(&s, &state, entries, &view)) {
    if (SUCCEEDS(the_host.api->import_state(s.strategy, NULL, &view, 0, &report))) {
      CHECK_THAT(lists(&report, "missing", "hidden.bias"), "what is missing is listed");
      CHECK_THAT(lists(&report, "unexpected", "hidden.bia"), "what is unexpected is listed");
      CHECK_THAT(lists(&report, "unknown_keys", "nobody_knows"), "keys that nobody knows are listed");
    }
    release_tree(&report);
    release_tree(&state);
  }
  close_session(&s);
}

static void strict_imports_are_whole(void) {
  session s;
  batch b;
  weights before, after;
  stg_tree state, view;
  stg_entry entries[16];
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  if (spoiled_state(&s, &state, entries, &view)) {
    make_batch(&b, 7, the_host.seed);
    SUCCEEDS(train_on(&s, &b, LR)); /* so that the state's weights are others */
    read_weights_of(&s, &before);
    stg_error* error = the_host.api->import_state(s.strategy, NULL, &view, STG_IMPORT_STRICT, NULL);
    if (CHECK_THAT(error != NULL, "a state that doesn't fit is refused")) {
      CHECK_THAT(text_has(error->message, "hidden.bias"), "the error names hidden.bias: %.*s", (int)error->message.size_bytes,
                 error->message.data);
      error->release(error);
    }
    read_weights_of(&s, &after);
    CHECK_THAT(memcmp(&before, &after, sizeof before) == 0, "a state that is refused changes no weight");
    CHECK_THAT(status_of(&s).num_updates == 1, "and no count of updates");
    release_tree(&state);
  }
  close_session(&s);
}

DEFINE_CHECKS(
    meaning_checks,
    {"replicas-bitwise-equal", "After each of 5 steps of 3 to 11 rows all replicas' parameters are equal, bitwise", "H",
     NEEDS_STRATEGY | NEEDS_DEVICES, replicas_are_equal},
    {"runs-repeat-bitwise", "Two instances that are given the same 5 batches have the same weights, bitwise", "H", NEEDS_STRATEGY,
     runs_repeat},
    {"caller-thread-equal", "With caller_thread_only 5 steps end with the same weights as without, bitwise", "F2",
     NEEDS_STRATEGY | NEEDS_CALLER_THREAD, the_callers_thread_changes_nothing},
    {"one-row-one-replica", "A batch of one row runs on one replica, with weight 1", "H", NEEDS_STRATEGY,
     one_row_runs_on_one_replica},
    {"zero-grad-drops-window", "zero_grad drops the micro-batches before it", "H", NEEDS_STRATEGY, zero_grad_drops_the_window},
    {"clip-norm-limits-update", "With the norm clipped to 0.01 and a learning rate of 1 the weights move by 0.01, to 1 %", "H",
     NEEDS_STRATEGY, clipping_limits_the_gradient},
    {"updates-checked",
     "Learning rates of NaN and infinity, a clipping of kind 77 and a limit of -1 are refused, and change nothing", "B2",
     NEEDS_STRATEGY | IS_ONCE, updates_are_checked},
    {"status-counts",
     "status counts micro-batches and updates and says whether a graph waits, after each call of two micro-batches and two "
     "updates",
     "H", NEEDS_STRATEGY, status_counts},
    {"model-told-where", "A model is told stage, batch, dataloader, global step, replica and device, in each of the 4 stages",
     "H", NEEDS_STRATEGY, models_are_told_where},
    {"import-reports", "An import lists what is missing, unexpected and unknown", "H", NEEDS_STRATEGY | IS_ONCE, imports_report},
    {"import-strict-whole", "A strict import of a state that doesn't fit names what is missing and changes nothing", "H",
     NEEDS_STRATEGY | IS_ONCE, strict_imports_are_whole});
