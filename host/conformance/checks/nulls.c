/* SPDX-License-Identifier: Apache-2.0
 *
 * Null where there must be something: an error, never a crash; and where there may be nothing: taken. What lies behind an output stays
 * as it is, and an output of a call that failed is as it was.
 */
#include <string.h>

#include "conformance/checks/check.h"

#define LR 0.1

typedef struct everything {
  session s;
  batch b;
  stg_tree tree, out;
  stg_step_args step;
  stg_step_result result;
  stg_transfer_args transfer;
  stg_update_args update;
  const stg_device* devices;
  uint64_t num_devices;
  uint32_t decision;
} everything;

static int open_all(everything* all, uint64_t stage) {
  memset(all, 0, sizeof *all);
  if (!open_session(&all->s, 0, 0, stage)) return 0;
  make_batch(&all->b, 6, 1);
  all->step.struct_size = sizeof all->step;
  all->step.batch = &all->tree;
  all->result.struct_size = sizeof all->result;
  all->transfer.struct_size = sizeof all->transfer;
  all->transfer.batch = &all->tree;
  all->transfer.device.index = -1;
  all->update.struct_size = sizeof all->update;
  all->update.lr = LR;
  return 1;
}

/* A function may be lacking. */
#define REFUSES(call) FAILS_AS(call, STG_INVALID_ARGUMENT, STG_UNIMPLEMENTED)

static void null_arguments(void) {
  everything all;
  const stg_strategy_api* api = the_host.api;
  stg_strategy* made = NULL;
  if (!open_all(&all, STG_STAGE_FIT)) return;
  stg_strategy* self = all.s.strategy;
  REFUSES(api->create(NULL, &made));
  CHECK(made == NULL);
  REFUSES(api->batch_to_device(self, NULL, NULL, &all.out));
  REFUSES(api->announce_batch(self, NULL, NULL, STG_STAGE_FIT, &all.num_devices));
  REFUSES(api->training_step(self, NULL, NULL, &all.result));
  REFUSES(api->train_batch(self, NULL, NULL, &all.result, NULL));
  REFUSES(api->validation_step(self, NULL, NULL, &all.result));
  REFUSES(api->test_step(self, NULL, NULL, &all.result));
  REFUSES(api->predict_step(self, NULL, NULL, &all.result));
  REFUSES(api->save(self, NULL, NULL));
  REFUSES(api->load(self, NULL, NULL, NULL, NULL));
  all.tree = batch_tree(&all.b, 0);
  if (SUCCEEDS(api->training_step(self, NULL, &all.step, &all.result))) release_tree(&all.result.outputs);
  SUCCEEDS(api->backward(self, NULL, 0));
  REFUSES(api->optimizer_step(self, NULL, NULL, NULL));
  SUCCEEDS(api->teardown(self, NULL));
  REFUSES(api->setup(self, NULL, NULL));
  close_session(&all.s);
}

static void null_trees(void) {
  everything all;
  const stg_strategy_api* api = the_host.api;
  if (!open_all(&all, STG_STAGE_FIT)) return;
  stg_strategy* self = all.s.strategy;
  all.step.batch = all.transfer.batch = NULL;
  REFUSES(api->batch_to_device(self, NULL, &all.transfer, &all.out));
  REFUSES(api->broadcast(self, NULL, NULL, 0, &all.out));
  REFUSES(api->all_gather(self, NULL, NULL, &all.out));
  REFUSES(api->reduce(self, NULL, NULL, STG_REDUCE_SUM, &all.out));
  REFUSES(api->to_host(self, NULL, NULL, &all.out));
  REFUSES(api->training_step(self, NULL, &all.step, &all.result));
  REFUSES(api->train_batch(self, NULL, &all.step, &all.result, NULL));
  REFUSES(api->validation_step(self, NULL, &all.step, &all.result));
  REFUSES(api->import_state(self, NULL, NULL, 0, NULL));
  close_session(&all.s);
}

static stg_tree* fresh(everything* all) {
  CHECK_THAT(all->tree.release == NULL, "a moved tree is consumed, though there is nowhere to put the result");
  release_tree(&all->tree);
  all->tree = batch_tree(&all->b, 0);
  return &all->tree;
}

static void null_outputs(void) {
  everything all;
  const stg_strategy_api* api = the_host.api;
  const stg_create_args create = {sizeof create, plain_config(), NULL, 0};
  if (!open_all(&all, STG_STAGE_FIT)) return;
  stg_strategy* self = all.s.strategy;
  REFUSES(api->create(&create, NULL));
  REFUSES(api->status(self, NULL));
  REFUSES(api->ranks(self, NULL));
  REFUSES(api->devices(self, NULL, &all.num_devices));
  REFUSES(api->devices(self, &all.devices, NULL));
  REFUSES(api->describe_parameters(self, NULL));
  REFUSES(api->reduce_boolean_decision(self, NULL, 1, STG_DECIDE_ALL, NULL));
  REFUSES(api->export_state(self, NULL, 0, NULL));
  fresh(&all);
  REFUSES(api->batch_to_device(self, NULL, &all.transfer, NULL));
  REFUSES(api->broadcast(self, NULL, fresh(&all), 0, NULL));
  REFUSES(api->all_gather(self, NULL, fresh(&all), NULL));
  REFUSES(api->reduce(self, NULL, fresh(&all), STG_REDUCE_SUM, NULL));
  REFUSES(api->to_host(self, NULL, fresh(&all), NULL));
  fresh(&all);
  REFUSES(api->training_step(self, NULL, &all.step, NULL));
  fresh(&all);
  REFUSES(api->train_batch(self, NULL, &all.step, NULL, NULL));
  fresh(&all);
  REFUSES(api->validation_step(self, NULL, &all.step, NULL));
  fresh(&all);
  release_tree(&all.tree);
  close_session(&all.s);
}

static void optional_outputs(void) {
  everything all;
  const stg_strategy_api* api = the_host.api;
  stg_tree state;
  const stg_string nothing = {NULL, 0};
  if (!open_all(&all, STG_STAGE_FIT)) return;
  stg_strategy* self = all.s.strategy;
  memset(&state, 0, sizeof state);
  all.tree = batch_tree(&all.b, 0);
  all.step.update = &all.update;
  all.step.flags = STG_BATCH_LAST_MICRO_BATCH;
  if (SUCCEEDS(api->train_batch(self, NULL, &all.step, &all.result, NULL))) release_tree(&all.result.outputs);
  all.tree = batch_tree(&all.b, 0);
  all.step.update = NULL;
  all.step.flags = 0;
  if (SUCCEEDS(api->training_step(self, NULL, &all.step, &all.result))) release_tree(&all.result.outputs);
  SUCCEEDS(api->backward(self, NULL, 0));
  SUCCEEDS(api->optimizer_step(self, NULL, &all.update, NULL));
  SUCCEEDS(api->barrier(self, NULL, nothing));
  if (SUCCEEDS(api->export_state(self, NULL, STG_EXPORT_COPY, &state))) SUCCEEDS(api->import_state(self, NULL, &state, 0, NULL));
  close_session(&all.s);
}

/* ---- what is behind an output ---- */

#define PATTERN UINT64_C(0x3c3c3c3c3c3c3c3c)

typedef struct padded {
  uint64_t words[32];
} padded;

static void fill(padded* out, uint64_t size_bytes) {
  for (int i = 0; i < 32; ++i) out->words[i] = PATTERN;
  if (size_bytes > 0) {
    memset(out, 0, size_bytes);
    out->words[0] = size_bytes;
  }
}

static void check_behind(const padded* out, uint64_t size_bytes, const char* name) {
  for (uint64_t i = (size_bytes + 7) / 8; i < 32; ++i)
    CHECK_THAT(out->words[i] == PATTERN, "%s: nothing is written %u bytes behind its end", name, (unsigned)(i * 8 - size_bytes));
}

static void nothing_is_written_behind(void) {
  everything all;
  const stg_strategy_api* api = the_host.api;
  padded out, second;
  if (!open_all(&all, STG_STAGE_FIT)) return;
  stg_strategy* self = all.s.strategy;
  fill(&out, sizeof(stg_status));
  SUCCEEDS(api->status(self, (void*)&out));
  check_behind(&out, sizeof(stg_status), "stg_status");
  fill(&out, sizeof(stg_ranks));
  SUCCEEDS(api->ranks(self, (void*)&out));
  check_behind(&out, sizeof(stg_ranks), "stg_ranks");
  fill(&out, sizeof(stg_model_description));
  SUCCEEDS(api->describe_parameters(self, (void*)&out));
  check_behind(&out, sizeof(stg_model_description), "stg_model_description");
  fill(&out, sizeof(stg_step_result));
  fill(&second, sizeof(stg_update_result));
  all.tree = batch_tree(&all.b, 0);
  all.step.update = &all.update;
  all.step.flags = STG_BATCH_LAST_MICRO_BATCH;
  if (SUCCEEDS(api->train_batch(self, NULL, &all.step, (void*)&out, (void*)&second))) {
    memcpy(&all.result, &out, sizeof all.result);
    release_tree(&all.result.outputs);
  }
  check_behind(&out, sizeof(stg_step_result), "stg_step_result");
  check_behind(&second, sizeof(stg_update_result), "stg_update_result");
  fill(&out, 0);
  SUCCEEDS(api->reduce_boolean_decision(self, NULL, 1, STG_DECIDE_ALL, (void*)&out));
  CHECK_THAT((out.words[0] >> 32) == (PATTERN >> 32), "a decision is 4 bytes");
  fill(&out, 0);
  fill(&second, 0);
  SUCCEEDS(api->devices(self, (void*)&out, (void*)&second));
  check_behind(&out, 8, "devices");
  check_behind(&second, 8, "num_devices");
  fill(&out, 0);
  all.tree = batch_tree(&all.b, 0);
  if (SUCCEEDS(api->broadcast(self, NULL, &all.tree, 0, (void*)&out))) {
    memcpy(&all.out, &out, sizeof all.out);
    release_tree(&all.out);
  }
  check_behind(&out, sizeof(stg_tree), "stg_tree");
  close_session(&all.s);
}

/* ---- a call that failed ---- */

static void check_untouched(stg_error* error, const padded* out, uint64_t size_bytes, const char* name) {
  padded same;
  fill(&same, 0);
  same.words[0] = size_bytes == 0 ? PATTERN : size_bytes;
  if (!CHECK_THAT(error != NULL, "%s fails", name)) return;
  error->release(error);
  CHECK_THAT(memcmp(out, &same, sizeof same) == 0, "%s has failed and written to its output", name);
}

static padded* unfilled(padded* out, uint64_t size_bytes) {
  fill(out, 0);
  if (size_bytes > 0) out->words[0] = size_bytes;
  return out;
}

static void failures_leave_outputs(void) {
  everything all;
  const stg_strategy_api* api = the_host.api;
  const stg_create_args create = {sizeof create, {"nonsense", 8}, NULL, 0};
  padded out;
  if (!open_all(&all, STG_STAGE_FIT)) return;
  stg_strategy* self = all.s.strategy;
  SUCCEEDS(api->teardown(self, NULL)); /* most are illegal now */
  check_untouched(api->create(&create, (void*)unfilled(&out, 0)), &out, 0, "create");
  check_untouched(api->describe_parameters(self, (void*)unfilled(&out, 48)), &out, 48, "describe_parameters");
  all.tree = batch_tree(&all.b, 0);
  check_untouched(api->training_step(self, NULL, &all.step, (void*)unfilled(&out, 56)), &out, 56, "training_step");
  all.tree = batch_tree(&all.b, 0);
  check_untouched(api->train_batch(self, NULL, &all.step, (void*)unfilled(&out, 56), NULL), &out, 56, "train_batch");
  all.tree = batch_tree(&all.b, 0);
  check_untouched(api->validation_step(self, NULL, &all.step, (void*)unfilled(&out, 56)), &out, 56, "validation_step");
  check_untouched(api->optimizer_step(self, NULL, &all.update, (void*)unfilled(&out, 40)), &out, 40, "optimizer_step");
  check_untouched(api->export_state(self, NULL, 0, (void*)unfilled(&out, 0)), &out, 0, "export_state");
  check_untouched(api->gradients(self, NULL, (void*)unfilled(&out, 0)), &out, 0, "gradients");
  check_untouched(api->reduce_boolean_decision(self, NULL, 1, 77, (void*)unfilled(&out, 0)), &out, 0, "reduce_boolean_decision");
  all.tree.root.type = 77;
  check_untouched(api->broadcast(self, NULL, &all.tree, 0, (void*)unfilled(&out, 0)), &out, 0, "broadcast");
  check_untouched(api->to_host(self, NULL, &all.tree, (void*)unfilled(&out, 0)), &out, 0, "to_host");
  check_untouched(api->batch_to_device(self, NULL, &all.transfer, (void*)unfilled(&out, 0)), &out, 0, "batch_to_device");
  close_session(&all.s);
}

DEFINE_CHECKS(
    null_checks,
    {"null-arguments-refused", "A null argument struct is invalid_argument in each of 12 functions", "C3",
     NEEDS_STRATEGY | IS_ONCE, null_arguments},
    {"null-trees-refused", "A null batch, object or state is invalid_argument in each of 9 functions", "C3",
     NEEDS_STRATEGY | IS_ONCE, null_trees},
    {"null-outputs-refused",
     "A null output that is not optional is invalid_argument in each of 16 functions, and what was moved in is consumed", "C3",
     NEEDS_STRATEGY | IS_ONCE, null_outputs},
    {"null-optional-outputs-taken", "The update result, the import's report and a name of no bytes may be null", "H",
     NEEDS_STRATEGY | IS_ONCE, optional_outputs},
    {"outputs-end-where-they-end", "Nothing is written behind any of 9 kinds of outputs of their exact size", "B1",
     NEEDS_STRATEGY | IS_ONCE, nothing_is_written_behind},
    {"failures-leave-outputs", "After a failure the output of each of 12 functions has the bytes that it had before", "C2",
     NEEDS_STRATEGY | IS_ONCE, failures_leave_outputs});
