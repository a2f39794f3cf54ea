/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults in the life of an instance: who may call when, errors, time, the model that is kept.
 */
#include <string.h>
#include <unistd.h>

#include "fault.h"
#include "harm.h"

pthread_t inside;

/* ---- entering ---- */

WRAP(stg_error*, seq_enter, stg_strategy* self, seq_function function, const stg_call* call, stg_call* call_out) {
  stg_call changed;
  if (call != NULL && call->struct_size == sizeof changed) {
    changed = *call;
    if (is_fault("streams-checked")) changed.num_streams = 0;
    if (is_fault("cancel-flag-ends-call")) changed.cancel = NULL;
    call = &changed;
  }
  stg_error* error = __real_seq_enter(self, function, call, call_out);
  if (error != NULL && is_fault("errors-well-formed")) error->code = 99;
  if (error == NULL) inside = pthread_self();
  return error;
}

WRAP(stg_error*, seq_check_process, void) { return is_fault("fork-child-refused") ? NULL : __real_seq_check_process(); }

WRAP(stg_error*, seq_check_time, stg_strategy* self, const stg_call* call, const char* before, int32_t replica) {
  stg_call changed = *call;
  if (is_fault("deadline-ends-call")) changed.deadline_ns = 0;
  if (is_fault("cancel-flag-ends-call")) changed.cancel = NULL;
  stg_error* error = __real_seq_check_time(self, &changed, before, replica);
  if ((says(error, "deadline") && is_fault("deadline-within-100-ms")) ||
      (says(error, "cancelled") && is_fault("cancel-within-100-ms")) ||
      (says(error, "aborted") && is_fault("abort-within-100-ms")))
    usleep(200000);
  return error;
}

WRAP(stg_error*, seq_check_stream, const stg_stream* stream, const char* of, uint64_t index) {
  return is_fault("reduce-streams-checked") ? NULL : __real_seq_check_stream(stream, of, index);
}

static void (*real_release)(stg_error* self);

static void release_cause_twice(stg_error* self) {
  self->cause->release(self->cause);
  real_release(self);
}

WRAP(stg_error*, seq_replica_error, stg_error* cause, const char* what, int32_t replica, stg_device device) {
  const uint32_t flags = cause->flags;
  stg_error* error = __real_seq_replica_error(cause, what, replica, device);
  if (is_fault("model-error-is-last-cause")) error->flags |= flags;
  if (is_fault("cause-released-once")) {
    real_release = error->release;
    error->release = release_cause_twice;
  }
  if ((is_fault("model-error-in-step") && strcmp(what, "step") == 0) ||
      (is_fault("model-error-in-backward") && strcmp(what, "backward") == 0)) {
    error->cause = NULL;
    cause->release(cause);
  }
  return error;
}

/* ---- functions ---- */

WRAP(stg_error*, seq_barrier, stg_strategy* self, const stg_call* call, stg_string name) {
  if (self != NULL && self->is_busy) {
    const int is_same_thread = pthread_equal(inside, pthread_self());
    if (is_fault("thread-callback-refused") && is_same_thread) return NULL;
    if (is_fault("thread-second-caller-refused") && !is_same_thread) return NULL;
  }
  if (is_fault("state-legal-calls-taken") && self != NULL && self->state == STG_STATE_CREATED)
    return seq_error(STG_FAILED_PRECONDITION, "barrier: call setup before it");
  return __real_seq_barrier(self, call, name);
}

WRAP(stg_error*, seq_zero_grad, stg_strategy* self, const stg_call* call) {
  if (is_fault("zero-grad-drops-window") && self != NULL && self->state == STG_STATE_FIT) return NULL;
  if (is_fault("state-illegal-calls-refused") && self != NULL && self->state == STG_STATE_EVALUATE) return NULL;
  return __real_seq_zero_grad(self, call);
}

WRAP(void, seq_abort, stg_strategy* self) {
  if (is_fault("abort-drains") && self != NULL && self->state != STG_STATE_FIT) return;
  if (is_fault("abort-leaves-destroy") && self != NULL) {
    self->is_aborted = 1;
    return;
  }
  __real_seq_abort(self);
}

static int is_past_deadline; /* an instance that says that it is draining, and goes on */

stg_error* note_deadline(stg_error* error);
stg_error* note_deadline(stg_error* error) {
  if (error != NULL && error->code == STG_DEADLINE_EXCEEDED && is_fault("deadline-drains-alike")) {
    error->flags = STG_ERROR_INSTANCE_DRAINING;
    is_past_deadline = 1;
  }
  return error;
}

WRAP(stg_error*, seq_status, stg_strategy* self, stg_status* out) {
  if (is_fault("null-outputs-refused") && out == NULL) return *(stg_error* volatile*)NULL;
  if (is_fault("null-instance-refused") && self == NULL) return NULL;
  stg_error* error = __real_seq_status(self, out);
  if (error == NULL && out->num_updates > 0 && is_fault("status-counts")) ++out->num_updates;
  if (error == NULL && is_past_deadline) out->state = STG_STATE_DRAINING;
  return error;
}

WRAP(stg_error*, seq_reduce_boolean_decision, stg_strategy* self, const stg_call* call, uint32_t decision, uint32_t mode,
     uint32_t* out) {
  if (is_fault("unknown-values-refused") && mode > STG_DECIDE_ANY) mode = STG_DECIDE_ANY;
  stg_error* error = __real_seq_reduce_boolean_decision(self, call, decision, mode, out);
  if (error == NULL && is_fault("one-process-identities")) *out = 1;
  return error;
}

static stg_tree handed_on;
static pthread_t maker;

static void release_on_maker(stg_tree* self) {
  if (pthread_equal(maker, pthread_self())) handed_on.release(&handed_on);
  memset(self, 0, sizeof *self);
}

static void change_broadcast(stg_tree* out) {
  if (out->root.type == STG_OPAQUE && is_fault("tree-opaque-comes-back")) out->root.as.opaque->retain(out->root.as.opaque);
  for (uint32_t i = 0; out->root.type == STG_DICT && i < out->root.count && is_fault("tree-structure-kept"); ++i) {
    if (out->root.as.entries[i].value.type == STG_TUPLE) out->root.as.entries[i].value.type = STG_LIST;
  }
  if (is_fault("outputs-released-anywhere")) {
    handed_on = *out;
    maker = pthread_self();
    out->release = release_on_maker;
  }
}

WRAP(stg_error*, seq_broadcast, stg_strategy* self, const stg_call* call, stg_tree* object, int32_t src, stg_tree* out) {
  if (is_fault("tree-moved-or-copied") && object->release == NULL) {
    *out = *object;
    return NULL;
  }
  stg_error* error = __real_seq_broadcast(self, call, object, src, out);
  if (error == NULL) change_broadcast(out);
  return error;
}

/* ---- setup to destroy ---- */

stg_error* last_error; /* of backward */

stg_error* note_flags(stg_error* error, const char* check_id);
stg_error* note_flags(stg_error* error, const char* check_id) {
  if (error != NULL && error->code == STG_ABORTED && is_fault(check_id)) error->flags = STG_ERROR_INSTANCE_USABLE;
  return error;
}

extern uint64_t create_flags;
extern const stg_strategy* of_caller_thread;
const stg_strategy* of_caller_thread;
uint64_t create_flags;

WRAP(stg_error*, seq_create, const stg_create_args* args, stg_strategy** out) {
  stg_error* error = __real_seq_create(args, out);
  if (error != NULL) return error;
  create_flags = args->flags;
  if (args->flags != 0) of_caller_thread = *out;
  harm_at_create();
  if (is_fault("services-absent") && args->host != NULL && args->host->retain != NULL) args->host->retain(args->host->self);
  return NULL;
}

const stg_model* watched(const stg_model* model);

WRAP(stg_error*, seq_setup, stg_strategy* self, const stg_call* call, const stg_setup_args* args) {
  stg_setup_args changed;
  const stg_model* model = args != NULL && args->struct_size == sizeof changed ? args->model : NULL;
  if (is_fault("null-arguments-refused") && args == NULL) return *(stg_error* volatile*)NULL;
  if (model != NULL && model->struct_size > sizeof *model && model->struct_size <= 4096 && is_fault("newer-tables-taken"))
    return seq_error(STG_INVALID_ARGUMENT, "model: a slot that is not known here");
  if (model != NULL && model->struct_size >= STG_MODEL_MIN_SIZE && model->release_graph == NULL &&
      is_fault("model-table-checked"))
    return NULL;
  if (model != NULL && model->struct_size >= STG_MODEL_MIN_SIZE && model->struct_size <= 4096) {
    const uint64_t size_bytes = model->struct_size;
    if (is_fault("model-without-optional-slots") && size_bytes == STG_MODEL_MIN_SIZE)
      model->parameters_changed(model->self, NULL);
    if (is_fault("half-a-slot-is-absent") && size_bytes > STG_MODEL_MIN_SIZE && size_bytes < sizeof *model)
      model->bind(model->self, NULL, 0, NULL, NULL);
    changed = *args;
    changed.model = watched(model);
    args = &changed;
  }
  harm_at_setup();
  stg_error* error = __real_seq_setup(self, call, args);
  if (error != NULL && is_fault("model-error-in-setup") && model->retain != NULL) model->retain(model->self);
  return note_flags(error, "abort-in-setup");
}

WRAP(stg_error*, seq_teardown, stg_strategy* self, const stg_call* call) {
  if (is_fault("setup-after-teardown") && self != NULL && self->model != NULL) self->model->retain(self->model->self);
  return note_flags(__real_seq_teardown(self, call), "abort-in-teardown");
}

WRAP(void, seq_destroy, stg_strategy* self) {
  if (is_fault("error-outlives-instance") && last_error != NULL)
    memset((void*)(uintptr_t)last_error->message.data, '?', last_error->message.size_bytes);
  if (is_fault("destroy-inside-ignored") && self != NULL && self->is_busy) self->is_aborted = 1;
  __real_seq_destroy(self);
}
