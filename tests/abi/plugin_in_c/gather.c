/* SPDX-License-Identifier: Apache-2.0
 *
 * The replicas' outputs into one tree, in replica order: tensors joined along dim 0, a number or 0-dim tensor per replica made a
 * 1-dim tensor, lists of strings joined, other structures walked; they must agree. Of a training step the loss becomes one number.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sequential.h"

typedef struct gather {
  stg_tree* tree; /* the result, which owns all that is allocated */
  uint64_t num_replicas;
  const double* weights; /* null: nothing is a loss */
  int is_sum;
  stg_error* error;
} gather;

/* What is gathered at one place of the tree: one value per replica. */
typedef const stg_value* const* values;

static int fail(gather* state, const seq_path* path, uint64_t replica, const char* what) {
  char text[512];
  if (state->error == NULL) {
    state->error = seq_error(STG_INVALID_ARGUMENT, "outputs: at %s replica %" PRIu64 " differs from replica 0 in %s",
                             seq_path_text(path, text, sizeof text), replica, what);
    if (state->error != seq_out_of_memory()) state->error->replica = (int32_t)replica;
  }
  return 0;
}

static int no_memory(gather* state) {
  if (state->error == NULL) state->error = seq_out_of_memory();
  return 0;
}

static stg_tensor* add_tensor(gather* state, stg_value* to, stg_dtype dtype, int32_t num_dims, const int64_t* shape) {
  stg_tensor* tensor = seq_new_tensor(dtype, num_dims, shape);
  if (tensor == NULL) {
    no_memory(state);
    return NULL;
  }
  to->type = STG_TENSOR;
  to->as.tensor = tensor;
  return tensor;
}

/* ---- tensors ---- */

static int join_tensors(gather* state, stg_value* to, values from, const seq_path* path) {
  const stg_tensor_view* first = &from[0]->as.tensor->view;
  int64_t shape[64] = {0};
  for (int32_t dim = 0; dim < first->num_dims; ++dim) shape[dim] = first->shape[dim];
  shape[0] = 0;
  for (uint64_t i = 0; i < state->num_replicas; ++i) {
    const stg_tensor_view* view = &from[i]->as.tensor->view;
    if (memcmp(&view->dtype, &first->dtype, sizeof view->dtype) != 0) return fail(state, path, i, "dtype");
    if (view->num_dims != first->num_dims) return fail(state, path, i, "its number of dimensions");
    for (int32_t dim = 1; dim < view->num_dims; ++dim) {
      if (view->shape[dim] != first->shape[dim]) return fail(state, path, i, "a dimension other than the first");
    }
    const int64_t num_rows = view->num_dims == 0 ? 1 : view->shape[0];
    if (num_rows > INT64_MAX / 8192 - shape[0]) return no_memory(state);
    shape[0] += num_rows;
  }
  stg_tensor* joined = add_tensor(state, to, first->dtype, first->num_dims == 0 ? 1 : first->num_dims, shape);
  if (joined == NULL) return 0;
  char* at = seq_data(&joined->view);
  for (uint64_t i = 0; i < state->num_replicas; ++i) {
    const stg_tensor_view* view = &from[i]->as.tensor->view;
    seq_copy_elements(at, view);
    at += (uint64_t)seq_numel(view) * seq_element_bytes(view->dtype);
  }
  return 1;
}

static int join_numbers(gather* state, stg_value* to, values from) {
  static const stg_dtype bool8 = {STG_DTYPE_BOOL, 8, 1}, int64 = {STG_DTYPE_INT, 64, 1}, float64 = {STG_DTYPE_FLOAT, 64, 1};
  const uint32_t type = from[0]->type;
  const int64_t shape[1] = {(int64_t)state->num_replicas};
  stg_tensor* joined = add_tensor(state, to, type == STG_BOOL ? bool8 : type == STG_INT64 ? int64 : float64, 1, shape);
  if (joined == NULL) return 0;
  for (uint64_t i = 0; i < state->num_replicas; ++i) {
    char* data = seq_data(&joined->view);
    if (type == STG_BOOL) {
      data[i] = from[i]->as.i64 != 0;
    } else {
      memcpy(data + 8 * i, &from[i]->as, 8);
    }
  }
  return 1;
}

/* The loss of the whole batch. A share of weight 0 is not read: its loss may be NaN. */
static int join_losses(gather* state, stg_value* to, values from, const seq_path* path) {
  double sum = 0, total_weight = 0;
  char text[512];
  for (uint64_t i = 0; i < state->num_replicas; ++i) {
    double loss = 0;
    if (from[i]->type != STG_TENSOR || from[i]->as.tensor->view.num_dims != 0 ||
        from[i]->as.tensor->view.dtype.code != STG_DTYPE_FLOAT || !seq_read_number(from[i]->as.tensor, &loss)) {
      state->error = seq_error(STG_INVALID_ARGUMENT, "outputs: the loss at %s of replica %" PRIu64 " is not a 0-dim float tensor",
                               seq_path_text(path, text, sizeof text), i);
      return 0;
    }
    const double weight = state->is_sum ? 1 : state->weights[i];
    if (weight != 0) sum += weight * loss;
    total_weight += weight;
  }
  const double loss = state->is_sum ? sum : total_weight == 0 ? NAN : sum / total_weight;
  const stg_dtype dtype = from[0]->as.tensor->view.dtype;
  stg_tensor* joined = add_tensor(state, to, dtype, 0, NULL);
  if (joined == NULL) return 0;
  const float rounded = (float)loss;
  if (dtype.bits == 32) {
    memcpy(seq_data(&joined->view), &rounded, sizeof rounded);
  } else {
    memcpy(seq_data(&joined->view), &loss, sizeof loss);
  }
  return 1;
}

/* ---- other leaves and structures ---- */

static int join_value(gather* state, stg_value* to, values from, const seq_path* path);

static int copy_leaf(gather* state, stg_value* to, const stg_value* from) {
  if (from->type == STG_OPAQUE) {
    *to = *from;
    to->as.opaque->retain(to->as.opaque);
    return 1;
  }
  if (!seq_tree_text(state->tree, to, from->as.utf8, from->count)) return no_memory(state);
  to->type = from->type;
  return 1;
}

static int list_leaves(gather* state, stg_value* to, values from) {
  to->as.items = seq_tree_alloc(state->tree, state->num_replicas * sizeof(stg_value));
  if (to->as.items == NULL) return no_memory(state);
  to->type = STG_LIST;
  to->count = (uint32_t)state->num_replicas;
  for (uint32_t at = 0; at < to->count; ++at) {
    if (!copy_leaf(state, &to->as.items[at], from[at])) return 0;
  }
  return 1;
}

static int are_all_strings(const gather* state, values from) {
  for (uint64_t i = 0; i < state->num_replicas; ++i) {
    if (from[i]->count == 0) return 0;
    for (uint32_t item = 0; item < from[i]->count; ++item) {
      if (from[i]->as.items[item].type != STG_STRING) return 0;
    }
  }
  return 1;
}

static int join_strings(gather* state, stg_value* to, values from) {
  uint64_t total = 0;
  for (uint64_t i = 0; i < state->num_replicas; ++i) total += from[i]->count;
  to->as.items = seq_tree_alloc(state->tree, total * sizeof(stg_value));
  if (to->as.items == NULL) return no_memory(state);
  to->type = STG_LIST;
  to->count = (uint32_t)total;
  uint64_t at = 0;
  for (uint64_t i = 0; i < state->num_replicas; ++i) {
    for (uint32_t item = 0; item < from[i]->count; ++item, ++at) {
      if (!copy_leaf(state, &to->as.items[at], &from[i]->as.items[item])) return 0;
    }
  }
  return 1;
}

static int have_equal_counts(gather* state, values from, const seq_path* path) {
  for (uint64_t i = 1; i < state->num_replicas; ++i) {
    if (from[i]->count != from[0]->count) return fail(state, path, i, "its number of entries");
  }
  return 1;
}

static int join_items(gather* state, stg_value* to, values from, const seq_path* path) {
  const stg_value** column = seq_tree_alloc(state->tree, state->num_replicas * sizeof *column);
  to->as.items = seq_tree_alloc(state->tree, from[0]->count * sizeof(stg_value));
  if (column == NULL || to->as.items == NULL) return no_memory(state);
  to->type = from[0]->type;
  to->count = from[0]->count;
  for (uint32_t at = 0; at < to->count; ++at) {
    const seq_path child = {path, {NULL, 0}, at};
    for (uint64_t i = 0; i < state->num_replicas; ++i) {
      column[i] = &from[i]->as.items[at];
    }
    if (!join_value(state, &to->as.items[at], column, &child)) return 0;
  }
  return 1;
}

static const stg_value* find_key(const stg_value* dict, stg_string key) {
  for (uint32_t i = 0; i < dict->count; ++i) {
    if (seq_same_text(dict->as.entries[i].key, key)) return &dict->as.entries[i].value;
  }
  return NULL;
}

static int join_entries(gather* state, stg_value* to, values from, const seq_path* path) {
  static const stg_string loss = {"loss", 4};
  const stg_value** column = seq_tree_alloc(state->tree, state->num_replicas * sizeof *column);
  to->as.entries = seq_tree_alloc(state->tree, from[0]->count * sizeof(stg_entry));
  if (column == NULL || to->as.entries == NULL) return no_memory(state);
  to->type = STG_DICT;
  to->count = from[0]->count;
  for (uint32_t at = 0; at < to->count; ++at) {
    stg_entry* entry = &to->as.entries[at];
    stg_value key = {STG_NONE, 0, {0}};
    const seq_path child = {path, from[0]->as.entries[at].key, at};
    if (!seq_tree_text(state->tree, &key, child.key.data, child.key.size_bytes)) return no_memory(state);
    entry->key.data = key.as.utf8;
    entry->key.size_bytes = key.count;
    for (uint64_t i = 0; i < state->num_replicas; ++i) {
      column[i] = find_key(from[i], child.key);
      if (column[i] == NULL) return fail(state, &child, i, "having no such key");
    }
    const int is_loss = state->weights != NULL && path->parent == NULL && seq_same_text(child.key, loss);
    if (!(is_loss ? join_losses : join_value)(state, &entry->value, column, &child)) return 0;
  }
  return 1;
}

static int join_value(gather* state, stg_value* to, values from, const seq_path* path) {
  const uint32_t type = from[0]->type;
  for (uint64_t i = 1; i < state->num_replicas; ++i) {
    if (from[i]->type != type) return fail(state, path, i, "type");
  }
  switch (type) {
    case STG_NONE:
      return 1;
    case STG_TENSOR:
      return join_tensors(state, to, from, path);
    case STG_BOOL:
    case STG_INT64:
    case STG_DOUBLE:
      return join_numbers(state, to, from);
    case STG_LIST:
      if (are_all_strings(state, from)) return join_strings(state, to, from);
      return have_equal_counts(state, from, path) && join_items(state, to, from, path);
    case STG_TUPLE:
      return have_equal_counts(state, from, path) && join_items(state, to, from, path);
    case STG_DICT:
      return have_equal_counts(state, from, path) && join_entries(state, to, from, path);
    default:
      return list_leaves(state, to, from);
  }
}

stg_error* seq_gather(const stg_tree* outputs, uint64_t num_outputs, const double* weights, int is_sum, stg_tree* out) {
  const seq_path root = {NULL, {NULL, 0}, 0};
  gather state = {out, num_outputs, weights, is_sum, NULL};
  stg_error* error = seq_new_tree(out);
  if (error != NULL) return error;
  const stg_value** roots = seq_tree_alloc(out, num_outputs * sizeof *roots);
  if (roots == NULL) {
    no_memory(&state);
  } else {
    for (uint64_t i = 0; i < num_outputs; ++i) roots[i] = &outputs[i].root;
    if (weights != NULL && seq_find(roots[0], "loss") == NULL && roots[0]->type != STG_TENSOR) {
      state.error = seq_error(STG_INVALID_ARGUMENT,
                              "outputs: a training step gives the loss, a 0-dim tensor, or a dict with "
                              "one under \"loss\"");
    } else if (weights != NULL && roots[0]->type == STG_TENSOR) {
      join_losses(&state, &out->root, roots, &root);
    } else {
      join_value(&state, &out->root, roots, &root);
    }
  }
  if (state.error != NULL) seq_release_tree(out);
  return state.error;
}
