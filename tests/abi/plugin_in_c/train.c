/* SPDX-License-Identifier: Apache-2.0
 *
 * Training: the strategy itself.
 *
 * Each replica's gradient g_i is of a mean over its share, w_i its weight (rows, or the model's denominator). Summed up are w_i g_i,
 * over replicas and micro-batches, and divided once, by the sum of the w_i, in the update; so uneven shares, accumulation and a
 * last short window all equal one device on the whole batch. With a loss that is a sum, g_i are summed and nothing is divided.
 * The model multiplies by w_i itself: that is `scale` of its backward.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sequential.h"

void seq_drop_graphs(stg_strategy* self) {
  for (uint64_t i = 0; i < self->num_devices; ++i) {
    seq_replica* replica = &self->replicas[i];
    if (replica->graph != NULL) self->model->release_graph(self->model->self, replica->handle, replica->graph);
    replica->graph = NULL;
  }
  self->has_graph = 0;
}

void seq_clear_gradients(stg_strategy* self) {
  const stg_model_description* root = &self->replicas[0].description;
  seq_drop_graphs(self);
  for (uint64_t i = 0; i < root->num_parameters; ++i) {
    memset(self->sums[i], 0, (uint64_t)seq_numel(&root->parameters[i]->tensor->view) * sizeof(float));
    self->has_sum[i] = 0;
  }
  self->total_weight = 0;
  self->window = SEQ_WINDOW_EMPTY;
  self->num_micro_batches = 0;
}

/* ---- forward ---- */

static stg_error* run_training_step(stg_strategy* self, const stg_call* call, const stg_step_args* args, seq_batch* batch,
                                    stg_step_result* result) {
  const seq_step step = {STG_STAGE_FIT, args->flags, args->batch_index, args->dataloader_index, args->global_step};
  memset(result, 0, sizeof *result);
  seq_drop_graphs(self);
  stg_error* error = seq_forward(self, call, &step, batch, &result->outputs);
  if (error != NULL) return error;
  self->has_graph = 1;
  result->weights = self->weights;
  result->num_weights = self->num_weights;
  return NULL;
}

/* ---- backward ---- */

typedef struct sink {
  stg_strategy* strategy;
  unsigned char* seen; /* per parameter */
} sink;

static stg_error* add_gradient(sink* self, uint64_t index, const stg_tensor* gradient) {
  stg_strategy* strategy = self->strategy;
  const stg_model_description* root = &strategy->replicas[0].description;
  if (index >= root->num_parameters) {
    return seq_error(STG_OUT_OF_RANGE, "gradient %" PRIu64 " of %" PRIu64 " parameters", index, root->num_parameters);
  }
  const stg_parameter* parameter = root->parameters[index];
  const char* fault = self->seen[index] ? "a second gradient" : NULL;
  self->seen[index] = 1;
  if (fault == NULL && gradient == NULL) return NULL;
  if (fault == NULL) fault = seq_tensor_fault(gradient);
  if (fault == NULL && !seq_is_dtype(gradient->view.dtype, STG_DTYPE_FLOAT, 32)) fault = "a gradient that is not float32";
  if (fault == NULL && !seq_is_contiguous(&gradient->view)) fault = "a gradient whose strides are not row-major";
  if (fault == NULL && !seq_same_shape(&gradient->view, &parameter->tensor->view)) fault = "a gradient of another shape";
  if (fault != NULL) {
    return seq_error(STG_INVALID_ARGUMENT, "parameter %.*s got %s", (int)parameter->names[0].size_bytes, parameter->names[0].data,
                     fault);
  }
  const float* from = (const float*)(const void*)seq_data(&gradient->view);
  const int64_t numel = seq_numel(&gradient->view);
  for (int64_t i = 0; i < numel; ++i) strategy->sums[index][i] += from[i];
  strategy->has_sum[index] = 1;
  return NULL;
}

static stg_error* ready(void* self, uint64_t index, stg_tensor* gradient, const stg_stream* stream) {
  (void)stream; /* a CPU has none */
  stg_error* error = add_gradient(self, index, gradient);
  seq_release_tensor(gradient);
  return error;
}

static stg_error* run_replica_backward(stg_strategy* self, uint64_t index, sink* state) {
  seq_replica* replica = &self->replicas[index];
  const stg_model_description* own = &replica->description;
  const double scale = self->step_window == SEQ_WINDOW_SUM ? 1 : replica->weight;
  stg_graph* graph = replica->graph;
  replica->graph = NULL;
  if (scale == 0) { /* not read at all: 0 x NaN would be NaN */
    self->model->release_graph(self->model->self, replica->handle, graph);
    return NULL;
  }
  stg_gradient_sink table;
  memset(&table, 0, sizeof table);
  table.struct_size = sizeof table;
  table.self = state;
  table.ready = ready;
  memset(state->seen, 0, own->num_parameters);
  stg_error* error = self->model->backward(self->model->self, replica->handle, graph, scale, 0, &table);
  for (uint64_t i = 0; error == NULL && i < own->num_parameters; ++i) {
    if (!state->seen[i] && (own->parameters[i]->flags & STG_PARAMETER_REQUIRES_GRAD) != 0) {
      error = seq_error(STG_INTERNAL, "the model reported nothing for parameter %.*s; null says that there is no gradient",
                        (int)own->parameters[i]->names[0].size_bytes, own->parameters[i]->names[0].data);
    }
  }
  if (error != NULL) return seq_replica_error(error, "backward", (int32_t)index, replica->device);
  self->total_weight += replica->weight;
  return NULL;
}

static stg_error* run_backward(stg_strategy* self, const stg_call* call) {
  if (!self->has_graph) {
    return seq_error(STG_FAILED_PRECONDITION, "backward: there is no graph; call training_step before it");
  }
  stg_error* error = NULL;
  if (self->window != SEQ_WINDOW_EMPTY && self->window != self->step_window) {
    error = seq_error(STG_INVALID_ARGUMENT, "backward: micro-batches with and without denominators in one update of a sum loss");
  }
  sink state = {self, malloc(self->replicas[0].description.num_parameters + 1)};
  if (state.seen == NULL) error = seq_out_of_memory();
  for (uint64_t i = 0; error == NULL && i < self->num_devices; ++i) {
    if (self->replicas[i].graph == NULL) continue;
    error = seq_check_time(self, call, "backward", (int32_t)i);
    if (error == NULL) error = run_replica_backward(self, i, &state);
  }
  free(state.seen);
  if (error != NULL) return error;
  self->window = self->step_window;
  self->has_graph = 0;
  ++self->num_micro_batches;
  return NULL;
}

/* ---- update ---- */

static stg_error* check_update(const stg_strategy* self, const stg_update_args* args, stg_update_args* read) {
  stg_error* error = seq_read_struct(read, sizeof *read, args, STG_UPDATE_ARGS_MIN_SIZE, "update_args");
  if (error != NULL) return error;
  if (!self->has_optimizer) {
    return seq_error(STG_FAILED_PRECONDITION,
                     "optimizer_step: the config has no optimizer; add {\"optimizer\": {\"name\": \"sgd\"}}");
  }
  if (read->clip > STG_CLIP_VALUE) return seq_error(STG_INVALID_ARGUMENT, "update_args.clip is %" PRIu64 ", unknown", read->clip);
  if (read->clip != STG_CLIP_NONE) return seq_error(STG_UNIMPLEMENTED, "update_args.clip: this strategy does not clip gradients");
  if (!isfinite(read->lr)) return seq_error(STG_INVALID_ARGUMENT, "update_args.lr is not a finite number");
  return NULL;
}

static void update_parameters(stg_strategy* self, double lr) {
  const double factor = self->window == SEQ_WINDOW_SUM ? lr : lr / self->total_weight;
  for (uint64_t replica = 0; replica < self->num_devices; ++replica) {
    const stg_model_description* own = &self->replicas[replica].description;
    for (uint64_t i = 0; i < own->num_parameters; ++i) {
      if (!self->has_sum[i] || (own->parameters[i]->flags & STG_PARAMETER_REQUIRES_GRAD) == 0) continue;
      float* parameter = (float*)(void*)seq_data(&own->parameters[i]->tensor->view);
      const int64_t numel = seq_numel(&own->parameters[i]->tensor->view);
      for (int64_t k = 0; k < numel; ++k) parameter[k] = (float)(parameter[k] - factor * self->sums[i][k]);
    }
  }
}

static stg_error* run_update(stg_strategy* self, const stg_update_args* args, stg_update_result* result) {
  if (self->num_micro_batches == 0) {
    return seq_error(STG_FAILED_PRECONDITION, "optimizer_step: no gradients; call training_step and backward before it");
  }
  memset(result, 0, sizeof *result);
  result->total_weight = self->total_weight;
  result->gradient_norm = NAN;
  result->loss_scale = 1;
  if (self->window == SEQ_WINDOW_WEIGHTED && self->total_weight == 0) {
    seq_log(self, STG_LOG_WARNING, "all denominators were 0: the update is skipped");
    result->outcome = STG_UPDATE_SKIPPED_NO_WEIGHT;
    seq_clear_gradients(self);
    return NULL;
  }
  update_parameters(self, args->lr);
  seq_clear_gradients(self);
  ++self->num_updates;
  result->outcome = STG_UPDATE_DONE;
  return seq_tell_parameters_changed(self);
}

/* ---- the functions of the table ---- */

static const uint64_t known_flags = STG_BATCH_LAST_MICRO_BATCH | STG_BATCH_DETECT_ANOMALY;

static stg_error* check_flags(uint64_t flags) {
  if ((flags & ~known_flags) == 0) return NULL;
  return seq_error(STG_UNIMPLEMENTED, "flags %" PRIu64 ": only 1 and 2 are known here", flags);
}

/* What training_step and train_batch have in common: arguments in, batch taken. The batch is consumed on every return after this one
 * read the struct. */
static stg_error* take_step(const stg_step_args* args, const stg_step_result* out, stg_step_args* read, seq_batch** batch) {
  stg_error* error = seq_read_struct(read, sizeof *read, args, STG_STEP_ARGS_MIN_SIZE, "step_args");
  if (error == NULL) error = seq_take_batch(read->batch, "batch", batch);
  if (error == NULL && read->announced != 0) {
    error = seq_error(STG_UNIMPLEMENTED, "step_args.announced: this strategy has no announce_batch");
  }
  if (error == NULL) error = seq_check_size(out, STG_STEP_RESULT_MIN_SIZE, "step_result");
  if (error == NULL) error = check_flags(read->flags);
  return error;
}

stg_error* seq_training_step(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out) {
  stg_step_args read;
  stg_step_result result;
  stg_call time;
  seq_batch* batch = NULL;
  stg_error* error = take_step(args, out, &read, &batch);
  if (error == NULL && read.update != NULL) error = seq_error(STG_INVALID_ARGUMENT, "step_args.update is for train_batch only");
  if (error == NULL && (error = seq_enter(self, SEQ_training_step, call, &time)) == NULL) {
    error = run_training_step(self, &time, &read, batch, &result);
    if (error != NULL) seq_clear_gradients(self);
    if (error == NULL) seq_write_struct(out, &result, sizeof result);
    error = seq_leave(self, error);
  }
  seq_drop_batch(batch);
  return error;
}

stg_error* seq_backward(stg_strategy* self, const stg_call* call, uint64_t flags) {
  stg_call time;
  stg_error* error = check_flags(flags);
  if (error == NULL) error = seq_enter(self, SEQ_backward, call, &time);
  if (error != NULL) return error;
  error = run_backward(self, &time);
  if (error != NULL) seq_clear_gradients(self);
  return seq_leave(self, error);
}

stg_error* seq_optimizer_step(stg_strategy* self, const stg_call* call, const stg_update_args* args, stg_update_result* out) {
  stg_update_args read;
  stg_update_result result;
  stg_call time;
  stg_error* error = out == NULL ? NULL : seq_check_size(out, STG_UPDATE_RESULT_MIN_SIZE, "update_result");
  if (error == NULL) error = seq_enter(self, SEQ_optimizer_step, call, &time);
  if (error != NULL) return error;
  error = check_update(self, args, &read);
  if (error == NULL) error = run_update(self, &read, &result);
  if (error == NULL && out != NULL) seq_write_struct(out, &result, sizeof result);
  return seq_leave(self, error);
}

static stg_error* run_train_batch(stg_strategy* self, const stg_call* call, const stg_step_args* args, seq_batch* batch,
                                  stg_step_result* result, stg_update_result* update) {
  const int is_last = (args->flags & STG_BATCH_LAST_MICRO_BATCH) != 0;
  stg_update_args update_args;
  stg_error* error = NULL;
  if (is_last) error = check_update(self, args->update, &update_args);
  if (!is_last && args->update != NULL) {
    error = seq_error(STG_INVALID_ARGUMENT, "step_args.update is set, but STG_BATCH_LAST_MICRO_BATCH is not");
  }
  if (error != NULL) return error;
  memset(update, 0, sizeof *update);
  update->gradient_norm = NAN;
  update->loss_scale = 1;
  error = run_training_step(self, call, args, batch, result);
  if (error == NULL) error = run_backward(self, call);
  update->total_weight = self->total_weight;
  if (error == NULL && is_last) error = run_update(self, &update_args, update);
  if (error != NULL) {
    seq_clear_gradients(self);
    seq_release_tree(&result->outputs);
  }
  return error;
}

stg_error* seq_train_batch(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out,
                           stg_update_result* update) {
  stg_step_args read;
  stg_step_result result;
  stg_update_result updated;
  stg_call time;
  seq_batch* batch = NULL;
  memset(&result, 0, sizeof result);
  stg_error* error = take_step(args, out, &read, &batch);
  if (error == NULL && update != NULL) error = seq_check_size(update, STG_UPDATE_RESULT_MIN_SIZE, "update_result");
  if (error == NULL && (error = seq_enter(self, SEQ_train_batch, call, &time)) == NULL) {
    error = run_train_batch(self, &time, &read, batch, &result, &updated);
    if (error == NULL) seq_write_struct(out, &result, sizeof result);
    if (error == NULL && update != NULL) seq_write_struct(update, &updated, sizeof updated);
    error = seq_leave(self, error);
  }
  seq_drop_batch(batch);
  return error;
}

stg_error* seq_zero_grad(stg_strategy* self, const stg_call* call) {
  stg_call time;
  stg_error* error = seq_enter(self, SEQ_zero_grad, call, &time);
  if (error != NULL) return error;
  seq_clear_gradients(self);
  return seq_leave(self, NULL);
}
