/* SPDX-License-Identifier: Apache-2.0
 *
 * Data of the host's own: read in the right order and by the right thread, checked, and given back.
 */
#include <string.h>

#include "rig.h"

static void trains_on(uint64_t flags, int is_foreign) {
  rig of;
  double expected[6];
  new_rig(&of, NULL, ", \"trainer\": {\"max_epochs\": 2}");
  of.source.flags = flags;
  open_rig(&of);
  run_rig(&of, "\"steps\":6");
  expect_losses(NULL, NUM_ROWS, 4, 6, expected);
  check_losses(&of, expected, 6);
  CHECK(of.num_reads == 6 && of.num_foreign_reads == (is_foreign ? 6 : 0));
  close_rig(&of);
}

static void on_callers_thread(void) { trains_on(0, 0); }
static void on_any_thread(void) { trains_on(STG_SOURCE_ANY_THREAD, 1); }

static void shuffled(void) {
  rig of;
  double expected[3];
  int64_t sum = 0, num_in_place = 0;
  new_rig(&of, "{\"train\": {\"source\": \"rows\", \"batch_size\": 4, \"shuffle\": true, \"limit\": 8}}", "");
  open_rig(&of);
  run_rig(&of, "\"steps\":2");
  CHECK(of.num_rows_read == 8);
  for (int i = 0; i < 8; ++i) {
    sum += (int64_t)1 << of.rows[i];
    num_in_place += of.rows[i] == i;
  }
  CHECK(sum == 255 && num_in_place < 8);
  expect_losses(of.rows, 8, 4, 2, expected);
  check_losses(&of, expected, 2);
  close_rig(&of);
}

/* A batch that isn't as promised, in the second read. */
static void misbehaves(int how, uint32_t code, const char* part) {
  for (uint64_t flags = 0; flags <= STG_SOURCE_ANY_THREAD; ++flags) {
    rig of;
    stg_tree tree;
    new_rig(&of, NULL, "");
    if (!strategy_is("sequential")) with_checkpoints(&of, "");
    of.source.flags = flags;
    of.misbehaves = how;
    of.at_read = 1;
    open_rig(&of);
    stg_error* error = stg_session_run(of.session, &tree);
    if (error != NULL) CHECK(text_has(error->message, "the source \"rows\""));
    if (error != NULL && how == READ_ERROR) CHECK(error->cause != NULL && text_has(error->cause->message, "the tape is torn"));
    FAILS(error, code, part);
    if (of.folder[0] != 0) CHECK(has_checkpoint(&of, "step-00000001"));
    close_rig(&of);
  }
}

static void wrong_batches(void) {
  misbehaves(READ_FEW_ROWS, STG_INVALID_ARGUMENT,
             "it was asked for 4 samples, and the tensor [\"inputs\"] of its batch has shape (3, 3)");
  misbehaves(READ_NO_ROWS, STG_INVALID_ARGUMENT, "the tensor [\"targets\"] of its batch has shape ()");
  misbehaves(READ_NOTHING, STG_INVALID_ARGUMENT, "it gave no batch for 4 samples");
  misbehaves(READ_BORROWED, STG_INVALID_ARGUMENT, "its batch has no release");
  misbehaves(READ_ODD_DTYPE, STG_INVALID_ARGUMENT, "elements of type code 2, 24 bits");
  misbehaves(READ_ERROR, STG_DATA_LOSS, "the tape is torn");
}

/* Refused at open, and all sources but those of a refused size are given back. */
static void refused(rig* of, int64_t num_released, const char* part) {
  stg_session session = 0;
  FAILS(stg_session_open(&of->args, &session), STG_INVALID_ARGUMENT, part);
  CHECK(session == 0 && of->num_releases == num_released && of->model.num_references == 0);
}

static void wrong_sources(void) {
  rig of;
  new_rig(&of, NULL, "");
  of.source.read = NULL;
  refused(&of, 1, "the source \"rows\" has no read");
  new_rig(&of, NULL, "");
  of.source.name = text("");
  refused(&of, 1, "a source has no name");
  new_rig(&of, NULL, "");
  of.source.num_samples = 0;
  refused(&of, 1, "has 0 samples");
  new_rig(&of, NULL, "");
  of.source.num_samples = INT64_MIN;
  refused(&of, 1, "has -9223372036854775808 samples");
  new_rig(&of, NULL, "");
  of.source.flags = 6;
  refused(&of, 1, "has the flags 6");
  new_rig(&of, NULL, "");
  of.source.struct_size = 8;
  refused(&of, 0, "sources[0].struct_size is 8");
  new_rig(&of, NULL, "");
  of.args.num_sources = 2;
  refused(&of, 1, "sources[1] is null");
  new_rig(&of, NULL, "");
  of.sources[1] = &of.source;
  of.args.num_sources = 2;
  refused(&of, 2, "two sources are called \"rows\"");
  new_rig(&of, NULL, "");
  of.args.sources = NULL;
  refused(&of, 0, "sources is null");
  new_rig(&of, NULL, "");
  of.args.stage = 9; /* whatever else is wrong, they are given back */
  refused(&of, 1, "stage is 9");
  new_rig(&of, NULL, "");
  struct {
    stg_session_args args;
    uint64_t newer;
  } larger = {of.args, 1};
  larger.args.struct_size = sizeof larger;
  stg_session session = 0;
  FAILS(stg_session_open(&larger.args, &session), STG_UNIMPLEMENTED,
        "args has a field at offset 152 that is newer than this library");
  CHECK(session == 0 && of.num_releases == 1);
  new_rig(&of, NULL, "");
  of.args.checkpoint.data = "run\0step-00000001";
  of.args.checkpoint.size_bytes = 17;
  refused(&of, 1, "checkpoint has a zero byte at 3, after \"run\"");
}

static void unknown_names(void) {
  rig of;
  new_rig(&of, "{\"train\": {\"source\": \"row\"}, \"validation\": {\"source\": \"x\"}, \"test\": {\"source\": \"y\"}}", "");
  refused(&of, 1, "/data/train/source: \"row\" is no source of the program's; did you mean \"rows\"?");
  of.num_releases = 0;
  refused(&of, 1, "/data/validation/source: \"x\" is no source of the program's");
  new_rig(&of, NULL, "");
  of.args.num_sources = 0;
  refused(&of, 0, "/data/train/source: \"rows\" is no source of the program's; it gave none");
  new_rig(&of, "{\"train\": {\"source\": \"rows\", \"format\": \"npy\"}}", "");
  refused(&of, 1, "/data/train/format: belongs to a data set in files, not to a source");
  new_rig(&of, "{\"train\": {\"batch_size\": 2}}", "");
  refused(&of, 1, "/data/train/format: this key is required of a data set in files; one of the program's own has \"source\"");
}

static void huge(void) {
  rig of;
  stg_tree tree;
  new_rig(&of, NULL, ", \"trainer\": {\"limit_train_batches\": 2}");
  of.source.num_samples = INT64_MAX;
  open_rig(&of);
  run_rig(&of, "\"steps\":2");
  CHECK(of.num_rows_read == 8);
  close_rig(&of);
  new_rig(&of, "{\"train\": {\"source\": \"rows\", \"batch_size\": 4, \"shuffle\": true}}", "");
  of.source.num_samples = INT64_MAX; /* whose order doesn't fit into any memory */
  open_rig(&of);
  FAILS(stg_session_run(of.session, &tree), STG_RESOURCE_EXHAUSTED, "no memory for the order of 9223372036854775807 samples");
  close_rig(&of);
}

static void stop_at_two(rig* of) {
  if (of->num_starts == 1) stg_session_request_stop(of->session);
}

static void resumed(void) {
  rig of, again;
  char folder[64];
  uint32_t is_over = 0;
  double expected[6];
  int64_t order[2 * NUM_ROWS];
  const char* data = "{\"train\": {\"source\": \"rows\", \"batch_size\": 4, \"shuffle\": true}}";
  new_rig(&of, data, ", \"trainer\": {\"max_epochs\": 2}");
  open_rig(&of);
  run_rig(&of, "\"steps\":6");
  memcpy(order, of.rows, sizeof order);
  memcpy(expected, of.losses, sizeof expected);
  close_rig(&of);
  if (strategy_is("sequential")) return; /* which saves nothing */
  new_rig(&of, data, ", \"trainer\": {\"max_epochs\": 2}");
  with_checkpoints(&of, "");
  of.inside = stop_at_two;
  open_rig(&of);
  SUCCEEDS(stg_session_step(of.session, 1000, &is_over));
  CHECK(is_over == 1 && has_checkpoint(&of, "step-00000002")); /* without stg_session_run */
  run_rig(&of, "\"steps\":2");
  new_rig(&again, data, ", \"trainer\": {\"max_epochs\": 2}");
  memcpy(folder, of.folder, sizeof folder);
  again.args.checkpoint = text(folder);
  open_rig(&again);
  const stg_progress progress = progress_of(&again);
  CHECK(progress.step == 2 && progress.batch == 2 && progress.num_batches == 3 && progress.epoch == 0 &&
        progress.max_epochs == 2);
  run_rig(&again, "\"steps\":6");
  CHECK(again.num_reads == 4 && memcmp(again.rows, order + 8, 12 * sizeof *order) == 0);
  CHECK(memcmp(again.losses + 2, expected + 2, 4 * sizeof *expected) == 0);
  stg_session_close(of.session);
  close_rig(&again);
  close_rig(&of);
}

static void other_stages(void) {
  const char* data =
      "{\"validation\": {\"source\": \"rows\", \"batch_size\": 4}, \"test\": {\"source\": \"rows\", \"batch_size\": 10}}";
  rig of;
  for (uint64_t stage = STG_STAGE_VALIDATE; stage <= STG_STAGE_TEST; ++stage) {
    new_rig(&of, data, "");
    of.args.stage = stage;
    open_rig(&of);
    run_rig(&of, stage == STG_STAGE_TEST ? "\"test\":{\"loss\":" : "\"validation\":{\"loss\":");
    CHECK(of.num_rows_read == NUM_ROWS && of.last.stage == stage);
    close_rig(&of);
  }
}

const test source_tests[] = {
    {"a source that isn't for any thread is read on the caller's, and trained on as the arithmetic says", on_callers_thread},
    {"a source for any thread is read ahead, to the same losses", on_any_thread},
    {"a source is shuffled and limited as files are", shuffled},
    {"a batch that isn't as promised, and an error, end the run by name, and the last update is saved", wrong_batches},
    {"a source that can't be used is refused, and given back", wrong_sources},
    {"a config that names an unknown source is refused with the known ones", unknown_names},
    {"a source may be larger than memory, unless it is shuffled", huge},
    {"a run on a source resumes where it was", resumed},
    {"validation and test read a source, too", other_stages},
};
const uint64_t num_source_tests = sizeof source_tests / sizeof *source_tests;
