/* SPDX-License-Identifier: Apache-2.0
 *
 * See rig.h.
 */
#include "rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char* strategy_name;

int strategy_is(const char* name) { return strcmp(strategy_name, name) == 0; }

const char* own_strategy(void) {
  static char config[512];
  const int written = snprintf(config, sizeof config, "{\"name\": \"%s\", \"path\": \"%s\", \"accelerator\": \"cpu\"}",
                               strategy_name, the_host.path);
  CHECK(written > 0 && written < (int)sizeof config);
  return config;
}

stg_string text(const char* of) {
  stg_string out = {of, strlen(of)};
  return out;
}

static void release_error(stg_error* self) { free(self); }

stg_error* new_error(uint32_t code, const char* message) {
  stg_error* error = calloc(1, sizeof *error);
  if (error == NULL) abort();
  error->code = code;
  error->replica = error->rank = error->device.index = -1;
  error->message = text(message);
  error->release = release_error;
  return error;
}

int result_has(stg_tree* tree, const char* part) {
  const stg_string found = {tree->root.as.utf8, tree->root.count};
  const int has = tree->root.type == STG_STRING && text_has(found, part);
  if (!has) printf("  it is: %.*s\n", tree->root.type == STG_STRING ? (int)found.size_bytes : 0, found.data);
  release_tree(tree);
  return has;
}

/* ---- the source ---- */

static void row_values(int64_t row, float* inputs, float* target) {
  for (int k = 0; k < MLP_NUM_FEATURES; ++k) inputs[k] = (float)((row * 7 + k * 3) % 11) / 8.0f - 0.5f;
  *target = (float)(row % 5) / 4.0f;
}

static stg_error* read_rows(void* self, const int64_t* rows, uint64_t num_rows, stg_tree* out) {
  static const char* const names[] = {"inputs", "targets"};
  rig* of = self;
  const int misbehaves = of->num_reads == of->at_read ? of->misbehaves : READ_RIGHT;
  ++of->num_reads;
  if (!pthread_equal(pthread_self(), of->opener)) ++of->num_foreign_reads;
  for (uint64_t i = 0; i < num_rows; ++i) {
    if (of->num_rows_read < 256) of->rows[of->num_rows_read] = rows[i];
    ++of->num_rows_read;
  }
  if (of->inside_read != NULL) of->inside_read(of);
  if (misbehaves == READ_ERROR) return new_error(STG_DATA_LOSS, "the tape is torn");
  if (misbehaves == READ_NOTHING) return NULL;
  const int64_t shape[] = {(int64_t)num_rows - (misbehaves == READ_FEW_ROWS), MLP_NUM_FEATURES};
  stg_tensor* tensors[] = {new_float32(2, shape), new_float32(misbehaves == READ_NO_ROWS ? 0 : 1, shape)};
  for (int64_t i = 0; i < shape[0]; ++i) {
    float target;
    row_values(rows[i], floats(tensors[0]) + i * MLP_NUM_FEATURES, &target);
    if (misbehaves != READ_NO_ROWS) floats(tensors[1])[i] = target;
  }
  if (misbehaves == READ_ODD_DTYPE) tensors[0]->view.dtype.bits = 24;
  *out = new_dict(2, names, tensors);
  if (misbehaves == READ_BORROWED) {
    static stg_tree kept;
    release_tree(&kept);
    kept = *out;
    out->release = NULL;
    release_tree(&kept); /* nobody may look at it */
  }
  return NULL;
}

static void release_source(void* self) { __atomic_add_fetch(&((rig*)self)->num_releases, 1, __ATOMIC_RELEASE); }

/* ---- the events ---- */

static stg_error* on_batch_start(void* self, const stg_progress* progress) {
  rig* of = self;
  CHECK(progress->struct_size == sizeof *progress && progress->batch < progress->num_batches);
  if (of->inside != NULL) of->inside(of);
  return of->num_starts++ == of->start_error_at ? new_error(STG_OUT_OF_RANGE, "enough of it") : NULL;
}

static stg_error* on_batch_end(void* self, const stg_progress* progress, const stg_value* outputs) {
  rig* of = self;
  const stg_value* loss = find_key(outputs, "loss");
  CHECK(of->num_ends == of->num_starts - 1 && progress->batch > 0);
  CHECK(loss != NULL && loss->type == STG_TENSOR);
  if (loss != NULL && progress->stage == STG_STAGE_FIT && progress->step <= 64 && progress->step > 0)
    of->losses[progress->step - 1] = element(loss->as.tensor, 0);
  of->last = *progress;
  return of->num_ends++ == of->end_error_at ? new_error(STG_OUT_OF_RANGE, "enough of it") : NULL;
}

static stg_error* on_progress(void* self, const stg_progress* progress) {
  rig* of = self;
  (void)progress;
  return of->num_progress++ == of->progress_error_at ? new_error(STG_OUT_OF_RANGE, "enough of it") : NULL;
}

static stg_error* on_metrics(void* self, stg_string line) {
  rig* of = self;
  CHECK(text_has(line, "\"stage\""));
  return of->num_metrics++ == of->metrics_error_at ? new_error(STG_OUT_OF_RANGE, "enough of it") : NULL;
}

/* ---- a rig ---- */

void new_rig(rig* out, const char* data, const char* more) {
  memset(out, 0, sizeof *out);
  new_mlp(&out->model, 1);
  out->at_read = out->start_error_at = out->end_error_at = out->progress_error_at = out->metrics_error_at = -1;
  out->opener = pthread_self();
  out->source.struct_size = sizeof out->source;
  out->source.name = text("rows");
  out->source.self = out;
  out->source.num_samples = NUM_ROWS;
  out->source.read = read_rows;
  out->source.release = release_source;
  out->sources[0] = &out->source;
  out->events.struct_size = sizeof out->events;
  out->events.self = out;
  out->events.progress = on_progress;
  out->events.metrics = on_metrics;
  out->events.batch_start = on_batch_start;
  out->events.batch_end = on_batch_end;
  snprintf(
      out->config, sizeof out->config,
      "{\"strategy\": {\"name\": \"%s\", \"path\": \"%s\", \"accelerator\": \"cpu\", \"devices\": %u}, \"model\": {\"kind\": "
      "\"host\"}, \"optimizer\": {\"name\": \"sgd\", \"lr\": %g}, \"data\": %s%s}",
      strategy_name, the_host.path, (unsigned)the_host.num_devices, LR,
      data != NULL ? data : "{\"train\": {\"source\": \"rows\", \"batch_size\": 4}}", more);
  out->args.struct_size = sizeof out->args;
  out->args.config_text = text(out->config);
  out->args.config_folder = text("/");
  out->args.events = &out->events;
  out->args.model = &out->model.table;
  out->args.sources = out->sources;
  out->args.num_sources = 1;
}

void with_checkpoints(rig* of, const char* more) {
  snprintf(of->folder, sizeof of->folder, "/tmp/session_host.XXXXXX");
  if (mkdtemp(of->folder) == NULL) abort();
  const uint64_t size_bytes = strlen(of->config) - 1;
  snprintf(of->config + size_bytes, sizeof of->config - size_bytes, ", \"checkpoint\": {\"dir\": \"%s\"%s}}", of->folder, more);
  of->args.config_text = text(of->config);
}

int has_checkpoint(const rig* of, const char* name) {
  char path[128];
  struct stat found;
  snprintf(path, sizeof path, "%s/%s", of->folder, name);
  return stat(path, &found) == 0 && S_ISDIR(found.st_mode);
}

void open_rig(rig* of) {
  of->session = 0;
  SUCCEEDS(stg_session_open(&of->args, &of->session));
  CHECK(of->session != 0);
}

void close_rig(rig* of) {
  char command[128];
  stg_session_close(of->session);
  CHECK(of->num_releases == (int64_t)of->args.num_sources);
  CHECK(of->model.num_references == 0 && of->model.num_replicas == 0 && of->model.num_graphs == 0);
  CHECK(of->model.num_complaints == 0);
  CHECK_THAT(num_live_tensors == 0 && num_live_trees == 0, "%d tensors and %d trees are left", (int)num_live_tensors,
             (int)num_live_trees);
  num_live_tensors = num_live_trees = 0;
  if (of->folder[0] == 0) return;
  snprintf(command, sizeof command, "rm -rf '%s'", of->folder);
  CHECK(system(command) == 0);
}

stg_progress progress_of(const rig* of) {
  stg_progress progress;
  memset(&progress, 0, sizeof progress);
  progress.struct_size = sizeof progress;
  SUCCEEDS(stg_session_progress(of->session, &progress));
  return progress;
}

void run_rig(rig* of, const char* part) {
  stg_tree result;
  if (SUCCEEDS(stg_session_run(of->session, &result))) CHECK(result_has(&result, part));
}

void expect_losses(const int64_t* order, int64_t num_rows, int64_t batch_size, int64_t num_updates, double* losses) {
  weights at;
  first_weights(&at);
  for (int64_t update = 0, begin = 0; update < num_updates; ++update, begin += batch_size) {
    float inputs[NUM_ROWS][MLP_NUM_FEATURES], targets[NUM_ROWS];
    weights gradient;
    memset(&gradient, 0, sizeof gradient);
    if (begin >= num_rows) begin = 0;
    const int64_t count = num_rows - begin < batch_size ? num_rows - begin : batch_size;
    for (int64_t i = 0; i < count; ++i) row_values(order == NULL ? begin + i : order[begin + i], inputs[i], &targets[i]);
    losses[update] = run_reference(&at, count, inputs, targets, NULL, 0, 1, NULL, &gradient);
    for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
      for (int64_t i = 0; i < mlp_numel[p]; ++i) at.of[p][i] -= LR * gradient.of[p][i];
    }
  }
}

void check_losses(const rig* of, const double* expected, int64_t num_updates) {
  for (int64_t i = 0; i < num_updates; ++i) {
    CHECK_THAT(is_close(of->losses[i], expected[i], 1e-5), "update %d has the loss %.9g; it is %.9g", (int)i + 1, expected[i],
               of->losses[i]);
  }
}

/* ---- threads ---- */

void reach_gate(gate* at) {
  pthread_mutex_lock(&at->mutex);
  at->is_reached = 1;
  pthread_cond_broadcast(&at->changed);
  while (!at->is_open) pthread_cond_wait(&at->changed, &at->mutex);
  pthread_mutex_unlock(&at->mutex);
}

void wait_for_reach(gate* at) {
  pthread_mutex_lock(&at->mutex);
  while (!at->is_reached) pthread_cond_wait(&at->changed, &at->mutex);
  pthread_mutex_unlock(&at->mutex);
}

void open_gate(gate* at) {
  pthread_mutex_lock(&at->mutex);
  at->is_open = 1;
  pthread_cond_broadcast(&at->changed);
  pthread_mutex_unlock(&at->mutex);
}

static void* run_it(void* self) {
  runner* run = self;
  run->error = stg_session_run(run->of->session, &run->result);
  __atomic_store_n(&run->is_done, 1, __ATOMIC_RELEASE);
  return NULL;
}

void start_run(runner* out, rig* of) {
  memset(out, 0, sizeof *out);
  out->of = of;
  if (pthread_create(&out->thread, NULL, run_it, out) != 0) abort();
}

void join_run(runner* of) { pthread_join(of->thread, NULL); }

/* ---- all of them ---- */

int main(int argc, char** argv) {
  test all[128];
  uint64_t num_tests = 0;
  load_plugin(argc, argv);
  strategy_name = argv[2];
#define ADD(some)                                                          \
  memcpy(all + num_tests, some##_tests, num_##some##_tests * sizeof *all); \
  num_tests += num_##some##_tests
  ADD(handle);
  ADD(event);
  ADD(source);
  ADD(own);
  ADD(cancel);
  return run_tests(all, num_tests);
}
