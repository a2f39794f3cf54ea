/* SPDX-License-Identifier: Apache-2.0
 *
 * The model's functions; see mlp.h. A graph is the batch, kept until backward: if a strategy released it too early, or moved on with
 * the memory of a borrowed one, the gradient would be wrong.
 */
#include "mlp.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const int64_t shapes[MLP_NUM_PARAMETERS][2] = {
    {MLP_NUM_HIDDEN, MLP_NUM_FEATURES}, {MLP_NUM_HIDDEN, 0}, {1, MLP_NUM_HIDDEN}, {1, 0}};
static const int32_t num_dims[MLP_NUM_PARAMETERS] = {2, 1, 2, 1};
const int64_t mlp_numel[MLP_NUM_PARAMETERS] = {MLP_NUM_HIDDEN * MLP_NUM_FEATURES, MLP_NUM_HIDDEN, MLP_NUM_HIDDEN, 1};
#define NAME(text) \
  { text, sizeof(text) - 1 }
static const stg_string names[MLP_NUM_PARAMETERS] = {NAME("hidden.weight"), NAME("hidden.bias"), NAME("out.weight"),
                                                     NAME("out.bias")};

struct stg_replica {
  mlp* model;
  int32_t index;
  stg_tensor* own[MLP_NUM_PARAMETERS];
  stg_tensor shown[MLP_NUM_PARAMETERS];            /* views of own, or of what bind gave */
  const stg_tensor* gradients[MLP_NUM_PARAMETERS]; /* what bind gave, may be null */
  stg_tensor fixed[MLP_NUM_PARAMETERS];            /* gradients without a deleter, over `memory` */
  float memory[MLP_NUM_PARAMETERS][MLP_NUM_HIDDEN * MLP_NUM_FEATURES];
  stg_parameter parameters[MLP_NUM_PARAMETERS];
  const stg_parameter* list[MLP_NUM_PARAMETERS];
};

struct stg_graph {
  stg_tree batch;
  double divisor;
};

/* ---- arithmetic ---- */

void first_weights(weights* out) {
  uint32_t random = 99;
  for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
    for (int64_t i = 0; i < mlp_numel[p]; ++i) {
      random = random * 1664525u + 1013904223u;
      out->of[p][i] = (float)((double)(random >> 8) / 8388608.0 - 1.0);
    }
  }
}

/* One row; adds slope x d prediction to `gradient` unless that is null. Gives the prediction. */
static double run_row(const weights* at, const double* x, double slope, weights* gradient) {
  double hidden[MLP_NUM_HIDDEN], prediction = at->of[3][0];
  for (int h = 0; h < MLP_NUM_HIDDEN; ++h) {
    double sum = at->of[1][h];
    for (int k = 0; k < MLP_NUM_FEATURES; ++k) sum += at->of[0][h * MLP_NUM_FEATURES + k] * x[k];
    hidden[h] = tanh(sum);
    prediction += at->of[2][h] * hidden[h];
  }
  if (gradient == NULL) return prediction;
  gradient->of[3][0] += slope;
  for (int h = 0; h < MLP_NUM_HIDDEN; ++h) {
    const double back = slope * at->of[2][h] * (1 - hidden[h] * hidden[h]);
    gradient->of[2][h] += slope * hidden[h];
    gradient->of[1][h] += back;
    for (int k = 0; k < MLP_NUM_FEATURES; ++k) gradient->of[0][h * MLP_NUM_FEATURES + k] += back * x[k];
  }
  return prediction;
}

double run_reference(const weights* at, int64_t num_rows, float (*inputs)[MLP_NUM_FEATURES], const float* targets,
                     const float* mask, int is_sum, double scale, double* predictions, weights* gradient) {
  double divisor = 0, loss = 0;
  for (int64_t i = 0; i < num_rows; ++i) divisor += mask == NULL ? 1 : (double)mask[i];
  if (is_sum) divisor = 1;
  for (int64_t i = 0; i < num_rows; ++i) {
    if (mask != NULL && mask[i] == 0) continue;
    const double x[MLP_NUM_FEATURES] = {inputs[i][0], inputs[i][1], inputs[i][2]};
    const double prediction = run_row(at, x, 0, NULL), difference = prediction - (double)targets[i];
    if (predictions != NULL) predictions[i] = prediction;
    loss += difference * difference / divisor;
    if (gradient != NULL) run_row(at, x, 2 * difference / divisor * scale, gradient);
  }
  return loss;
}

/* ---- reading a batch: any structure that mlp.h lists, any strides ---- */

typedef struct rows {
  const stg_tensor_view *inputs, *targets, *mask;
  int32_t target_column; /* -1: targets are a tensor of their own */
  int64_t num_rows;
} rows;

static float at(const stg_tensor_view* view, int64_t row, int64_t column) {
  const char* data = (const char*)view->data + view->byte_offset;
  const int64_t row_stride = view->strides != NULL ? view->strides[0] : view->num_dims == 2 ? view->shape[1] : 1;
  const int64_t column_stride = view->num_dims < 2 ? 0 : view->strides != NULL ? view->strides[1] : 1;
  return ((const float*)(const void*)data)[row * row_stride + column * column_stride];
}

static const stg_tensor_view* view_of(const stg_value* value) {
  return value != NULL && value->type == STG_TENSOR ? &value->as.tensor->view : NULL;
}

static int read_rows(const stg_tree* batch, rows* out) {
  const stg_value* root = &batch->root;
  memset(out, 0, sizeof *out);
  out->target_column = -1;
  if (root->type == STG_DICT) {
    out->inputs = view_of(find_key(root, "inputs"));
    out->targets = view_of(find_key(root, "targets"));
    out->mask = view_of(find_key(root, "mask"));
  } else if ((root->type == STG_LIST || root->type == STG_TUPLE) && root->count == 2) {
    out->inputs = view_of(&root->as.items[0]);
    out->targets = view_of(&root->as.items[1]);
  } else if (root->type == STG_TENSOR) {
    out->inputs = out->targets = view_of(root);
    out->target_column = MLP_NUM_FEATURES;
  }
  if (out->inputs == NULL || out->targets == NULL || out->inputs->num_dims != 2) return 0;
  out->num_rows = out->inputs->shape[0];
  return out->targets->shape[0] == out->num_rows && (out->mask == NULL || out->mask->shape[0] == out->num_rows);
}

/* ---- errors of the model's own ---- */

static void release_error(stg_error* self) {
  if (self->cause != NULL) self->cause->release(self->cause);
  free(self);
}

static stg_error* new_error(uint32_t code, const char* text) {
  stg_error* error = calloc(1, sizeof *error);
  if (error == NULL) abort();
  error->code = code;
  error->replica = error->rank = error->device.index = -1;
  error->message.data = text;
  error->message.size_bytes = strlen(text);
  error->release = release_error;
  return error;
}

static stg_error* told_to_fail(mlp* self, int32_t replica, int where) {
  if (self->aborts != NULL && self->abort_in == where) the_host.api->abort(self->aborts);
  if (self->fail_replica != replica || self->fail_in != where) return NULL;
  stg_error* error = new_error(STG_DATA_LOSS, MLP_FAILURE_TEXT); /* a code that a strategy would not choose by itself */
  error->flags = self->fail_flags;
  error->owner = self;
  return error;
}

static void complain_if(mlp* self, int is_wrong) {
  if (is_wrong) __atomic_fetch_add(&self->num_complaints, 1, __ATOMIC_RELAXED);
}

static void count(int64_t* counter, int64_t by) { __atomic_fetch_add(counter, by, __ATOMIC_RELAXED); }

static mlp* enter(void* self) {
  mlp* model = self;
  complain_if(model, model->only_caller && !pthread_equal(pthread_self(), model->caller));
  return model;
}

/* ---- replicas ---- */

static void retain(void* self) { count(&enter(self)->num_references, 1); }
static void release(void* self) { count(&enter(self)->num_references, -1); }

static stg_error* replicate(void* self, const stg_replicate_args* args, stg_replica** out) {
  mlp* model = enter(self);
  weights first;
  stg_error* error = told_to_fail(model, args->replica, MLP_IN_REPLICATE);
  if (error != NULL) return error;
  stg_replica* replica = calloc(1, sizeof *replica);
  if (replica == NULL) abort();
  first_weights(&first);
  replica->model = model;
  replica->index = args->replica;
  for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
    replica->own[p] = new_float32(num_dims[p], shapes[p]);
    for (int64_t i = 0; i < mlp_numel[p]; ++i) set_element(replica->own[p], i, first.of[p][i]);
    replica->shown[p] = *replica->own[p];
    replica->shown[p].deleter = NULL;
    replica->parameters[p].struct_size = sizeof replica->parameters[p];
    replica->parameters[p].names = &names[p];
    replica->parameters[p].num_names = 1;
    replica->parameters[p].tensor = &replica->shown[p];
    replica->parameters[p].flags = STG_PARAMETER_REQUIRES_GRAD | STG_PARAMETER_PERSISTENT | STG_PARAMETER_PINNED;
    replica->list[p] = &replica->parameters[p];
  }
  count(&model->num_replicas, 1);
  *out = replica;
  return NULL;
}

static void destroy_replica(void* self, stg_replica* replica) {
  count(&enter(self)->num_replicas, -1);
  told_to_fail(self, -2, MLP_IN_DESTROY); /* it can't fail, but it can abort */
  for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) release_tensor(replica->own[p]);
  free(replica);
}

static stg_error* describe(void* self, stg_replica* replica, stg_model_description* out) {
  mlp* model = enter(self);
  stg_model_description own;
  memset(&own, 0, sizeof own);
  own.struct_size = out->struct_size < sizeof own ? out->struct_size : sizeof own;
  own.parameters = replica->list;
  own.num_parameters = MLP_NUM_PARAMETERS;
  own.loss_kind = model->is_sum ? STG_LOSS_SUM : STG_LOSS_MEAN;
  memcpy(out, &own, own.struct_size);
  return NULL;
}

static stg_error* set_mode(void* self, stg_replica* replica, uint32_t train) {
  (void)replica;
  complain_if(enter(self), train > 1);
  return NULL;
}

static stg_error* bind(void* self, stg_replica* replica, uint64_t index, const stg_tensor* storage, const stg_tensor* gradient) {
  enter(self);
  if (index >= MLP_NUM_PARAMETERS) return new_error(STG_OUT_OF_RANGE, "bind: the model has 4 parameters and no buffers");
  replica->shown[index].view.data = storage->view.data;
  replica->shown[index].view.byte_offset = storage->view.byte_offset;
  replica->gradients[index] = gradient;
  return NULL;
}

static stg_error* parameters_changed(void* self, stg_replica* replica) {
  (void)replica;
  count(&enter(self)->num_told_changed, 1);
  return NULL;
}

/* ---- step ---- */

static void read_weights(const stg_replica* replica, weights* out) {
  for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
    for (int64_t i = 0; i < mlp_numel[p]; ++i) out->of[p][i] = element(&replica->shown[p], i);
  }
}

static void misbehave(mlp* model, int32_t replica) {
  if (model->destroys != NULL && replica == (int32_t)the_host.num_devices - 1) the_host.api->destroy(model->destroys);
  if (model->slow_replica == replica) {
    const struct timespec pause = {0, 300000000};
    nanosleep(&pause, NULL);
  }
  if (model->inside != NULL && replica == (int32_t)the_host.num_devices - 1) model->inside(model->inside_context);
}

static void row_of(const rows* from, int64_t row, double* x) {
  for (int k = 0; k < MLP_NUM_FEATURES; ++k) x[k] = (double)at(from->inputs, row, k);
}

static double difference(const weights* now, const rows* from, int64_t row, stg_tensor* predictions) {
  double x[MLP_NUM_FEATURES];
  row_of(from, row, x);
  const double prediction = run_row(now, x, 0, NULL);
  if (predictions != NULL) set_element(predictions, row, prediction);
  return prediction - (double)at(from->targets, row, from->target_column < 0 ? 0 : from->target_column);
}

static stg_error* step(void* self, stg_replica* replica, const stg_step_context* context, stg_tree* batch,
                       stg_model_step_result* result) {
  static const char* const keys[] = {"predictions", "loss"};
  mlp* model = enter(self);
  rows from;
  weights now;
  stg_tree own = *batch; /* moved in */
  memset(batch, 0, sizeof *batch);
  count(&model->num_steps, 1);
  complain_if(model, own.release == NULL || context->replica != replica->index);
  complain_if(model, (context->stage == STG_STAGE_FIT) != ((context->flags & STG_STEP_GRADIENT) != 0));
  misbehave(model, replica->index);
  stg_error* error = told_to_fail(model, replica->index, MLP_IN_STEP);
  if (error == NULL && !read_rows(&own, &from)) error = new_error(STG_INVALID_ARGUMENT, "the model can't read this batch");
  if (error != NULL) {
    release_tree(&own);
    return error;
  }
  read_weights(replica, &now);
  double divisor = 0, loss = 0;
  const int64_t shape[] = {from.num_rows};
  stg_tensor* made[2] = {new_float32(1, shape), new_float32(0, NULL)};
  for (int64_t i = 0; i < from.num_rows; ++i) {
    const double weight = from.mask == NULL ? 1 : (double)at(from.mask, i, 0), distance = difference(&now, &from, i, made[0]);
    divisor += weight;
    if (weight != 0) loss += distance * distance;
  }
  if (model->is_sum) divisor = 1;
  set_element(made[1], 0, loss / divisor); /* NaN where nothing counts */
  result->outputs = new_dict(2, keys, made);
  if (model->is_masked) {
    result->denominator.type = STG_DOUBLE;
    result->denominator.as.f64 = divisor;
  }
  if (model->denominator != NULL && replica->index == 0) {
    result->denominator.type = STG_TENSOR;
    result->denominator.as.tensor = model->denominator; /* the caller's from here on */
    model->denominator = NULL;
  }
  if ((context->flags & STG_STEP_GRADIENT) == 0) {
    release_tree(&own);
    return NULL;
  }
  stg_graph* graph = calloc(1, sizeof *graph);
  if (graph == NULL) abort();
  graph->batch = own;
  graph->divisor = divisor;
  result->graph = graph;
  count(&model->num_graphs, 1);
  return NULL;
}

/* ---- backward ---- */

static void release_graph(void* self, stg_replica* replica, stg_graph* graph) {
  (void)replica;
  count(&enter(self)->num_graphs, -1);
  release_tree(&graph->batch);
  free(graph);
}

/* The gradient as a tensor to be moved: a new one, a handle over the memory that bind gave, or one that nobody has to release. */
static stg_tensor* gradient_tensor(stg_replica* replica, int p) {
  if (replica->model->no_deleters) {
    replica->fixed[p] = *replica->own[p];
    replica->fixed[p].view.data = replica->memory[p];
    replica->fixed[p].deleter = NULL;
    return &replica->fixed[p];
  }
  stg_tensor* made = new_float32(num_dims[p], shapes[p]);
  if (replica->gradients[p] != NULL) {
    made->view.data = replica->gradients[p]->view.data;
    made->view.byte_offset = replica->gradients[p]->view.byte_offset;
  }
  return made;
}

static stg_error* backward(void* self, stg_replica* replica, stg_graph* graph, double scale, uint32_t flags,
                           const stg_gradient_sink* sink) {
  mlp* model = enter(self);
  weights now, gradient;
  rows from;
  complain_if(model, flags != 0);
  stg_error* error = told_to_fail(model, replica->index, MLP_IN_BACKWARD);
  memset(&gradient, 0, sizeof gradient);
  read_weights(replica, &now);
  read_rows(&graph->batch, &from);
  for (int64_t i = 0; i < from.num_rows; ++i) {
    double x[MLP_NUM_FEATURES];
    if (from.mask != NULL && at(from.mask, i, 0) == 0) continue;
    row_of(&from, i, x);
    run_row(&now, x, 2 * difference(&now, &from, i, NULL) / graph->divisor * scale, &gradient);
  }
  /* Last layer first; told to fail, half of the gradients have been reported. */
  for (int p = MLP_NUM_PARAMETERS - 1; p >= 0; --p) {
    if (error != NULL && p < 2) break;
    stg_tensor* tensor = model->null_parameter == p ? NULL : gradient_tensor(replica, p);
    /* Of a share in which nothing counts everything is 0 / 0: nobody may read it. */
    for (int64_t i = 0; tensor != NULL && i < mlp_numel[p]; ++i) {
      set_element(tensor, i, graph->divisor == 0 ? NAN : gradient.of[p][i]);
    }
    stg_error* refused = sink->ready(sink->self, (uint64_t)p, tensor, NULL);
    if (refused == NULL) continue;
    if (error != NULL) error->release(error);
    error = new_error(refused->code, "the strategy refused a gradient"); /* with it as the cause, as the header asks */
    error->cause = refused;
    break;
  }
  release_graph(self, replica, graph);
  return error;
}

/* ---- optional slots ---- */

static stg_tensor* copy_rows(const stg_tensor_view* from, int64_t first, int64_t num_rows) {
  int64_t shape[2] = {num_rows, from->num_dims < 2 ? 1 : from->shape[1]};
  stg_tensor* made = new_float32(from->num_dims, shape);
  for (int64_t i = 0; i < num_rows * shape[1]; ++i) {
    floats(made)[i] = at(from, first + i / shape[1], i % shape[1]);
  }
  return made;
}

stg_error* mlp_split(void* self, stg_replica* replica, const stg_tree* batch, uint64_t num_shares, stg_tree* shares,
                     uint64_t* num_filled) {
  static const char* const keys[] = {"inputs", "targets"};
  rows from;
  int64_t first = 0;
  complain_if(enter(self), batch->root.type != STG_DICT || replica->index != 0);
  read_rows(batch, &from);
  for (*num_filled = 0; *num_filled < num_shares && first < from.num_rows; ++*num_filled) {
    const int64_t left = from.num_rows - first, wanted = (int64_t)*num_filled + 1;
    const int64_t num_rows = *num_filled + 1 == num_shares || wanted > left ? left : wanted;
    stg_tensor* tensors[] = {copy_rows(from.inputs, first, num_rows), copy_rows(from.targets, first, num_rows)};
    shares[*num_filled] = new_dict(2, keys, tensors);
    first += num_rows;
  }
  return NULL;
}

stg_error* mlp_transfer(void* self, stg_replica* replica, stg_tree* batch, int64_t dataloader_index, stg_tree* out) {
  mlp* model = enter(self);
  (void)replica;
  complain_if(model, batch->release == NULL);
  __atomic_store_n(&model->dataloader_index, dataloader_index, __ATOMIC_RELAXED);
  *out = *batch;
  memset(batch, 0, sizeof *batch);
  return NULL;
}

void new_mlp(mlp* out, int with_bind) {
  memset(out, 0, sizeof *out);
  out->fail_replica = out->slow_replica = -1;
  out->null_parameter = -1;
  out->caller = pthread_self();
  out->table.struct_size = sizeof out->table;
  out->table.self = out;
  out->table.retain = retain;
  out->table.release = release;
  out->table.replicate = replicate;
  out->table.destroy_replica = destroy_replica;
  out->table.describe = describe;
  out->table.set_mode = set_mode;
  out->table.step = step;
  out->table.backward = backward;
  out->table.release_graph = release_graph;
  if (with_bind) {
    out->table.bind = bind;
    out->table.parameters_changed = parameters_changed;
  } else {
    out->table.struct_size = STG_MODEL_MIN_SIZE; /* the optional slots are past the size: not to be read */
    memset((char*)&out->table + STG_MODEL_MIN_SIZE, 0xab, sizeof out->table - STG_MODEL_MIN_SIZE);
  }
}
