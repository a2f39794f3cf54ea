/* SPDX-License-Identifier: Apache-2.0
 *
 * One forward pass: the batch is split, each replica runs the model's step on its share, outputs are gathered. Training keeps the
 * graphs for backward; evaluation has none.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sequential.h"

/* What a forward has in its hands; freed as a whole. */
typedef struct forward {
  seq_share* shares;
  stg_tree* outputs;
  uint64_t num_shares;
  int has_denominator; /* -1: not known yet */
} forward;

/* The model's own splitter, for batches whose rows aren't along dim 0. */
static stg_error* split_by_model(stg_strategy* self, const seq_batch* batch, forward* state) {
  stg_tree* trees = calloc(self->num_devices, sizeof *trees);
  uint64_t num_filled = 0;
  if (trees == NULL) return seq_out_of_memory();
  stg_error* error =
      self->model->split(self->model->self, self->replicas[0].handle, &batch->tree, self->num_devices, trees, &num_filled);
  if (error != NULL) error = seq_replica_error(error, "split", 0, self->replicas[0].device);
  if (error == NULL && (num_filled < 1 || num_filled > self->num_devices)) {
    error = seq_error(STG_INVALID_ARGUMENT, "the model's split filled %" PRIu64 " shares; 1 to %" PRIu64 " are possible",
                      num_filled, self->num_devices);
  }
  /* All that it gave is owned before any of it is looked at. */
  for (uint64_t i = 0; i < self->num_devices; ++i) state->shares[i].tree = trees[i];
  state->num_shares = error == NULL ? num_filled : 0;
  for (uint64_t i = 0; i < state->num_shares; ++i) {
    state->shares[i].num_rows = -1;
    if (error == NULL) error = seq_check_tree(&trees[i].root, "share");
    if (error == NULL) error = seq_count_rows(&trees[i].root, &state->shares[i].num_rows);
  }
  free(trees);
  return error;
}

static stg_error* split(stg_strategy* self, seq_batch* batch, uint32_t stage, forward* state) {
  stg_error* error = STG_HAS(stg_model, self->model, split)
                         ? split_by_model(self, batch, state)
                         : seq_split(batch, self->num_devices, state->shares, &state->num_shares);
  if (error == NULL && stage == STG_STAGE_FIT && state->shares[0].num_rows == 0) {
    error = seq_error(STG_INVALID_ARGUMENT, "batch: no rows; a training batch needs at least one");
  }
  if (error == NULL && state->shares[0].num_rows < 0 && self->num_devices > 1) {
    seq_log(self, STG_LOG_WARNING, "the batch has no tensor with rows: it runs on the root device alone");
  }
  return error;
}

/* How much a share counts, from the model's denominator (taken out and released here) or from its rows. */
static stg_error* read_weight(stg_value* denominator, int64_t num_rows, double* out) {
  int is_number = 1;
  *out = num_rows < 0 ? 1 : (double)num_rows;
  if (denominator->type == STG_INT64 || denominator->type == STG_BOOL) *out = (double)denominator->as.i64;
  if (denominator->type == STG_DOUBLE) *out = denominator->as.f64;
  if (denominator->type == STG_TENSOR) {
    is_number = seq_read_number(denominator->as.tensor, out);
    seq_release_tensor(denominator->as.tensor);
  }
  if (!is_number || (denominator->type > STG_DOUBLE && denominator->type != STG_TENSOR) || !isfinite(*out) || *out < 0) {
    return seq_error(STG_INVALID_ARGUMENT, "the denominator must be a number >= 0, or a 0-dim tensor with one");
  }
  return NULL;
}

/* A moved argument is the callee's from the call on, whether or not it sets our struct to zeros. */
static stg_tree take(stg_tree* tree) {
  const stg_tree taken = *tree;
  memset(tree, 0, sizeof *tree);
  return taken;
}

static stg_error* run_share(stg_strategy* self, const seq_step* step, uint64_t index, forward* state) {
  const stg_model* model = self->model;
  seq_replica* replica = &self->replicas[index];
  stg_tree* share = &state->shares[index].tree;
  const int trains = step->stage == STG_STAGE_FIT;
  stg_error* error = NULL;
  if (replica->mode != trains) {
    error = model->set_mode(model->self, replica->handle, (uint32_t)trains);
    if (error != NULL) return seq_replica_error(error, "set_mode", (int32_t)index, replica->device);
    replica->mode = trains;
  }
  if (STG_HAS(stg_model, model, transfer)) {
    stg_tree moved;
    memset(&moved, 0, sizeof moved);
    stg_tree given = take(share);
    error = model->transfer(model->self, replica->handle, &given, step->dataloader_index, &moved);
    if (error != NULL) return seq_replica_error(error, "transfer", (int32_t)index, replica->device);
    *share = moved;
  }
  stg_step_context context;
  memset(&context, 0, sizeof context);
  context.struct_size = sizeof context;
  context.device = replica->device;
  context.replica = (int32_t)index;
  context.num_replicas = (int32_t)self->num_devices;
  context.stage = step->stage;
  context.flags = trains ? STG_STEP_GRADIENT : STG_STEP_INFERENCE;
  if ((step->flags & STG_BATCH_DETECT_ANOMALY) != 0) context.flags |= STG_STEP_DETECT_ANOMALY;
  context.batch_index = step->batch_index;
  context.dataloader_index = step->dataloader_index;
  context.global_step = step->global_step;

  stg_model_step_result result;
  memset(&result, 0, sizeof result);
  result.struct_size = sizeof result;
  stg_tree given = take(share);
  error = model->step(model->self, replica->handle, &context, &given, &result);
  if (error != NULL) return seq_replica_error(error, "step", (int32_t)index, replica->device);
  state->outputs[index] = result.outputs;
  const int has_denominator = result.denominator.type != STG_NONE;
  error = read_weight(&result.denominator, state->shares[index].num_rows, &self->weights[index]);
  if (trains) {
    replica->graph = result.graph;
    replica->weight = self->weights[index];
  } else if (result.graph != NULL) { /* nobody asked for it */
    model->release_graph(model->self, replica->handle, result.graph);
  }
  if (error == NULL && state->has_denominator >= 0 && state->has_denominator != has_denominator) {
    error = seq_error(STG_INVALID_ARGUMENT, "it %s a denominator, an earlier replica did the opposite",
                      has_denominator ? "gave" : "did not give");
  }
  if (error == NULL && trains && result.graph == NULL) error = seq_error(STG_INTERNAL, "the training step gave no graph");
  state->has_denominator = has_denominator;
  return error == NULL ? NULL : seq_replica_error(error, "step", (int32_t)index, replica->device);
}

static stg_error* run(stg_strategy* self, const stg_call* call, const seq_step* step, seq_batch* batch, forward* state,
                      stg_tree* outputs) {
  stg_error* error = split(self, batch, step->stage, state);
  for (uint64_t i = 0; error == NULL && i < state->num_shares; ++i) {
    error = seq_check_time(self, call, "step", (int32_t)i);
    if (error == NULL) error = run_share(self, step, i, state);
  }
  if (error == NULL) error = seq_check_time(self, call, "the end of the step", -1);
  if (error != NULL) return error;
  self->num_weights = state->num_shares;
  const int is_sum = self->replicas[0].description.loss_kind == STG_LOSS_SUM && state->has_denominator != 1;
  if (step->stage == STG_STAGE_FIT) self->step_window = is_sum ? SEQ_WINDOW_SUM : SEQ_WINDOW_WEIGHTED;
  return seq_gather(state->outputs, state->num_shares, step->stage == STG_STAGE_FIT ? self->weights : NULL, is_sum, outputs);
}

stg_error* seq_forward(stg_strategy* self, const stg_call* call, const seq_step* step, seq_batch* batch, stg_tree* outputs) {
  forward state = {NULL, NULL, 0, -1};
  state.shares = calloc(self->num_devices, sizeof *state.shares);
  state.outputs = calloc(self->num_devices, sizeof *state.outputs);
  stg_error* error = NULL;
  if (state.shares == NULL || state.outputs == NULL) {
    error = seq_out_of_memory();
  } else {
    error = run(self, call, step, batch, &state, outputs);
    for (uint64_t i = 0; i < self->num_devices; ++i) {
      seq_release_tree(&state.shares[i].tree);
      seq_release_tree(&state.outputs[i]);
    }
  }
  free(state.shares);
  free(state.outputs);
  if (error != NULL && step->stage == STG_STAGE_FIT) seq_drop_graphs(self);
  return error;
}

/* ---- evaluation ---- */

static stg_error* evaluate(stg_strategy* self, seq_function function, uint32_t stage, const stg_call* call,
                           const stg_step_args* args, stg_step_result* out) {
  stg_step_args read;
  stg_call time;
  seq_batch* batch = NULL;
  stg_error* error = seq_read_struct(&read, sizeof read, args, STG_STEP_ARGS_MIN_SIZE, "step_args");
  if (error == NULL) error = seq_take_batch(read.batch, "batch", &batch);
  if (error == NULL) error = seq_check_size(out, STG_STEP_RESULT_MIN_SIZE, "step_result");
  if (error == NULL && (read.announced != 0 || read.update != NULL || (read.flags & ~(uint64_t)STG_BATCH_DETECT_ANOMALY) != 0)) {
    error = seq_error(STG_INVALID_ARGUMENT, "step_args: announced, update and flags have no use in an evaluation step here");
  }
  if (error == NULL && (error = seq_enter(self, function, call, &time)) == NULL) {
    const seq_step step = {stage, read.flags, read.batch_index, read.dataloader_index, read.global_step};
    stg_step_result result;
    memset(&result, 0, sizeof result);
    error = seq_forward(self, &time, &step, batch, &result.outputs);
    if (error == NULL) {
      result.weights = self->weights;
      result.num_weights = self->num_weights;
      seq_write_struct(out, &result, sizeof result);
    }
    error = seq_leave(self, error);
  }
  seq_drop_batch(batch);
  return error;
}

stg_error* seq_validation_step(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out) {
  return evaluate(self, SEQ_validation_step, STG_STAGE_VALIDATE, call, args, out);
}

stg_error* seq_test_step(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out) {
  return evaluate(self, SEQ_test_step, STG_STAGE_TEST, call, args, out);
}

stg_error* seq_predict_step(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out) {
  return evaluate(self, SEQ_predict_step, STG_STAGE_PREDICT, call, args, out);
}
