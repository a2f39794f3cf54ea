/* SPDX-License-Identifier: Apache-2.0
 *
 * Who may call now: the tags of the headers, checked at run time from the table in states.h. All answers are errors; a wrong call
 * never harms the right one that is running.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "sequential.h"

typedef struct rule {
  const char* name;
  uint32_t states;
} rule;

#define RULE(function, who, states) {#function, states},
static const rule rules[] = {STG_STRATEGY_FUNCTIONS(RULE)};

static const char* state_name(uint32_t state) {
  switch (state) {
    case STG_STATE_CREATED:
      return "created (setup was not called, or teardown was)";
    case STG_STATE_FIT:
      return "set up for fit; teardown comes before another setup";
    case STG_STATE_EVALUATE:
      return "set up for evaluation; teardown comes before another setup";
    case STG_STATE_MODELLESS:
      return "set up without a model; teardown comes before another setup";
    default:
      return "draining: only abort and destroy are left";
  }
}

/* ---- fork: the child has the memory but none of the threads, and the lock as it was ---- */

static int is_forked;

static void note_fork(void) { __atomic_store_n(&is_forked, 1, __ATOMIC_RELAXED); }
static void watch(void) { pthread_atfork(NULL, NULL, note_fork); }

void seq_watch_forks(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, watch);
}

stg_error* seq_check_process(void) {
  if (!__atomic_load_n(&is_forked, __ATOMIC_RELAXED)) return NULL;
  return seq_error(STG_FAILED_PRECONDITION,
                   "this process is a child of fork; create an instance in a process that was started anew");
}

stg_error* seq_check_alive(const stg_strategy* self) {
  return self == NULL ? seq_error(STG_INVALID_ARGUMENT, "the instance is null") : seq_check_process();
}

/* ---- streams: a CPU has none, but one that can't be is told ---- */

stg_error* seq_check_stream(const stg_stream* stream, const char* of, uint64_t index) {
  if (stream->kind > STG_STREAM_PER_THREAD_DEFAULT) {
    return seq_error(STG_INVALID_ARGUMENT, "%s %" PRIu64 ": the stream's kind is %" PRIu32 "; known are 0 and 1", of, index,
                     stream->kind);
  }
  if (stream->reserved == 0) return NULL;
  return seq_error(STG_INVALID_ARGUMENT, "%s %" PRIu64 ": the stream's reserved field is %" PRIu32 ", not 0", of, index,
                   stream->reserved);
}

static stg_error* read_call(stg_call* to, const stg_call* from) {
  stg_error* error = seq_read_struct(to, sizeof *to, from, STG_CALL_MIN_SIZE, "call");
  if (error == NULL && to->num_streams > 0 && to->streams == NULL) {
    error = seq_error(STG_INVALID_ARGUMENT, "call.streams is null with %" PRIu64 " streams", to->num_streams);
  }
  for (uint64_t i = 0; error == NULL && i < to->num_streams; ++i) error = seq_check_stream(&to->streams[i], "call, stream", i);
  return error;
}

/* ---- entering and leaving ---- */

static stg_error* try_enter(stg_strategy* self, const rule* asked) {
  if (self->is_busy) {
    return seq_error(STG_FAILED_PRECONDITION,
                     "%s: another call of this instance is in progress (or this one comes from inside one "
                     "of its callbacks); one caller at a time",
                     asked->name);
  }
  if ((self->state & asked->states) == 0) {
    stg_error* error =
        seq_error(STG_FAILED_PRECONDITION, "%s: not legal in this state: %s", asked->name, state_name(self->state));
    if (self->state == STG_STATE_DRAINING && error != seq_out_of_memory()) error->flags = STG_ERROR_INSTANCE_DRAINING;
    return error;
  }
  self->is_busy = 1;
  return NULL;
}

stg_error* seq_enter(stg_strategy* self, seq_function function, const stg_call* call, stg_call* call_out) {
  stg_error* error = seq_check_alive(self);
  if (error == NULL && call_out != NULL) {
    memset(call_out, 0, sizeof *call_out);
    call_out->struct_size = sizeof *call_out;
    if (call != NULL) error = read_call(call_out, call);
  }
  if (error != NULL) return error;
  pthread_mutex_lock(&self->lock);
  error = try_enter(self, &rules[function]);
  pthread_mutex_unlock(&self->lock);
  if (error != NULL || call_out == NULL) return error;
  error = seq_check_time(self, call_out, rules[function].name, -1);
  return error == NULL ? NULL : seq_leave(self, error);
}

stg_error* seq_leave(stg_strategy* self, stg_error* error) {
  pthread_mutex_lock(&self->lock);
  self->is_busy = 0;
  self->shown.stage = self->stage;
  self->shown.num_micro_batches = self->num_micro_batches;
  self->shown.num_updates = self->num_updates;
  self->shown.has_graph = (uint64_t)self->has_graph;
  if (error != NULL && self->state == STG_STATE_DRAINING && error->code == STG_ABORTED)
    error->flags = STG_ERROR_INSTANCE_DRAINING;
  pthread_mutex_unlock(&self->lock);
  return error;
}

/* The calling thread runs everything itself, so a deadline is only noticed between two callbacks, and then nothing is still running:
 * the instance stays usable. */
stg_error* seq_check_time(stg_strategy* self, const stg_call* call, const char* before, int32_t replica) {
  char place[48] = "";
  if (replica >= 0) snprintf(place, sizeof place, " on replica %" PRId32, replica);
  pthread_mutex_lock(&self->lock);
  const int is_aborted = self->is_aborted;
  pthread_mutex_unlock(&self->lock);
  if (is_aborted) return seq_error(STG_ABORTED, "aborted before %s%s", before, place);
  if (call->cancel != NULL && __atomic_load_n(call->cancel, __ATOMIC_ACQUIRE) != 0) {
    return seq_error(STG_CANCELLED, "cancelled before %s%s", before, place);
  }
  if (call->deadline_ns == 0) return NULL;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const uint64_t now_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
  if (now_ns < call->deadline_ns) return NULL;
  return seq_error(STG_DEADLINE_EXCEEDED, "the deadline passed %" PRIu64 " ms before %s%s",
                   (now_ns - call->deadline_ns) / 1000000u, before, place);
}

void seq_log(const stg_strategy* self, uint32_t level, const char* text) {
  const stg_string message = {text, strlen(text)};
  if (self->host != NULL && STG_HAS(stg_host, self->host, log)) self->host->log(self->host->self, level, message, NULL);
}
