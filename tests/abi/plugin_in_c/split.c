/* SPDX-License-Identifier: Apache-2.0
 *
 * A batch into shares along dim 0, without copying its data: each share is a tree of its own whose tensors are views of the batch's. Any of
 * them can be taken out by the model and kept, so every view holds the batch.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "sequential.h"

/* ---- how many rows the batch has ---- */

typedef struct rows {
  int64_t num_rows; /* -1: none seen yet */
  char first[512];  /* the path that said so */
  stg_error* error;
} rows;

static void count_rows(rows* state, const stg_value* value, const seq_path* path) {
  if (value->type == STG_TENSOR && value->as.tensor->view.num_dims > 0) {
    const int64_t num_rows = value->as.tensor->view.shape[0];
    char here[512];
    if (state->num_rows < 0) {
      state->num_rows = num_rows;
      seq_path_text(path, state->first, sizeof state->first);
    } else if (num_rows != state->num_rows && state->error == NULL) {
      state->error = seq_error(STG_INVALID_ARGUMENT,
                               "batch: %s has %" PRId64 " rows, %s has %" PRId64 "; dimension 0 of every tensor is the batch",
                               state->first, state->num_rows, seq_path_text(path, here, sizeof here), num_rows);
    }
  }
  for (uint32_t i = 0; value->type == STG_DICT && i < value->count; ++i) {
    const seq_path child = {path, value->as.entries[i].key, i};
    count_rows(state, &value->as.entries[i].value, &child);
  }
  for (uint32_t i = 0; (value->type == STG_LIST || value->type == STG_TUPLE) && i < value->count; ++i) {
    const seq_path child = {path, {NULL, 0}, i};
    count_rows(state, &value->as.items[i], &child);
  }
}

stg_error* seq_count_rows(const stg_value* root, int64_t* num_rows) {
  const seq_path path = {NULL, {NULL, 0}, 0};
  rows state = {-1, "", NULL};
  count_rows(&state, root, &path);
  if (state.error == NULL) *num_rows = state.num_rows;
  return state.error;
}

/* ---- views ---- */

/* One tensor of a share. Its sizes and strides follow it in memory. */
typedef struct view {
  stg_tensor tensor;
  seq_batch* batch;
  int64_t sizes[];
} view;

static void release_view(stg_tensor* self) {
  view* owner = self->owner;
  seq_drop_batch(owner->batch);
  free(owner);
}

static stg_tensor* new_view(const stg_tensor* of, seq_batch* batch, int64_t first_row, int64_t num_rows) {
  const uint64_t num_dims = (uint64_t)of->view.num_dims;
  view* made = calloc(1, sizeof *made + 2 * num_dims * sizeof(int64_t));
  if (made == NULL) return NULL;
  seq_hold_batch(batch);
  made->batch = batch;
  made->tensor = *of;
  made->tensor.owner = made;
  made->tensor.deleter = release_view;
  stg_tensor_view* shown = &made->tensor.view;
  shown->shape = made->sizes;
  shown->strides = made->sizes + num_dims;
  int64_t stride = 1;
  for (uint64_t dim = num_dims; dim-- > 0;) {
    shown->shape[dim] = of->view.shape[dim];
    shown->strides[dim] = of->view.strides == NULL ? stride : of->view.strides[dim];
    stride *= of->view.shape[dim];
  }
  if (num_dims > 0) {
    shown->shape[0] = num_rows;
    if (num_rows > 0 && first_row > 0) {
      shown->byte_offset += (uint64_t)(first_row * shown->strides[0]) * seq_element_bytes(shown->dtype);
    }
  }
  return &made->tensor;
}

/* The rows of one share. */
typedef struct part {
  seq_batch* batch;
  int64_t first_row;
  int64_t num_rows;
} part;

static stg_tensor* view_part(const stg_tensor* of, void* context) {
  const part* wanted = context;
  return new_view(of, wanted->batch, wanted->first_row, wanted->num_rows);
}

stg_error* seq_split(seq_batch* batch, uint64_t num_shares, seq_share* shares, uint64_t* num_filled) {
  int64_t num_rows = -1;
  stg_error* error = seq_count_rows(&batch->tree.root, &num_rows);
  if (error != NULL) return error;
  const uint64_t wanted = num_rows < 1 ? 1 : (uint64_t)num_rows < num_shares ? (uint64_t)num_rows : num_shares;

  int64_t first_row = 0;
  for (uint64_t i = 0; i < wanted; ++i) {
    seq_share* share = &shares[i];
    share->num_rows = num_rows < 0 ? -1 : num_rows / (int64_t)wanted + ((int64_t)i < num_rows % (int64_t)wanted);
    const int64_t rows_here = share->num_rows < 0 ? 0 : share->num_rows;
    part rows_of_it = {batch, first_row, rows_here};
    error = seq_map_tree(&batch->tree.root, view_part, &rows_of_it, &share->tree);
    if (error != NULL) {
      while (i-- > 0) seq_release_tree(&shares[i].tree);
      return error;
    }
    first_row += rows_here;
  }
  *num_filled = wanted;
  return NULL;
}
