/* SPDX-License-Identifier: Apache-2.0
 *
 * See session.h.
 */
#include "session.h"

#include <math.h>
#include <string.h>

stg_error* set_up(session* of, uint64_t stage, stg_tree* state) {
  stg_setup_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.model = &of->model.table;
  args.state = state;
  args.stage = stage;
  return the_host.api->setup(of->strategy, NULL, &args);
}

int open_session(session* out, int is_plain, uint64_t create_flags, uint64_t stage) {
  new_mlp(&out->model, !is_plain);
  out->strategy = make_strategy(1, create_flags, NULL);
  if (out->strategy == NULL) return 0;
  if (SUCCEEDS(set_up(out, stage, NULL))) return 1;
  destroy_strategy(out->strategy);
  out->strategy = NULL;
  return 0;
}

void close_session(session* of) {
  if (of->strategy != NULL) destroy_strategy(of->strategy);
  of->strategy = NULL;
  CHECK_THAT(of->model.num_references == 0, "retain and release of the model are balanced: %d left",
             (int)of->model.num_references);
  CHECK_THAT(of->model.num_replicas == 0, "every replica is destroyed: %d left", (int)of->model.num_replicas);
  CHECK_THAT(of->model.num_graphs == 0, "every graph is consumed: %d left", (int)of->model.num_graphs);
  CHECK_THAT(of->model.num_complaints == 0, "the model was called rightly: %d wrong calls", (int)of->model.num_complaints);
}

/* ---- batches ---- */

void make_batch(batch* out, int64_t num_rows, uint32_t seed) {
  uint32_t random = seed * 2654435761u + 1;
  memset(out, 0, sizeof *out);
  out->num_rows = num_rows;
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int k = 0; k < MLP_NUM_FEATURES; ++k) {
      random = random * 1664525u + 1013904223u;
      out->inputs[i][k] = (float)(random >> 8) / 8388608.0f - 1.0f;
    }
    out->targets[i] = out->inputs[i][0] - 0.5f * out->inputs[i][1] * out->inputs[i][2];
    out->mask[i] = 1;
  }
}

stg_tree batch_tree(const batch* from, int with_mask) {
  static const char* const keys[] = {"inputs", "targets", "mask"};
  const int64_t shape[] = {from->num_rows, MLP_NUM_FEATURES};
  stg_tensor* tensors[3] = {new_float32(2, shape), new_float32(1, shape), NULL};
  memcpy(floats(tensors[0]), from->inputs, (size_t)from->num_rows * sizeof from->inputs[0]);
  memcpy(floats(tensors[1]), from->targets, (size_t)from->num_rows * sizeof(float));
  if (with_mask) {
    tensors[2] = new_float32(1, shape);
    memcpy(floats(tensors[2]), from->mask, (size_t)from->num_rows * sizeof(float));
  }
  return new_dict(with_mask ? 3 : 2, keys, tensors);
}

stg_tree borrowed(const stg_tree* of) {
  stg_tree view = *of;
  view.release = NULL;
  view.owner = NULL;
  return view;
}

/* ---- steps ---- */

static stg_step_args step_args(stg_tree* tree, uint64_t flags) {
  stg_step_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.batch = tree;
  args.flags = flags;
  return args;
}

static stg_update_args update_args(double lr) {
  stg_update_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.lr = lr;
  return args;
}

static void clear_results(stg_step_result* out, stg_update_result* update) {
  if (out != NULL) {
    memset(out, 0, sizeof *out);
    out->struct_size = sizeof *out;
  }
  if (update != NULL) {
    memset(update, 0, sizeof *update);
    update->struct_size = sizeof *update;
  }
}

stg_error* train_batch(const session* of, const stg_call* call, stg_tree* tree, double lr, uint64_t flags, stg_step_result* out,
                       stg_update_result* update) {
  stg_step_args args = step_args(tree, flags);
  const stg_update_args use = update_args(lr);
  if ((flags & STG_BATCH_LAST_MICRO_BATCH) != 0) args.update = &use;
  clear_results(out, update);
  return the_host.api->train_batch(of->strategy, call, &args, out, update);
}

stg_error* training_step(const session* of, stg_tree* tree, stg_step_result* out) {
  const stg_step_args args = step_args(tree, 0);
  clear_results(out, NULL);
  return the_host.api->training_step(of->strategy, NULL, &args, out);
}

stg_error* optimizer_step(const session* of, double lr, stg_update_result* update) {
  const stg_update_args use = update_args(lr);
  clear_results(NULL, update);
  return the_host.api->optimizer_step(of->strategy, NULL, &use, update);
}

stg_error* validation_step(const session* of, stg_tree* tree, stg_step_result* out) {
  const stg_step_args args = step_args(tree, 0);
  clear_results(out, NULL);
  return the_host.api->validation_step(of->strategy, NULL, &args, out);
}

stg_error* train_on(const session* of, const batch* from, double lr) {
  stg_step_result result;
  stg_tree tree = batch_tree(from, 0);
  stg_error* error = train_batch(of, NULL, &tree, lr, STG_BATCH_LAST_MICRO_BATCH, &result, NULL);
  if (error == NULL) release_tree(&result.outputs);
  CHECK_THAT(tree.release == NULL, "a moved batch is consumed and zeroed");
  return error;
}

/* ---- weights ---- */

void read_weights_of(const session* of, weights* out) {
  stg_model_description description;
  memset(&description, 0, sizeof description);
  memset(out, 0, sizeof *out);
  description.struct_size = sizeof description;
  if (!SUCCEEDS(the_host.api->describe_parameters(of->strategy, &description))) return;
  if (!CHECK(description.num_parameters == MLP_NUM_PARAMETERS)) return;
  for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
    for (int64_t i = 0; i < mlp_numel[p]; ++i) out->of[p][i] = element(description.parameters[p]->tensor, i);
  }
}

void check_weights(const session* of, const weights* expected, double tolerance, const char* where) {
  weights now;
  read_weights_of(of, &now);
  for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
    for (int64_t i = 0; i < mlp_numel[p]; ++i) {
      CHECK_THAT(is_close(now.of[p][i], expected->of[p][i], tolerance), "%s: parameter %d[%d] is %.9g, expected %.9g", where, p,
                 (int)i, now.of[p][i], expected->of[p][i]);
    }
  }
}

void check_equal_weights(const session* a, const session* b, const char* where) {
  weights first, second;
  read_weights_of(a, &first);
  read_weights_of(b, &second);
  CHECK_THAT(memcmp(&first, &second, sizeof first) == 0, "%s: the weights are equal, bitwise", where);
}

void update_reference(weights* at, batch* from, double lr) {
  weights gradient;
  memset(&gradient, 0, sizeof gradient);
  run_reference(at, from->num_rows, from->inputs, from->targets, NULL, 0, 1, NULL, &gradient);
  for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
    for (int64_t i = 0; i < mlp_numel[p]; ++i) at->of[p][i] -= lr * gradient.of[p][i];
  }
}

double loss_of(const stg_step_result* result) {
  const stg_value* loss = find_key(&result->outputs.root, "loss");
  if (!CHECK(loss != NULL && loss->type == STG_TENSOR && loss->as.tensor->view.num_dims == 0)) return NAN;
  return element(loss->as.tensor, 0);
}
