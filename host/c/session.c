/* SPDX-License-Identifier: Apache-2.0
 *
 * A run from C, on libstratagem: opens a config, trains step by step with callbacks, exchanges the strategy in mid-run, goes on, and reads
 * the result. The first Ctrl-C ends the run after its update, a second one at once.
 *
 *   stratagem-c-session CONFIG.json [KEY=VALUE ...]
 *   stratagem-c-session host/examples/fashion.json strategy.name=single_device data.train.limit=10000 trainer.max_epochs=1
 */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <stratagem/session.h>
#include <string.h>

static stg_string text(const char* s) {
  const stg_string out = {s, strlen(s)};
  return out;
}

/* An error is the receiver's: read with its causes, then released. */
static int tell(stg_error* error, const char* what) {
  if (error == NULL) return 0;
  for (const stg_error* e = error; e != NULL; e = e->cause) {
    fprintf(stderr, "%s%.*s\n", e == error ? what : "  because ", (int)e->message.size_bytes, e->message.data);
  }
  error->release(error);
  return 1;
}

/* ---- what the run tells ---- */

typedef struct watch {
  int64_t num_batches, num_swaps;
} watch;

static void log_message(void* self, uint32_t level, stg_string message) {
  (void)self;
  if (level >= STG_LOG_INFO) fprintf(stderr, "%.*s\n", (int)message.size_bytes, message.data);
}

static stg_error* count_batch(void* self, const stg_progress* progress, const stg_value* outputs) {
  (void)outputs; /* the step's, on the root device; an error returned here would end the run */
  if (progress->stage == STG_STAGE_FIT) ++((watch*)self)->num_batches;
  return NULL;
}

static stg_error* show_metrics(void* self, stg_string line) {
  (void)self;
  printf("%.*s\n", (int)line.size_bytes, line.data);
  return NULL;
}

static stg_error* count_swap(void* self, int64_t step, stg_string strategy, const stg_error* error) {
  if (error == NULL) ++((watch*)self)->num_swaps;
  printf("after update %" PRId64 ": %.*s %s\n", step, (int)strategy.size_bytes, strategy.data,
         error == NULL ? "goes on" : "was refused");
  return NULL;
}

/* ---- Ctrl-C ---- */

static volatile stg_session interrupted_session; /* written before the handler is installed */

static void on_interrupt(int number) {
  static volatile sig_atomic_t before;
  (void)number;
  if (before) stg_session_cancel(interrupted_session);
  before = 1;
  stg_session_request_stop(interrupted_session);
}

static int train(stg_session session, const watch* seen) {
  uint32_t is_over = 0;
  stg_tree result;
  stg_progress progress;
  if (tell(stg_session_step(session, 10, &is_over), "training failed: ")) return 1;
  /* What a config's "strategy" can be. One that can't be had is an error here, and the run goes on under the old one. */
  tell(stg_session_swap(session, text("{\"name\": \"no_such_strategy\"}")), "not swapped: ");
  if (tell(stg_session_swap(session, text("{\"name\": \"data_parallel\", \"accelerator\": \"cpu\", \"devices\": 2}")),
           "swap failed: "))
    return 1;
  if (tell(stg_session_run(session, &result), "training failed: ")) return 1;
  printf("%.*s\n", (int)result.root.count, result.root.as.utf8);
  result.release(&result);
  memset(&progress, 0, sizeof progress);
  progress.struct_size = sizeof progress;
  if (tell(stg_session_progress(session, &progress), "progress: ")) return 1;
  printf("%" PRId64 " updates, %" PRId64 " batches, %" PRId64 " swap\n", progress.step, seen->num_batches, seen->num_swaps);
  return seen->num_swaps != 1 || seen->num_batches < progress.step;
}

int main(int argc, char** argv) {
  stg_string overrides[64];
  stg_session session;
  stg_session_args args;
  stg_session_events events;
  watch seen = {0, 0};
  int failed;
  if (argc < 2 || argc - 2 > 64) {
    fprintf(stderr, "usage: %s CONFIG.json [KEY=VALUE ...]\n", argv[0]);
    return 2;
  }
  for (int i = 2; i < argc; ++i) overrides[i - 2] = text(argv[i]);

  memset(&events, 0, sizeof events);
  events.struct_size = sizeof events;
  events.self = &seen;
  events.log = log_message;
  events.metrics = show_metrics;
  events.batch_end = count_batch;
  events.swap = count_swap;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.config_path = text(argv[1]);
  args.overrides = overrides;
  args.num_overrides = (uint64_t)(argc - 2);
  args.stage = STG_STAGE_FIT;
  args.events = &events;
  if (tell(stg_session_open(&args, &session), "")) return 1;
  interrupted_session = session;
  signal(SIGINT, on_interrupt);
  failed = train(session, &seen);
  stg_session_close(session);
  return failed;
}
