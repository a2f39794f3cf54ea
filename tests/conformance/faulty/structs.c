/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults in how structs, values and trees are read and written.
 */
#include <stdlib.h>
#include <string.h>

#include "fault.h"

WRAP(stg_error*, seq_read_struct, void* to, uint64_t known_bytes, const void* from, uint64_t min_bytes, const char* name) {
  if (is_fault("arguments-of-other-sizes") && strcmp(name, "gradient_set") != 0) min_bytes = 8;
  if (is_fault("reduce-set-sizes-checked") && strcmp(name, "gradient_set") == 0) min_bytes = 8;
  uint64_t size_bytes = 0;
  if (from != NULL) memcpy(&size_bytes, from, sizeof size_bytes);
  if (is_fault("largest-sizes-taken") && size_bytes == STG_MAX_STRUCT_SIZE_BYTES)
    return seq_error(STG_INVALID_ARGUMENT, "%s.struct_size is too large", name);
  return __real_seq_read_struct(to, known_bytes, from, min_bytes, name);
}

WRAP(void, seq_write_struct, void* to, const void* from, uint64_t known_bytes) {
  uint64_t size_bytes = 0;
  memcpy(&size_bytes, to, sizeof size_bytes);
  __real_seq_write_struct(to, from, known_bytes);
  if (is_fault("outputs-end-where-they-end")) memset((char*)to + size_bytes, 0, 8);
  if (is_fault("results-of-other-sizes")) memcpy(to, &size_bytes, sizeof size_bytes);
}

WRAP(stg_error*, seq_read_config, stg_string json, seq_config* out) {
  stg_error* error = __real_seq_read_config(json, out);
  if (error == NULL || !is_fault("bad-configs-refused")) return error;
  error->release(error);
  memset(out, 0, sizeof *out);
  out->devices = calloc(1, sizeof *out->devices);
  out->num_devices = 1;
  return NULL;
}

/* ---- tensors ---- */

static int is_in_state; /* a state is being read */

WRAP(const char*, seq_tensor_fault, const stg_tensor* tensor) {
  if (is_fault("tree-nonsense-refused") && tensor == NULL) return *(const char* volatile*)NULL;
  if (tensor != NULL && tensor->view.dtype.code == STG_DTYPE_BFLOAT && is_fault("tensor-every-dtype")) return "an unknown dtype";
  if (tensor != NULL && tensor->view.num_dims > 0 && tensor->view.data == NULL && is_fault("tensor-empty-and-0-dim"))
    return "no data";
  if (tensor != NULL && (is_fault("tensor-unknown-dtype-refused") || is_fault("tensor-wild-layout-refused"))) {
    stg_tensor known = *tensor;
    if (known.view.dtype.lanes == 2 && is_fault("tensor-unknown-dtype-refused")) known.view.dtype.lanes = 1;
    if (is_fault("tensor-wild-layout-refused")) known.dlpack_major = STG_DLPACK_MAJOR;
    return __real_seq_tensor_fault(&known);
  }
  if (is_fault("tree-foreign-memory-refused") || (is_in_state && is_fault("state-foreign-memory-refused"))) {
    stg_tensor known = *tensor;
    known.view.device.kind = STG_DEVICE_CPU;
    return __real_seq_tensor_fault(&known);
  }
  return __real_seq_tensor_fault(tensor);
}

WRAP(char*, seq_data, const stg_tensor_view* view) {
  return is_fault("reduce-null-strides-and-offsets") ? view->data : __real_seq_data(view);
}

WRAP(int, seq_is_contiguous, const stg_tensor_view* view) {
  return is_fault("reduce-other-strides") || __real_seq_is_contiguous(view);
}

static const stg_tensor* lost; /* a tensor that nobody will release */

WRAP(int, seq_read_number, const stg_tensor* tensor, double* out) {
  const int is_number = __real_seq_read_number(tensor, out);
  if (!is_number && is_fault("bad-denominators-released")) lost = tensor;
  return is_number;
}

WRAP(void, seq_release_tensor, stg_tensor* tensor) {
  if (tensor != NULL && tensor == lost) return;
  if (is_fault("null-deleter-not-called") && tensor != NULL && tensor->deleter == NULL) tensor->deleter(tensor);
  __real_seq_release_tensor(tensor);
}

/* ---- trees ---- */

/* Copied as if they began where their memory does, or were row-major. */
static void copy_wrongly(const stg_tree* lent, stg_tree* copy) {
  for (uint32_t i = 0; lent->root.type == STG_DICT && i < lent->root.count; ++i) {
    const stg_value *from = &lent->root.as.entries[i].value, *to = &copy->root.as.entries[i].value;
    if (from->type != STG_TENSOR) continue;
    const stg_tensor_view *view = &from->as.tensor->view, *own = &to->as.tensor->view;
    const uint64_t size_bytes = (uint64_t)seq_numel(view) * seq_element_bytes(view->dtype);
    if (view->byte_offset > 0 && is_fault("tensor-offsets-and-null-strides")) memcpy(seq_data(own), view->data, size_bytes);
    if (!seq_is_contiguous(view) && is_fault("tensor-other-strides")) memcpy(seq_data(own), seq_data(view), size_bytes);
  }
}

static void write_to_all(const stg_tree* tree) {
  for (uint32_t i = 0; tree->root.type == STG_DICT && i < tree->root.count; ++i) {
    const stg_value* value = &tree->root.as.entries[i].value;
    if (value->type != STG_TENSOR || (value->as.tensor->flags & STG_TENSOR_READ_ONLY) == 0) continue;
    volatile char* data = seq_data(&value->as.tensor->view);
    *data = *data;
  }
}

static stg_error* take_anything(seq_batch** out) {
  *out = calloc(1, sizeof **out);
  (*out)->references = 1;
  return NULL;
}

WRAP(stg_error*, seq_take_batch, stg_tree* tree, const char* name, seq_batch** out) {
  if (is_fault("null-trees-refused") && tree == NULL) return *(stg_error* volatile*)NULL;
  is_in_state = strcmp(name, "state") == 0;
  const int is_lent = tree != NULL && tree->release == NULL;
  const stg_tree lent = tree == NULL ? (stg_tree){{0, 0, {0}}, NULL, NULL} : *tree;
  if (tree != NULL && is_fault("tensor-read-only-kept")) write_to_all(tree);
  stg_error* error = __real_seq_take_batch(tree, name, out);
  is_in_state = 0;
  if (error == NULL && is_lent) copy_wrongly(&lent, &(*out)->tree);
  stg_error* forgiven = forgive("tree-keys-distinct", forgive("tree-bools-0-or-1", error, "a bool that is not"), "there twice");
  forgiven = forgive("tree-depth-limit", forgiven, "a depth above");
  forgiven = forgive("tree-node-limit", forgiven, "the node number");
  forgiven = forgive("tree-null-pointers-refused", forgiven, "a count but a null pointer");
  if (error != NULL && forgiven == NULL) return take_anything(out);
  if (error == NULL && is_lent && strcmp(name, "batch") == 0 && is_fault("borrowed-batch-stays-the-hosts")) {
    (*out)->tree.release(&(*out)->tree);
    (*out)->tree = lent;
  }
  return forgiven;
}

WRAP(stg_tensor*, seq_copy_tensor, const stg_tensor_view* view) {
  stg_tensor* copy = __real_seq_copy_tensor(view);
  if (copy != NULL && is_fault("tensor-exports-complete")) copy->view.strides = NULL;
  return copy;
}

WRAP(stg_error*, seq_map_tree, const stg_value* root, seq_make_tensor make, void* context, stg_tree* out) {
  stg_error* error = __real_seq_map_tree(root, make, context, out);
  const stg_value* meta = seq_find(root, "meta");
  if (meta != NULL && meta->type == STG_OPAQUE && is_fault("opaque-in-batch-balanced")) meta->as.opaque->retain(meta->as.opaque);
  return error;
}

static const void* lost_entries;

WRAP(stg_error*, seq_check_tree, const stg_value* root, const char* name) {
  stg_error* error = __real_seq_check_tree(root, name);
  if (error != NULL && strcmp(name, "share") == 0 && is_fault("bad-shares-released")) lost_entries = root->as.entries;
  return error;
}

WRAP(void, seq_release_tree, stg_tree* tree) {
  if (lost_entries != NULL && tree->root.as.entries == lost_entries) {
    memset(tree, 0, sizeof *tree);
    return;
  }
  __real_seq_release_tree(tree);
}

void __real_seq_drop_batch(seq_batch* batch);

static void* drop(void* batch) {
  __real_seq_drop_batch(batch);
  return NULL;
}

WRAP(void, seq_drop_batch, seq_batch* batch) {
  pthread_t thread;
  if (is_fault("batches-released-once")) return;
  if (is_fault("caller-thread-only") && batch != NULL && pthread_create(&thread, NULL, drop, batch) == 0) {
    pthread_join(thread, NULL);
  } else {
    __real_seq_drop_batch(batch);
  }
}

WRAP(stg_error*, seq_split, seq_batch* batch, uint64_t num_shares, seq_share* shares, uint64_t* num_filled) {
  if (batch->tree.root.type == STG_TUPLE && is_fault("structures-split"))
    return seq_error(STG_INVALID_ARGUMENT, "batch: tuples can't be split");
  stg_error* error = __real_seq_split(batch, num_shares, shares, num_filled);
  if (error == NULL || !is_fault("rows-that-disagree-refused")) return error;
  error->release(error);
  return seq_error(STG_INVALID_ARGUMENT, "batch: bad shape");
}

WRAP(stg_error*, seq_count_rows, const stg_value* root, int64_t* num_rows) {
  stg_error* error = __real_seq_count_rows(root, num_rows);
  if (error == NULL && is_fault("model-split")) *num_rows += 1;
  return error;
}

WRAP(stg_error*, seq_gather, const stg_tree* outputs, uint64_t num_outputs, const double* weights, int is_sum, stg_tree* out) {
  stg_tree* reversed = calloc(num_outputs + 1, sizeof *reversed);
  const int is_reversed = is_fault("outputs-gathered");
  for (uint64_t i = 0; i < num_outputs; ++i) reversed[i] = outputs[is_reversed ? num_outputs - 1 - i : i];
  stg_error* error = __real_seq_gather(reversed, num_outputs, weights, is_sum, out);
  free(reversed);
  return error;
}

WRAP(stg_error*, seq_to_host, stg_strategy* self, const stg_call* call, stg_tree* object, stg_tree* out) {
  stg_error* error = __real_seq_to_host(self, call, object, out);
  if (error == NULL && out->root.type == STG_DICT && is_fault("moves-keep-all")) out->root.count = 1;
  return error;
}
