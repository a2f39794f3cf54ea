/* SPDX-License-Identifier: Apache-2.0
 *
 * The corners of DLPack (rule E2): what must be honoured, and what must be refused before anything is read.
 */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "conformance/checks/check.h"

#define LR 0.3

/* ---- batches in every layout ---- */

/* Gives `tree` (borrowed) to train_batch and compares with the same rows on one device. */
static void check_trains(session* s, batch* b, stg_tree* tree, const char* what) {
  weights expected;
  stg_step_result result;
  first_weights(&expected);
  update_reference(&expected, b, LR);
  if (SUCCEEDS(train_batch(s, NULL, tree, LR, STG_BATCH_LAST_MICRO_BATCH, &result, NULL))) release_tree(&result.outputs);
  check_weights(s, &expected, 1e-6, what);
}

static void offsets_and_null_strides(void) {
  session s;
  batch b;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, the_host.seed);
  static const char* const keys[] = {"inputs", "targets"};
  const int64_t shapes[2][2] = {{10, MLP_NUM_FEATURES}, {10, 0}};
  stg_tensor* tensors[2] = {new_float32(2, shapes[0]), new_float32(1, shapes[1])};
  for (int i = 0; i < 30; ++i) set_element(tensors[0], i, 1000);
  for (int i = 0; i < 10; ++i) set_element(tensors[1], i, 1000);
  memcpy(floats(tensors[0]) + 2 * MLP_NUM_FEATURES, b.inputs, 6 * sizeof b.inputs[0]);
  memcpy(floats(tensors[1]) + 1, b.targets, 6 * sizeof(float));
  tensors[0]->view.byte_offset = 2 * MLP_NUM_FEATURES * sizeof(float);
  tensors[1]->view.byte_offset = sizeof(float);
  tensors[0]->view.shape[0] = tensors[1]->view.shape[0] = 6;
  tensors[0]->view.strides = tensors[1]->view.strides = NULL;
  stg_tree tree = new_dict(2, keys, tensors), view = borrowed(&tree);
  check_trains(&s, &b, &view, "after a batch with offsets and null strides");
  release_tree(&tree);
  close_session(&s);
}

static void other_strides(void) {
  session s;
  batch b;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, the_host.seed);
  static const char* const keys[] = {"inputs", "targets"};
  const int64_t shapes[2][2] = {{MLP_NUM_FEATURES, 6}, {12, 0}};
  stg_tensor* tensors[2] = {new_float32(2, shapes[0]), new_float32(1, shapes[1])};
  for (int row = 0; row < 6; ++row) {
    for (int k = 0; k < MLP_NUM_FEATURES; ++k) floats(tensors[0])[k * 6 + row] = b.inputs[row][k];
    floats(tensors[1])[2 * row] = b.targets[row];
    floats(tensors[1])[2 * row + 1] = 1000;
  }
  tensors[0]->view.shape[0] = 6; /* transposed */
  tensors[0]->view.shape[1] = MLP_NUM_FEATURES;
  tensors[0]->view.strides[0] = 1;
  tensors[0]->view.strides[1] = 6;
  tensors[1]->view.shape[0] = 6; /* every other one */
  tensors[1]->view.strides[0] = 2;
  stg_tree tree = new_dict(2, keys, tensors), view = borrowed(&tree);
  check_trains(&s, &b, &view, "after a transposed batch");
  release_tree(&tree);
  close_session(&s);
}

/* ---- read-only memory ---- */

/* A float32 tensor in memory that can't be written to. Never freed. */
static stg_tensor* in_read_only_memory(int32_t num_dims, const int64_t* shape, const float* values, size_t numel) {
  stg_tensor* made = new_float32(num_dims, shape);
  float* page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) abort();
  memcpy(page, values, numel * sizeof(float));
  mprotect(page, 4096, PROT_READ);
  made->view.data = page;
  made->flags |= STG_TENSOR_READ_ONLY;
  return made;
}

static void read_only_is_never_written(void) {
  static const char* const keys[] = {"inputs", "targets"};
  session s;
  batch b;
  stg_tree out;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, the_host.seed);
  const int64_t shapes[2][2] = {{6, MLP_NUM_FEATURES}, {6, 0}};
  for (int is_moved = 0; is_moved < 2; ++is_moved) {
    stg_tensor* tensors[2] = {in_read_only_memory(2, shapes[0], &b.inputs[0][0], 6 * MLP_NUM_FEATURES),
                              in_read_only_memory(1, shapes[1], b.targets, 6)};
    stg_tree tree = new_dict(2, keys, tensors), view = borrowed(&tree);
    memset(&out, 0, sizeof out);
    if (!is_moved) {
      check_trains(&s, &b, &view, "after a read-only batch");
      if (SUCCEEDS(the_host.api->broadcast(s.strategy, NULL, &view, 0, &out))) release_tree(&out);
      stg_error* error = the_host.api->reduce(s.strategy, NULL, &view, STG_REDUCE_SUM, &out);
      if (error == NULL) release_tree(&out);
      if (error != NULL) FAILS(error, STG_UNIMPLEMENTED, NULL);
    } else {
      stg_step_result result;
      if (SUCCEEDS(train_batch(&s, NULL, &tree, LR, STG_BATCH_LAST_MICRO_BATCH, &result, NULL))) release_tree(&result.outputs);
    }
    release_tree(&tree);
  }
  close_session(&s);
}

/* ---- through broadcast and back ---- */

static int same_elements(const stg_tensor* a, const stg_tensor* b, int64_t element_bytes) {
  const char* first = (const char*)a->view.data + a->view.byte_offset;
  const char* second = (const char*)b->view.data + b->view.byte_offset;
  return memcmp(&a->view.dtype, &b->view.dtype, sizeof a->view.dtype) == 0 &&
         (count_elements(a) == 0 || memcmp(first, second, (size_t)(count_elements(a) * element_bytes)) == 0);
}

/* Borrowed in, a copy out. Gives its error. */
static stg_error* round_trip(const session* s, stg_tensor* tensor, stg_tree* out) {
  stg_tree tree;
  memset(&tree, 0, sizeof tree);
  memset(out, 0, sizeof *out);
  tree.root.type = STG_TENSOR;
  tree.root.as.tensor = tensor;
  return the_host.api->broadcast(s->strategy, NULL, &tree, 0, out);
}

static const struct {
  const char* name;
  uint8_t code, bits;
} dtypes[] = {
    {"bool", STG_DTYPE_BOOL, 8},      {"int8", STG_DTYPE_INT, 8},           {"int16", STG_DTYPE_INT, 16},
    {"int32", STG_DTYPE_INT, 32},     {"int64", STG_DTYPE_INT, 64},         {"uint8", STG_DTYPE_UINT, 8},
    {"uint16", STG_DTYPE_UINT, 16},   {"uint32", STG_DTYPE_UINT, 32},       {"uint64", STG_DTYPE_UINT, 64},
    {"float16", STG_DTYPE_FLOAT, 16}, {"bfloat16", STG_DTYPE_BFLOAT, 16},   {"float32", STG_DTYPE_FLOAT, 32},
    {"float64", STG_DTYPE_FLOAT, 64}, {"complex64", STG_DTYPE_COMPLEX, 64}, {"complex128", STG_DTYPE_COMPLEX, 128},
};

static void every_dtype_passes(void) {
  static const int64_t shape[] = {2, 3};
  session s;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; ++i) {
    stg_tree out;
    stg_tensor* tensor = new_tensor(dtypes[i].code, dtypes[i].bits, 2, shape);
    for (int k = 0; k < 6 * dtypes[i].bits / 8; ++k)
      ((unsigned char*)tensor->view.data)[k] = (unsigned char)(dtypes[i].code == STG_DTYPE_BOOL ? k % 2 : 3 + k);
    stg_error* error = round_trip(&s, tensor, &out);
    CHECK_THAT(error == NULL, "%s passes: %.*s", dtypes[i].name, error == NULL ? 0 : (int)error->message.size_bytes,
               error == NULL ? "" : error->message.data);
    if (error != NULL) error->release(error);
    if (error == NULL && CHECK(out.root.type == STG_TENSOR))
      CHECK_THAT(same_elements(tensor, out.root.as.tensor, dtypes[i].bits / 8), "%s comes back as it was", dtypes[i].name);
    release_tree(&out);
    release_tensor(tensor);
  }
  close_session(&s);
}

static void empty_and_0_dim_pass(void) {
  static const int64_t shapes[][3] = {{0, 0, 0}, {0, 3, 0}, {3, 0, 0}, {2, 0, 4}, {0, 0, 0}};
  static const int32_t num_dims[] = {1, 2, 2, 3, 0};
  session s;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  for (int i = 0; i < 5; ++i) {
    stg_tree out;
    stg_tensor* tensor = new_float32(num_dims[i], shapes[i]);
    if (num_dims[i] > 0) tensor->view.data = NULL; /* allowed where there is no element */
    if (num_dims[i] == 0) {
      tensor->view.shape = tensor->view.strides = NULL; /* allowed where there is no dimension */
      set_element(tensor, 0, 7);
    }
    if (SUCCEEDS(round_trip(&s, tensor, &out)) && CHECK(out.root.type == STG_TENSOR)) {
      const stg_tensor_view* view = &out.root.as.tensor->view;
      CHECK_THAT(view->num_dims == num_dims[i], "tensor %d has %d dimensions, not %d", i, num_dims[i], view->num_dims);
      for (int32_t dim = 0; dim < num_dims[i] && view->num_dims == num_dims[i]; ++dim) CHECK(view->shape[dim] == shapes[i][dim]);
      if (num_dims[i] == 0) CHECK(element(out.root.as.tensor, 0) == 7);
    }
    release_tree(&out);
    release_tensor(tensor);
  }
  close_session(&s);
}

/* ---- what must be refused ---- */

static void check_refused(const session* s, stg_tensor* tensor, const char* what) {
  stg_tree out;
  stg_error* error = round_trip(s, tensor, &out);
  CHECK_THAT(error != NULL && (error->code == STG_INVALID_ARGUMENT || error->code == STG_UNIMPLEMENTED), "%s is refused", what);
  if (error != NULL) error->release(error);
  release_tree(&out);
}

static void unknown_dtypes_are_refused(void) {
  static const int64_t shape[] = {8};
  static const struct {
    const char* name;
    stg_dtype dtype;
  } unknown[] = {
      {"code 3", {3, 64, 1}},
      {"code 99", {99, 32, 1}},
      {"2 lanes", {STG_DTYPE_FLOAT, 32, 2}},
      {"0 lanes", {STG_DTYPE_FLOAT, 32, 0}},
      {"4 bits", {STG_DTYPE_INT, 4, 1}},
      {"0 bits", {STG_DTYPE_FLOAT, 0, 1}},
  };
  session s;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  for (size_t i = 0; i < sizeof unknown / sizeof *unknown; ++i) {
    stg_tensor* tensor = new_tensor(STG_DTYPE_FLOAT, 64, 1, shape);
    tensor->view.dtype = unknown[i].dtype;
    check_refused(&s, tensor, unknown[i].name);
    release_tensor(tensor);
  }
  close_session(&s);
}

static void wild_layouts_are_refused(void) {
  enum {
    NEGATIVE_SIZE,
    NEGATIVE_STRIDE,
    HUGE_SIZE,
    HUGE_STRIDE,
    UNALIGNED,
    NEGATIVE_DIMS,
    NULL_SHAPE,
    NULL_DATA,
    MAJOR_2,
    HUGE_OFFSET,
    NUM_KINDS
  };
  static const char* const names[] = {"a size of -1",         "a stride of -1",       "a size of 2^62", "a stride of 2^62",
                                      "an offset of 2 bytes", "-1 dimensions",        "a null shape",   "null data",
                                      "DLPack's major 2",     "a byte_offset of 2^63"};
  static const int64_t shape[] = {2, 3};
  session s;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  for (int kind = 0; kind < NUM_KINDS; ++kind) {
    stg_tensor* tensor = new_float32(2, shape);
    stg_tensor_view* view = &tensor->view;
    if (kind == NEGATIVE_SIZE) view->shape[0] = -1;
    if (kind == NEGATIVE_STRIDE) view->strides[0] = -1;
    if (kind == HUGE_SIZE) view->shape[0] = INT64_C(1) << 62;
    if (kind == HUGE_STRIDE) view->strides[0] = INT64_C(1) << 62;
    if (kind == UNALIGNED) view->byte_offset = 2;
    if (kind == NEGATIVE_DIMS) view->num_dims = -1;
    if (kind == NULL_SHAPE) view->shape = NULL;
    if (kind == NULL_DATA) view->data = NULL;
    if (kind == MAJOR_2) tensor->dlpack_major = 2;
    if (kind == HUGE_OFFSET) view->byte_offset = UINT64_C(1) << 63;
    check_refused(&s, tensor, names[kind]);
    release_tensor(tensor);
  }
  close_session(&s);
}

/* ---- what comes out ---- */

static void check_export(const stg_tensor* tensor, const char* what) {
  const stg_tensor_view* view = &tensor->view;
  CHECK_THAT(tensor->dlpack_major == STG_DLPACK_MAJOR, "%s: DLPack's major is 1, not %u", what, tensor->dlpack_major);
  CHECK_THAT(view->num_dims == 0 || (view->shape != NULL && view->strides != NULL), "%s: shape and strides are there", what);
  CHECK_THAT(view->device.kind == STG_DEVICE_CPU && view->device.index == 0, "%s: a tensor on a CPU is on {1, 0}, not {%u, %d}",
             what, view->device.kind, view->device.index);
  CHECK_THAT(view->dtype.lanes == 1, "%s: 1 lane", what);
  CHECK_THAT(count_elements(tensor) == 0 || view->data != NULL, "%s: data", what);
}

static void check_exports(const stg_value* value, const char* what) {
  if (value->type == STG_TENSOR) check_export(value->as.tensor, what);
  for (uint32_t i = 0; value->type == STG_DICT && i < value->count; ++i) check_exports(&value->as.entries[i].value, what);
  for (uint32_t i = 0; (value->type == STG_LIST || value->type == STG_TUPLE) && i < value->count; ++i)
    check_exports(&value->as.items[i], what);
}

static void exports_are_complete(void) {
  session s;
  batch b;
  stg_step_result result;
  stg_tree state, out;
  memset(&state, 0, sizeof state);
  memset(&out, 0, sizeof out);
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 7, the_host.seed);
  stg_tree tree = batch_tree(&b, 0), view = borrowed(&tree);
  find_key(&tree.root, "inputs")->as.tensor->view.strides = NULL;
  if (SUCCEEDS(the_host.api->broadcast(s.strategy, NULL, &view, 0, &out))) check_exports(&out.root, "a broadcast copy");
  if (SUCCEEDS(training_step(&s, &tree, &result))) {
    check_exports(&result.outputs.root, "an output");
    release_tree(&result.outputs);
  }
  for (uint64_t flags = 0; flags <= STG_EXPORT_COPY; ++flags) {
    if (SUCCEEDS(the_host.api->export_state(s.strategy, NULL, flags, &state))) check_exports(&state.root, "a state");
    release_tree(&state);
  }
  release_tree(&out);
  release_tree(&tree);
  close_session(&s);
}

DEFINE_CHECKS(
    tensor_checks,
    {"tensor-offsets-and-null-strides",
     "A batch whose tensors begin 24 and 4 bytes into their memory, with null strides, trains like any other", "E2",
     NEEDS_STRATEGY, offsets_and_null_strides},
    {"tensor-other-strides", "A batch of transposed inputs and of every other element as targets does so, too", "E2",
     NEEDS_STRATEGY, other_strides},
    {"tensor-read-only-kept", "Nothing is written to a read-only batch (its pages can't be written to), borrowed or moved", "E2",
     NEEDS_STRATEGY, read_only_is_never_written},
    {"tensor-every-dtype",
     "bool, 8 kinds of integers, float16, bfloat16, float32, float64, complex64 and complex128 come back from broadcast as they "
     "were",
     "E2", NEEDS_STRATEGY | IS_ONCE, every_dtype_passes},
    {"tensor-empty-and-0-dim",
     "Tensors of no elements, with null data, and of no dimensions, with null shape and strides, come back with their shape",
     "E2", NEEDS_STRATEGY | IS_ONCE, empty_and_0_dim_pass},
    {"tensor-unknown-dtype-refused", "Codes 3 and 99, 0 and 2 lanes, and 0 and 4 bits are refused", "E2",
     NEEDS_STRATEGY | IS_ONCE, unknown_dtypes_are_refused},
    {"tensor-wild-layout-refused",
     "Sizes, strides, offsets, dimensions, pointers and a version that can't be, 10 of them, are refused", "E2",
     NEEDS_STRATEGY | IS_ONCE, wild_layouts_are_refused},
    {"tensor-exports-complete",
     "What comes out (a copy, outputs, states) is of DLPack's major 1, on {1, 0}, with shape, strides and data", "E2",
     NEEDS_STRATEGY, exports_are_complete});
