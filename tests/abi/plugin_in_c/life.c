/* SPDX-License-Identifier: Apache-2.0
 *
 * The life of an instance, and what can be asked about it. Setup builds up in one direction; let_go takes down whatever of it is
 * there, so that an error half-way, teardown and destroy are the same thing.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "sequential.h"

/* ---- create and destroy ---- */

stg_error* seq_create(const stg_create_args* args, stg_strategy** out) {
  stg_create_args read;
  seq_config config;
  stg_error* error = seq_check_process();
  if (error == NULL) error = seq_read_struct(&read, sizeof read, args, STG_CREATE_ARGS_MIN_SIZE, "create_args");
  if (error != NULL) return error;
  if (out == NULL) return seq_error(STG_INVALID_ARGUMENT, "create: out is null");
  /* STG_CREATE_CALLER_THREAD_ONLY needs nothing: this strategy has no other threads. */
  if ((read.flags & ~(uint64_t)STG_CREATE_CALLER_THREAD_ONLY) != 0) {
    return seq_error(STG_UNIMPLEMENTED, "create_args.flags is %" PRIu64 "; known is 1", read.flags);
  }
  if (read.host != NULL && (error = seq_check_size(read.host, STG_HOST_MIN_SIZE, "host")) != NULL) return error;
  error = seq_read_config(read.config_json, &config);
  if (error != NULL) return error;

  stg_strategy* self = calloc(1, sizeof *self);
  stg_device* devices = calloc(config.num_devices, sizeof *devices);
  if (self == NULL || devices == NULL || pthread_mutex_init(&self->lock, NULL) != 0) {
    free(self);
    free(devices);
    free(config.devices);
    return seq_out_of_memory();
  }
  for (uint64_t i = 0; i < config.num_devices; ++i) {
    devices[i].kind = STG_DEVICE_CPU;
    devices[i].index = config.devices[i];
  }
  free(config.devices);
  self->devices = devices;
  self->num_devices = config.num_devices;
  self->seed = config.seed;
  self->has_optimizer = config.has_optimizer;
  self->state = STG_STATE_CREATED;
  self->host = read.host;
  if (self->host != NULL && STG_HAS(stg_host, self->host, retain)) self->host->retain(self->host->self);
  seq_watch_forks();
  *out = self;
  return NULL;
}

static void let_go(stg_strategy* self) {
  if (self->model != NULL && self->replicas != NULL) {
    seq_drop_graphs(self);
    for (uint64_t i = 0; i < self->num_devices; ++i) {
      if (self->replicas[i].handle != NULL) self->model->destroy_replica(self->model->self, self->replicas[i].handle);
    }
  }
  for (uint64_t i = 0; self->sums != NULL && self->sums[i] != NULL; ++i) free(self->sums[i]);
  if (self->model != NULL && STG_HAS(stg_model, self->model, release)) self->model->release(self->model->self);
  free(self->replicas);
  free(self->sums);
  free(self->has_sum);
  free(self->weights);
  self->model = NULL;
  self->replicas = NULL;
  self->sums = NULL;
  self->has_sum = NULL;
  self->weights = NULL;
  self->num_weights = 0;
  self->total_weight = 0;
  self->window = SEQ_WINDOW_EMPTY;
  self->has_graph = 0;
  self->num_micro_batches = 0;
  self->num_updates = 0;
  self->stage = STG_STAGE_FIT;
}

/* An abort that came in between wins: seq_leave flags its error as draining. */
static stg_error* enter_state(stg_strategy* self, uint32_t state) {
  pthread_mutex_lock(&self->lock);
  const int is_aborted = self->state == STG_STATE_DRAINING;
  if (!is_aborted) self->state = state;
  pthread_mutex_unlock(&self->lock);
  return is_aborted ? seq_error(STG_ABORTED, "the instance was aborted") : NULL;
}

void seq_destroy(stg_strategy* self) {
  if (self == NULL) return;
  stg_error* error = seq_enter(self, SEQ_destroy, NULL, NULL);
  if (error != NULL) { /* from inside a callback, or in a forked child: leaking is the harmless answer */
    seq_release_error(error);
    return;
  }
  let_go(self);
  if (self->host != NULL && STG_HAS(stg_host, self->host, release)) self->host->release(self->host->self);
  pthread_mutex_destroy(&self->lock);
  free(self->devices);
  free(self);
}

/* ---- setup ---- */

static stg_error* check_model(const stg_model* model) {
  stg_error* error = seq_check_size(model, STG_MODEL_MIN_SIZE, "model");
  if (error != NULL) return error;
  if (!model->replicate || !model->destroy_replica || !model->describe || !model->set_mode || !model->step || !model->backward ||
      !model->release_graph) {
    return seq_error(STG_INVALID_ARGUMENT, "model: one of replicate to release_graph is null; only those after it are optional");
  }
  return NULL;
}

static stg_error* check_parameter(const stg_parameter* parameter) {
  stg_error* error = seq_check_size(parameter, STG_PARAMETER_MIN_SIZE, "parameter");
  if (error != NULL) return error;
  if (parameter->num_names == 0 || parameter->names == NULL) return seq_error(STG_INVALID_ARGUMENT, "a parameter without a name");
  const char* fault = seq_tensor_fault(parameter->tensor);
  if (fault == NULL && !seq_is_dtype(parameter->tensor->view.dtype, STG_DTYPE_FLOAT, 32)) fault = "another dtype than float32";
  if (fault == NULL && !seq_is_contiguous(&parameter->tensor->view)) fault = "strides that are not row-major";
  if (fault == NULL && (parameter->flags & STG_PARAMETER_PINNED) == 0) fault = "no pinned memory (STG_PARAMETER_PINNED)";
  if (fault == NULL && (parameter->tensor->flags & STG_TENSOR_READ_ONLY) != 0) fault = "read-only memory";
  if (fault == NULL) return NULL;
  return seq_error(STG_UNIMPLEMENTED, "parameter %.*s has %s; this strategy updates pinned float32 tensors",
                   (int)parameter->names[0].size_bytes, parameter->names[0].data, fault);
}

static stg_error* check_description(const stg_model_description* own, const stg_model_description* root) {
  if (own->num_buffers != 0) return seq_error(STG_UNIMPLEMENTED, "the model has buffers; this strategy takes models without");
  if (own->loss_kind > STG_LOSS_SUM) return seq_error(STG_INVALID_ARGUMENT, "loss_kind %" PRIu64 " is unknown", own->loss_kind);
  if (own->num_parameters != root->num_parameters) return seq_error(STG_INTERNAL, "the model's replicas differ in parameters");
  for (uint64_t i = 0; i < own->num_parameters; ++i) {
    stg_error* error = check_parameter(own->parameters[i]);
    if (error != NULL) return error;
    if (!seq_same_shape(&own->parameters[i]->tensor->view, &root->parameters[i]->tensor->view)) {
      return seq_error(STG_INTERNAL, "the model's replicas differ in the shape of %.*s",
                       (int)own->parameters[i]->names[0].size_bytes, own->parameters[i]->names[0].data);
    }
  }
  return NULL;
}

static void copy_from_root(stg_strategy* self, uint64_t to) {
  const stg_model_description *root = &self->replicas[0].description, *own = &self->replicas[to].description;
  for (uint64_t i = 0; i < root->num_parameters; ++i) {
    const stg_tensor_view* view = &root->parameters[i]->tensor->view;
    char* memory = seq_data(&own->parameters[i]->tensor->view);
    if (memory != seq_data(view)) seq_copy_elements(memory, view);
  }
}

static stg_error* make_replica(stg_strategy* self, uint64_t index) {
  seq_replica* replica = &self->replicas[index];
  stg_replicate_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.device = replica->device = self->devices[index];
  args.replica = (int32_t)index;
  args.num_replicas = (int32_t)self->num_devices;
  args.floating_dtype.code = STG_DTYPE_FLOAT;
  args.floating_dtype.bits = 32;
  args.floating_dtype.lanes = 1;
  args.seed = self->seed;
  replica->mode = -1;
  stg_error* error = self->model->replicate(self->model->self, &args, &replica->handle);
  if (error != NULL) {
    replica->handle = NULL;
    return seq_replica_error(error, "replicate", (int32_t)index, replica->device);
  }
  replica->description.struct_size = sizeof replica->description;
  error = self->model->describe(self->model->self, replica->handle, &replica->description);
  if (error == NULL) error = check_description(&replica->description, &self->replicas[0].description);
  if (error != NULL) return seq_replica_error(error, "describe", (int32_t)index, replica->device);
  copy_from_root(self, index);
  return NULL;
}

static stg_error* make_sums(stg_strategy* self) {
  const stg_model_description* root = &self->replicas[0].description;
  self->sums = calloc(root->num_parameters + 1, sizeof *self->sums); /* the null at the end stops let_go */
  self->has_sum = calloc(root->num_parameters + 1, sizeof *self->has_sum);
  self->weights = calloc(self->num_devices, sizeof *self->weights);
  if (self->sums == NULL || self->has_sum == NULL || self->weights == NULL) return seq_out_of_memory();
  for (uint64_t i = 0; i < root->num_parameters; ++i) {
    self->sums[i] = calloc((uint64_t)seq_numel(&root->parameters[i]->tensor->view) + 1, sizeof(float));
    if (self->sums[i] == NULL) return seq_out_of_memory();
  }
  return NULL;
}

stg_error* seq_tell_parameters_changed(stg_strategy* self) {
  for (uint64_t i = 0; STG_HAS(stg_model, self->model, parameters_changed) && i < self->num_devices; ++i) {
    stg_error* error = self->model->parameters_changed(self->model->self, self->replicas[i].handle);
    if (error != NULL) return seq_replica_error(error, "parameters_changed", (int32_t)i, self->replicas[i].device);
  }
  return NULL;
}

static stg_error* set_up_model(stg_strategy* self, const stg_call* call, const stg_model* model, const seq_batch* state) {
  stg_error* error = check_model(model);
  if (error != NULL) return error;
  self->model = model;
  if (STG_HAS(stg_model, model, retain)) model->retain(model->self);
  self->replicas = calloc(self->num_devices, sizeof *self->replicas);
  if (self->replicas == NULL) error = seq_out_of_memory();
  for (uint64_t i = 0; error == NULL && i < self->num_devices; ++i) {
    error = seq_check_time(self, call, "replicate", (int32_t)i);
    if (error == NULL) error = make_replica(self, i);
  }
  if (error == NULL) error = make_sums(self);
  if (error == NULL && state != NULL) error = seq_apply_state(self, &state->tree.root, STG_IMPORT_STRICT, NULL);
  if (error == NULL) error = seq_tell_parameters_changed(self);
  if (error != NULL) let_go(self);
  return error;
}

stg_error* seq_setup(stg_strategy* self, const stg_call* call, const stg_setup_args* args) {
  stg_setup_args read;
  stg_call time;
  seq_batch* state = NULL;
  stg_error* error = seq_read_struct(&read, sizeof read, args, STG_SETUP_ARGS_MIN_SIZE, "setup_args");
  if (error == NULL && read.state != NULL) error = seq_take_batch(read.state, "state", &state);
  if (error == NULL && (error = seq_enter(self, SEQ_setup, call, &time)) == NULL) {
    if (read.stage > STG_STAGE_PREDICT) {
      error = seq_error(STG_INVALID_ARGUMENT, "setup_args.stage is %" PRIu64 "; stages are 0 to 3", read.stage);
    } else if (read.model == NULL && state != NULL) {
      error = seq_error(STG_INVALID_ARGUMENT, "setup_args.state is set, but there is no model to take it");
    } else if (read.model != NULL) {
      error = set_up_model(self, &time, read.model, state);
    }
    if (error == NULL) {
      self->stage = (uint32_t)read.stage;
      error = enter_state(self, read.model == NULL            ? STG_STATE_MODELLESS
                                : read.stage == STG_STAGE_FIT ? STG_STATE_FIT
                                                              : STG_STATE_EVALUATE);
    }
    error = seq_leave(self, error);
  }
  seq_drop_batch(state);
  return error;
}

stg_error* seq_teardown(stg_strategy* self, const stg_call* call) {
  stg_call time;
  stg_error* error = seq_enter(self, SEQ_teardown, call, &time);
  if (error != NULL) return error;
  let_go(self);
  return seq_leave(self, enter_state(self, STG_STATE_CREATED));
}

/* ---- questions ---- */

void seq_abort(stg_strategy* self) {
  stg_error* error = seq_check_alive(self);
  if (error != NULL) {
    seq_release_error(error);
    return;
  }
  pthread_mutex_lock(&self->lock);
  self->is_aborted = 1;
  self->state = STG_STATE_DRAINING;
  pthread_mutex_unlock(&self->lock);
}

stg_error* seq_status(stg_strategy* self, stg_status* out) {
  stg_error* error = seq_check_alive(self);
  if (error == NULL) error = seq_check_size(out, STG_STATUS_MIN_SIZE, "status");
  if (error != NULL) return error;
  pthread_mutex_lock(&self->lock);
  self->shown.state = self->state;
  seq_write_struct(out, &self->shown, sizeof self->shown);
  pthread_mutex_unlock(&self->lock);
  return NULL;
}

stg_error* seq_devices(stg_strategy* self, const stg_device** out, uint64_t* num_devices) {
  stg_error* error = seq_check_alive(self);
  if (error == NULL && (out == NULL || num_devices == NULL))
    error = seq_error(STG_INVALID_ARGUMENT, "devices: an output is null");
  if (error != NULL) return error;
  *out = self->devices;
  *num_devices = self->num_devices;
  return NULL;
}

stg_error* seq_ranks(stg_strategy* self, stg_ranks* out) {
  static const stg_ranks ranks = {sizeof ranks, 0, 0, 0, 1};
  stg_error* error = seq_check_alive(self);
  if (error == NULL) error = seq_check_size(out, STG_RANKS_MIN_SIZE, "ranks");
  if (error == NULL) seq_write_struct(out, &ranks, sizeof ranks);
  return error;
}

stg_error* seq_describe_parameters(stg_strategy* self, stg_model_description* out) {
  stg_error* error = seq_check_size(out, STG_MODEL_DESCRIPTION_MIN_SIZE, "model_description");
  if (error == NULL) error = seq_enter(self, SEQ_describe_parameters, NULL, NULL);
  if (error != NULL) return error;
  seq_write_struct(out, &self->replicas[0].description, sizeof self->replicas[0].description);
  return seq_leave(self, NULL);
}
