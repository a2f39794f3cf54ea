/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults in what a strategy means: weights, gradients, outputs, states.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fault.h"

stg_error* note_deadline(stg_error* error);
extern const stg_strategy* of_caller_thread;

static float* first_parameter(const stg_strategy* self) {
  return (float*)(void*)seq_data(&self->replicas[0].description.parameters[0]->tensor->view);
}

/* ---- a model between the host's and ours ---- */

static const stg_model* host_model;
static const stg_gradient_sink* own_sink;
static stg_model between;
static stg_replica* current;

static stg_tensor* ones_like(const stg_tensor* like) {
  stg_tensor* ones = seq_new_tensor(like->view.dtype, like->view.num_dims, like->view.shape);
  for (int64_t i = 0; i < seq_numel(&ones->view); ++i) ((float*)(void*)seq_data(&ones->view))[i] = 1;
  return ones;
}

static stg_error* ready_with_ones(void* self, uint64_t index, stg_tensor* gradient, const stg_stream* stream) {
  stg_model_description own;
  memset(&own, 0, sizeof own);
  own.struct_size = sizeof own;
  if (gradient != NULL && is_fault("bad-gradients-refused")) gradient->view.dtype.code = STG_DTYPE_FLOAT;
  if (gradient == NULL && host_model->describe(host_model->self, current, &own) == NULL)
    gradient = ones_like(own.parameters[index]->tensor);
  return own_sink->ready(self, index, gradient, stream);
}

static stg_error* backward_with_ones(void* self, stg_replica* replica, stg_graph* graph, double scale, uint32_t flags,
                                     const stg_gradient_sink* sink) {
  stg_gradient_sink changed = *sink;
  changed.ready = ready_with_ones;
  own_sink = sink;
  current = replica;
  return host_model->backward(self, replica, graph, scale, flags, &changed);
}

static stg_error* transfer_from_nowhere(void* self, stg_replica* replica, stg_tree* batch, int64_t dataloader_index,
                                        stg_tree* out) {
  (void)dataloader_index;
  return host_model->transfer(self, replica, batch, 0, out);
}

static stg_error* ready_with_copy(void* self, uint64_t index, stg_tensor* gradient, const stg_stream* stream) {
  return own_sink->ready(self, index, gradient == NULL ? NULL : seq_copy_tensor(&gradient->view), stream);
}

static stg_error* backward_with_copies(void* self, stg_replica* replica, stg_graph* graph, double scale, uint32_t flags,
                                       const stg_gradient_sink* sink) {
  stg_gradient_sink changed = *sink;
  changed.ready = ready_with_copy;
  own_sink = sink;
  return host_model->backward(self, replica, graph, scale, flags, &changed);
}

static void* call_it_too(void* nothing) {
  usleep(100000);
  host_model->set_mode(host_model->self, current, 1);
  return nothing;
}

static stg_error* step_nowhere(void* self, stg_replica* replica, const stg_step_context* context, stg_tree* batch,
                               stg_model_step_result* result) {
  stg_step_context changed = *context;
  pthread_t thread;
  current = replica;
  if (is_fault("replica-one-caller")) {
    if (pthread_create(&thread, NULL, call_it_too, NULL) != 0) abort();
  } else {
    changed.batch_index = 0;
  }
  stg_error* error = host_model->step(self, replica, &changed, batch, result);
  if (is_fault("replica-one-caller")) pthread_join(thread, NULL);
  return error;
}

static stg_error* set_mode_anyway(void* self, stg_replica* replica, uint32_t train) {
  stg_error* error = host_model->set_mode(self, replica, train);
  if (error != NULL) error->release(error);
  return NULL;
}

static stg_error* describe_known(void* self, stg_replica* replica, stg_model_description* out) {
  stg_error* error = host_model->describe(self, replica, out);
  if (out->loss_kind > STG_LOSS_SUM) out->loss_kind = STG_LOSS_MEAN;
  return error;
}

const stg_model* watched(const stg_model* model);
const stg_model* watched(const stg_model* model) {
  const int has_ones = is_fault("null-gradient-no-change") || is_fault("bad-gradients-refused");
  const int has_transfer = is_fault("model-transfer"), has_mode = is_fault("model-fails-at-every-call");
  const int has_copies = is_fault("gradients-released-once"),
            has_step = is_fault("model-told-where") || is_fault("replica-one-caller");
  if (!has_ones && !has_transfer && !has_mode && !has_copies && !has_step && !is_fault("unknown-loss-kind-refused")) return model;
  host_model = model;
  memset(&between, 0, sizeof between);
  memcpy(&between, model, model->struct_size < sizeof between ? model->struct_size : sizeof between);
  if (has_ones) between.backward = backward_with_ones;
  if (has_copies) between.backward = backward_with_copies;
  if (has_step) between.step = step_nowhere;
  if (has_mode) between.set_mode = set_mode_anyway;
  if (is_fault("unknown-loss-kind-refused")) between.describe = describe_known;
  if (has_transfer && between.transfer != NULL) between.transfer = transfer_from_nowhere;
  return &between;
}

/* ---- forward ---- */

WRAP(stg_error*, seq_forward, stg_strategy* self, const stg_call* call, const seq_step* step, seq_batch* batch,
     stg_tree* outputs) {
  stg_error* error = __real_seq_forward(self, call, step, batch, outputs);
  if (error != NULL || step->stage != STG_STAGE_FIT) return error;
  for (uint64_t i = 0; i < self->num_weights; ++i) {
    if (is_fault("trains-like-one-device")) self->replicas[i].weight = self->weights[i] = 1;
    if (is_fault("denominators-weight-replicas")) self->replicas[i].weight = 1;
    if (is_fault("weight-zero-share-not-read") && self->replicas[i].weight == 0) self->replicas[i].weight = 1e-30;
  }
  if (is_fault("sum-loss-summed")) self->step_window = SEQ_WINDOW_WEIGHTED;
  return NULL;
}

static stg_tree real_outputs;
static void* loss_data;

static void spoil_and_release(stg_tree* self) {
  memset(loss_data, 0x7f, sizeof(float));
  memset(self, 0, sizeof *self);
  real_outputs.release(&real_outputs);
}

/* The loss in the outputs lives only as long as they do. */
static void tie_loss(stg_tree* outputs) {
  const stg_value* loss = seq_find(&outputs->root, "loss");
  if (loss == NULL || loss->type != STG_TENSOR) return;
  loss_data = seq_data(&loss->as.tensor->view);
  real_outputs = *outputs;
  outputs->release = spoil_and_release;
}

typedef struct window {
  float* sums[16];
  int has_sum[16];
  double total_weight;
  uint64_t num_micro_batches;
  int kind;
} window;

static int64_t numel_of(const stg_strategy* self, uint64_t parameter) {
  return seq_numel(&self->replicas[0].description.parameters[parameter]->tensor->view);
}

static void copy_window(const stg_strategy* self, window* out) {
  for (uint64_t i = 0; i < self->replicas[0].description.num_parameters; ++i) {
    const uint64_t size_bytes = (uint64_t)numel_of(self, i) * sizeof(float);
    out->sums[i] = malloc(size_bytes);
    memcpy(out->sums[i], self->sums[i], size_bytes);
    out->has_sum[i] = self->has_sum[i];
  }
  out->total_weight = self->total_weight;
  out->num_micro_batches = self->num_micro_batches;
  out->kind = self->window;
}

static void restore_window(stg_strategy* self, const window* from) {
  for (uint64_t i = 0; i < self->replicas[0].description.num_parameters; ++i) {
    memcpy(self->sums[i], from->sums[i], (uint64_t)numel_of(self, i) * sizeof(float));
    self->has_sum[i] = from->has_sum[i];
  }
  self->total_weight = from->total_weight;
  self->num_micro_batches = from->num_micro_batches;
  self->window = from->kind;
}

WRAP(stg_error*, seq_training_step, stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out) {
  window before;
  const int keeps_window = is_fault("error-clears-gradients") && self->replicas != NULL;
  if (keeps_window) copy_window(self, &before);
  stg_error* error = __real_seq_training_step(self, call, args, out);
  if (keeps_window && error != NULL) restore_window(self, &before);
  if (error != NULL && out != NULL && is_fault("failures-leave-outputs")) out->num_weights = 0;
  if (error == NULL && is_fault("tree-leaf-taken-out")) tie_loss(&out->outputs);
  return error;
}

/* ---- backward, update ---- */

WRAP(stg_error*, seq_backward, stg_strategy* self, const stg_call* call, uint64_t flags) {
  if (is_fault("step-order") && self != NULL && self->state == STG_STATE_FIT && !self->has_graph) return NULL;
  return last_error = __real_seq_backward(self, call, flags);
}

static void change_weights(const stg_strategy* self) {
  static int num_calls;
  const stg_model_description* last = &self->replicas[self->num_devices - 1].description;
  if (is_fault("replicas-bitwise-equal")) *(float*)(void*)seq_data(&last->parameters[0]->tensor->view) += 0.001f;
  if (is_fault("runs-repeat-bitwise")) *first_parameter(self) += 1e-5f * (float)++num_calls;
  if (is_fault("caller-thread-equal") && self == of_caller_thread) *first_parameter(self) += 1e-4f;
}

WRAP(stg_error*, seq_train_batch, stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out,
     stg_update_result* update) {
  if (is_fault("null-optional-outputs-taken") && update == NULL) return *(stg_error* volatile*)NULL;
  stg_step_args changed;
  stg_update_args faster;
  if (args != NULL && args->announced == 7 && is_fault("announced-batch-alike")) return NULL;
  if (args != NULL && args->update != NULL) {
    changed = *args;
    faster = *args->update;
    if (is_fault("train-batch-equals-three-calls")) faster.lr *= 1 + 1e-6;
    if (is_fault("updates-checked") && isnan(faster.lr)) faster.lr = 0;
    if (is_fault("clip-norm-limits-update")) faster.clip = STG_CLIP_NONE;
    if (args->update->struct_size == sizeof faster) changed.update = &faster;
    args = &changed;
  }
  stg_error* error = note_deadline(__real_seq_train_batch(self, call, args, out, update));
  if (error != NULL) return error;
  if ((args->flags & STG_BATCH_LAST_MICRO_BATCH) == 0 && is_fault("accumulation-equals-union")) self->total_weight += 1;
  change_weights(self);
  if (is_fault("one-row-one-replica")) out->num_weights = self->num_devices;
  if (update != NULL && update->outcome == STG_UPDATE_SKIPPED_NO_WEIGHT && is_fault("no-weight-skips-update"))
    update->outcome = STG_UPDATE_DONE;
  return NULL;
}

WRAP(stg_error*, seq_validation_step, stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out) {
  stg_error* error = __real_seq_validation_step(self, call, args, out);
  if (error != NULL) return error;
  if (is_fault("evaluation-changes-nothing")) first_parameter(self)[0] += 0.001f;
  if (is_fault("evaluation-between")) self->replicas[0].weight += 1;
  if (is_fault("no-rows") && out->weights[0] == 0) out->num_weights = 0;
  return NULL;
}

/* ---- states ---- */

WRAP(stg_error*, seq_export_state, stg_strategy* self, const stg_call* call, uint64_t flags, stg_tree* out) {
  if (is_fault("unknown-flags-refused")) flags &= STG_EXPORT_COPY;
  stg_error* error = __real_seq_export_state(self, call, flags, out);
  if (error != NULL) return error;
  const stg_value* model = seq_find(&out->root, "model");
  if (is_fault("state-hand-over") && model != NULL && model->count > 0)
    *(float*)(void*)seq_data(&model->as.entries[0].value.as.tensor->view) += 0.001f;
  if (is_fault("caller-thread-lends-no-replica")) self->model->retain(self->model->self);
  return NULL;
}

WRAP(stg_error*, seq_import_state, stg_strategy* self, const stg_call* call, stg_tree* state, uint64_t flags, stg_tree* report) {
  if (state != NULL && seq_find(&state->root, "format") == NULL && is_fault("states-consumed"))
    return seq_error(STG_INVALID_ARGUMENT, "state: it has no format");
  stg_error* error = __real_seq_import_state(self, call, state, flags, report);
  if (error != NULL && is_fault("import-strict-whole")) *first_parameter(self) += 0.1f;
  for (uint32_t i = 0; error == NULL && report != NULL && i < report->root.count && is_fault("import-reports"); ++i)
    report->root.as.entries[i].value.count = 0;
  return error;
}
