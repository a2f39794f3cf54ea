/* SPDX-License-Identifier: Apache-2.0
 *
 * A model and a loop of the host's own, everything on its own thread, and plugins without a session.
 */
#include <string.h>

#include "rig.h"

static void refused(rig* of, const char* part) {
  stg_session session = 0;
  FAILS(stg_session_open(&of->args, &session), STG_INVALID_ARGUMENT, part);
  CHECK(session == 0 && of->model.num_references == 0);
}

static void wrong_models(void) {
  const stg_string torchscript = text("model.kind=torchscript"), named = text("model.name=mine");
  rig of;
  new_rig(&of, NULL, "");
  of.args.model = NULL;
  refused(&of, "/model/kind: \"host\" is the program's own model (stg_session_args.model), and it gave none");
  new_rig(&of, NULL, "");
  of.args.overrides = &torchscript;
  of.args.num_overrides = 1;
  refused(&of, "/model/kind: the program gave a model of its own");
  new_rig(&of, NULL, "");
  of.args.overrides = &named;
  of.args.num_overrides = 1;
  refused(&of, "/model/name: belongs to a model that is loaded");
  new_rig(&of, NULL, "");
  of.model.table.struct_size = 16;
  refused(&of, "model.struct_size is 16");
  new_rig(&of, NULL, "");
  of.model.table.release = NULL;
  refused(&of, "the model has retain, but no release");
  new_rig(&of, NULL, "");
  of.args.flags = 8 | STG_SESSION_OWN_LOOP;
  refused(&of, "flags is 9; of these, 8 is unknown");
}

static void failing_model(void) {
  rig of;
  stg_tree tree;
  new_rig(&of, NULL, "");
  of.model.fail_replica = (int32_t)the_host.num_devices - 1;
  of.model.fail_in = MLP_IN_REPLICATE;
  of.model.fail_flags = STG_ERROR_INSTANCE_USABLE;
  stg_session session = 0;
  FAILS(stg_session_open(&of.args, &session), STG_DATA_LOSS, MLP_FAILURE_TEXT);
  CHECK(session == 0 && of.model.num_references == 0 && of.num_releases == 1);
  new_rig(&of, NULL, "");
  open_rig(&of);
  of.model.fail_replica = 0;
  of.model.fail_in = MLP_IN_BACKWARD;
  FAILS(stg_session_run(of.session, &tree), STG_DATA_LOSS, MLP_FAILURE_TEXT);
  close_rig(&of);
}

/* One micro-batch, of rows in a row; with an update it is the last of its window. Returns its loss. */
static double train_rows(rig* of, const stg_strategy_api* api, stg_strategy* instance, int64_t begin, int64_t end,
                         const stg_update_args* how) {
  int64_t rows[4];
  double loss = 0;
  stg_tree batch;
  stg_step_args args;
  stg_step_result result;
  stg_update_result updated;
  memset(&args, 0, sizeof args);
  memset(&result, 0, sizeof result);
  memset(&updated, 0, sizeof updated);
  for (int64_t row = begin; row < end; ++row) rows[row - begin] = row;
  SUCCEEDS(of->source.read(of, rows, (uint64_t)(end - begin), &batch));
  args.struct_size = sizeof args;
  args.batch = &batch;
  args.update = how;
  args.flags = how == NULL ? 0 : STG_BATCH_LAST_MICRO_BATCH;
  result.struct_size = sizeof result;
  updated.struct_size = sizeof updated;
  if (!SUCCEEDS(api->train_batch(instance, NULL, &args, &result, &updated))) return loss;
  CHECK(updated.outcome == (how == NULL ? STG_UPDATE_NONE : STG_UPDATE_DONE));
  loss = element(find_key(&result.outputs.root, "loss")->as.tensor, 0);
  release_tree(&result.outputs);
  return loss;
}

static void own_loop(void) {
  rig of;
  stg_tree tree;
  double expected[3];
  const stg_strategy_api* api = NULL;
  stg_strategy* instance = NULL;
  new_rig(&of, "null", "");
  of.args.flags = STG_SESSION_OWN_LOOP;
  open_rig(&of);
  FAILS(stg_session_run(of.session, &tree), STG_FAILED_PRECONDITION, "STG_SESSION_OWN_LOOP");
  FAILS(stg_session_step(of.session, 1, NULL), STG_FAILED_PRECONDITION, "STG_SESSION_OWN_LOOP");
  SUCCEEDS(stg_session_strategy(of.session, &api, &instance));
  CHECK(api == the_host.factory->api && instance != NULL);
  if (instance == NULL) return;
  stg_update_args how;
  memset(&how, 0, sizeof how);
  how.struct_size = sizeof how;
  how.lr = LR;
  for (int64_t update = 0; update < 3; ++update) {
    const int64_t begin = update * 4;
    of.losses[update] = train_rows(&of, api, instance, begin, begin + 4 > NUM_ROWS ? NUM_ROWS : begin + 4, &how);
  }
  expect_losses(NULL, NUM_ROWS, 4, 3, expected);
  check_losses(&of, expected, 3);
  close_rig(&of);
}

static void swap_in_own_loop(void) {
  rig of;
  const stg_strategy_api* api = NULL;
  stg_strategy* instance = NULL;
  new_rig(&of, "null", "");
  of.args.flags = STG_SESSION_OWN_LOOP;
  open_rig(&of);
  FAILS(stg_session_request_swap(of.session, text(own_strategy())), STG_FAILED_PRECONDITION, "it has no updates to wait for");
  SUCCEEDS(stg_session_strategy(of.session, &api, &instance));
  train_rows(&of, api, instance, 0, 2, NULL);
  train_rows(&of, api, instance, 2, 4, NULL);
  FAILS(stg_session_swap(of.session, text(own_strategy())), STG_FAILED_PRECONDITION,
        "holds the gradients of 2 micro-batches, which a swap would lose; call optimizer_step first, or zero_grad");
  SUCCEEDS(api->zero_grad(instance, NULL));
  SUCCEEDS(stg_session_swap(of.session, text(own_strategy())));
  close_rig(&of);
}

static pthread_t only_thread;
static void on_log(void* self, uint32_t level, stg_string message) {
  (void)self;
  CHECK(level >= STG_LOG_DEBUG && message.size_bytes > 0);
  CHECK(pthread_equal(pthread_self(), only_thread));
}

static void on_one_thread(void) {
  rig of;
  double expected[6];
  new_rig(&of, NULL, ", \"trainer\": {\"max_epochs\": 2}");
  of.args.flags = STG_SESSION_CALLER_THREAD_ONLY;
  of.source.flags = STG_SOURCE_ANY_THREAD;
  of.model.only_caller = 1;
  of.events.log = on_log;
  only_thread = pthread_self();
  only_releaser = &only_thread;
  num_foreign_releases = 0;
  open_rig(&of);
  run_rig(&of, "\"steps\":6");
  expect_losses(NULL, NUM_ROWS, 4, 6, expected);
  check_losses(&of, expected, 6);
  CHECK(of.num_foreign_reads == 0);
  close_rig(&of);
  CHECK(num_foreign_releases == 0);
  only_releaser = NULL;
}

static void plugins(void) {
  const stg_plugin* plugin = NULL;
  stg_tree tree;
  SUCCEEDS(stg_load_plugin(text(the_host.path), &plugin));
  CHECK(plugin == the_host.plugin);
  FAILS(stg_load_plugin(text("/nowhere.so"), &plugin), STG_NOT_FOUND, "/nowhere.so");
  FAILS(stg_load_plugin(text(""), &plugin), STG_NOT_FOUND, "there is no file");
  FAILS(stg_load_plugin(text("/bin/sh"), &plugin), STG_FAILED_PRECONDITION, "is no Stratagem plugin");
  FAILS(stg_load_plugin(text(the_host.path), NULL), STG_INVALID_ARGUMENT, "out is null");
  if (SUCCEEDS(stg_describe_plugin(text(the_host.path), &tree))) {
    const stg_string found = {tree.root.as.utf8, tree.root.count};
    CHECK(text_has(found, strategy_is("sequential") ? "\"name\":\"sequential\"" : "\"name\":\"single_device\"") ||
          strategy_is("data_parallel"));
    CHECK(text_has(found, "\"caller_thread_only\"") && text_has(found, "\"devices\":[\"cpu\"") &&
          text_has(found, "\"options_schema\":{") && text_has(found, "\"models\":["));
    release_tree(&tree);
  }
  FAILS(stg_describe_plugin(text("/bin/sh"), &tree), STG_FAILED_PRECONDITION, "is no Stratagem plugin");
  FAILS(stg_describe_plugin(text(the_host.path), NULL), STG_INVALID_ARGUMENT, "result is null");
}

const test own_tests[] = {
    {"a model of the program's own is used by the kind host, and by that alone", wrong_models},
    {"an error of the program's model is told, at open and in the run", failing_model},
    {"a loop of the program's own trains by the strategy's table, without data in the config", own_loop},
    {"in a loop of the program's own a swap is refused while gradients wait for their update", swap_in_own_loop},
    {"with everything on the caller's thread, model, source, releases and log are called there alone", on_one_thread},
    {"a plugin is loaded, checked and described without a session", plugins},
};
const uint64_t num_own_tests = sizeof own_tests / sizeof *own_tests;
