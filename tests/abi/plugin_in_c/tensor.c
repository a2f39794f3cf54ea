/* SPDX-License-Identifier: Apache-2.0
 *
 * DLPack tensors on the CPU. Everything that came in is checked before any arithmetic on it: sizes and strides are the host's, and
 * their products can overflow.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sequential.h"

#define MAX_DIMS 64

uint64_t seq_element_bytes(stg_dtype dtype) { return dtype.bits / 8u; }

int seq_is_dtype(stg_dtype dtype, uint8_t code, uint8_t bits) {
  return dtype.code == code && dtype.bits == bits && dtype.lanes == 1;
}

char* seq_data(const stg_tensor_view* view) { return view->data == NULL ? NULL : (char*)view->data + view->byte_offset; }

int64_t seq_numel(const stg_tensor_view* view) {
  int64_t numel = 1;
  for (int32_t dim = 0; dim < view->num_dims; ++dim) numel *= view->shape[dim];
  return numel;
}

static const char* shape_fault(const stg_tensor_view* view) {
  const uint64_t element_bytes = seq_element_bytes(view->dtype);
  uint64_t numel = 1; /* of the sizes that are not 0, so that an empty tensor can't hide an overflow */
  uint64_t reach = 0; /* the largest index of an element, in elements */
  int is_empty = 0;
  for (int32_t dim = 0; dim < view->num_dims; ++dim) {
    const int64_t size = view->shape[dim];
    if (size < 0) return "a negative size in its shape";
    if (size == 0) is_empty = 1;
    if (size > 1 && numel > (uint64_t)INT64_MAX / element_bytes / (uint64_t)size) return "a shape whose size in bytes overflows";
    if (size > 1) numel *= (uint64_t)size;
    if (view->strides == NULL || size < 2) continue;
    if (view->strides[dim] < 0) return "a negative stride";
    const uint64_t step = (uint64_t)view->strides[dim], steps = (uint64_t)size - 1;
    if (step != 0 && steps > ((uint64_t)INT64_MAX / element_bytes - reach) / step) return "strides that overflow";
    reach += step * steps;
  }
  return !is_empty && view->data == NULL ? "elements but no data" : NULL;
}

const char* seq_tensor_fault(const stg_tensor* tensor) {
  if (tensor == NULL) return "a null pointer";
  const stg_tensor_view* view = &tensor->view;
  if (tensor->dlpack_major != STG_DLPACK_MAJOR) return "a DLPack major version other than 1";
  if (view->device.kind != STG_DEVICE_CPU && view->device.kind != STG_DEVICE_CUDA_HOST) return "a device that is not the CPU";
  if (view->dtype.lanes != 1 || view->dtype.bits < 8 || view->dtype.bits % 8 != 0) return "an unknown dtype";
  if (view->dtype.code > STG_DTYPE_BOOL || view->dtype.code == 3) return "an unknown dtype";
  if (view->num_dims < 0 || view->num_dims > MAX_DIMS) return "a number of dimensions outside of 0 to 64";
  if (view->num_dims > 0 && view->shape == NULL) return "a null shape";
  if (view->byte_offset >= UINT64_C(1) << 62) return "a byte_offset that overflows";
  const uint64_t element_bytes = seq_element_bytes(view->dtype);
  const uint64_t alignment = view->dtype.code == STG_DTYPE_COMPLEX ? element_bytes / 2 : element_bytes;
  if ((uintptr_t)seq_data(view) % alignment != 0) return "data that is not aligned to its elements";
  return shape_fault(view);
}

int seq_is_contiguous(const stg_tensor_view* view) {
  if (view->strides == NULL || seq_numel(view) == 0) return 1;
  int64_t expected = 1;
  for (int32_t dim = view->num_dims - 1; dim >= 0; --dim) {
    if (view->shape[dim] != 1 && view->strides[dim] != expected) return 0;
    expected *= view->shape[dim];
  }
  return 1;
}

int seq_same_shape(const stg_tensor_view* a, const stg_tensor_view* b) {
  if (a->num_dims != b->num_dims) return 0;
  for (int32_t dim = 0; dim < a->num_dims; ++dim) {
    if (a->shape[dim] != b->shape[dim]) return 0;
  }
  return 1;
}

static void free_tensor(stg_tensor* self) { free(self->owner); }

/* Header, shape, strides and data in one block: the data first, for its alignment. */
stg_tensor* seq_new_tensor(stg_dtype dtype, int32_t num_dims, const int64_t* shape) {
  stg_tensor_view view = {NULL, {STG_DEVICE_CPU, 0}, num_dims, dtype, NULL, NULL, 0};
  uint64_t data_bytes = seq_element_bytes(dtype);
  for (int32_t dim = 0; dim < num_dims; ++dim) data_bytes *= (uint64_t)shape[dim];
  data_bytes = (data_bytes + 63) / 64 * 64;
  const uint64_t dims_bytes = (uint64_t)num_dims * sizeof(int64_t);
  void* block = NULL;
  if (posix_memalign(&block, 64, data_bytes + sizeof(stg_tensor) + 2 * dims_bytes) != 0) return NULL;

  stg_tensor* tensor = (stg_tensor*)(void*)((char*)block + data_bytes);
  view.data = block;
  view.shape = (int64_t*)(tensor + 1);
  view.strides = view.shape + num_dims;
  int64_t stride = 1;
  for (int32_t dim = num_dims - 1; dim >= 0; --dim) {
    view.shape[dim] = shape[dim];
    view.strides[dim] = stride;
    stride *= shape[dim];
  }
  memset(tensor, 0, sizeof *tensor);
  tensor->dlpack_major = STG_DLPACK_MAJOR;
  tensor->dlpack_minor = STG_DLPACK_MINOR;
  tensor->owner = block;
  tensor->deleter = free_tensor;
  tensor->view = view;
  return tensor;
}

static char* copy_dim(char* to, const char* from, const stg_tensor_view* view, int32_t dim) {
  const uint64_t element_bytes = seq_element_bytes(view->dtype);
  if (dim == view->num_dims) {
    memcpy(to, from, element_bytes);
    return to + element_bytes;
  }
  for (int64_t index = 0; index < view->shape[dim]; ++index) {
    const int64_t step = view->shape[dim] < 2 ? 0 : index * view->strides[dim];
    to = copy_dim(to, from + step * (int64_t)element_bytes, view, dim + 1);
  }
  return to;
}

void seq_copy_elements(char* to, const stg_tensor_view* view) {
  const int64_t numel = seq_numel(view);
  if (numel == 0) return;
  if (seq_is_contiguous(view)) {
    memcpy(to, seq_data(view), (size_t)numel * seq_element_bytes(view->dtype));
  } else {
    copy_dim(to, seq_data(view), view, 0);
  }
}

stg_tensor* seq_copy_tensor(const stg_tensor_view* view) {
  stg_tensor* copy = seq_new_tensor(view->dtype, view->num_dims, view->shape);
  if (copy != NULL) seq_copy_elements(seq_data(&copy->view), view);
  return copy;
}

void seq_release_tensor(stg_tensor* tensor) {
  if (tensor != NULL && tensor->deleter != NULL) tensor->deleter(tensor);
}

int seq_read_number(const stg_tensor* tensor, double* out) {
  if (seq_tensor_fault(tensor) != NULL || seq_numel(&tensor->view) != 1) return 0;
  const char* data = seq_data(&tensor->view);
  const stg_dtype dtype = tensor->view.dtype;
  if (seq_is_dtype(dtype, STG_DTYPE_FLOAT, 32)) {
    float value;
    memcpy(&value, data, sizeof value);
    *out = (double)value;
  } else if (seq_is_dtype(dtype, STG_DTYPE_FLOAT, 64)) {
    memcpy(out, data, sizeof *out);
  } else if (seq_is_dtype(dtype, STG_DTYPE_INT, 64)) {
    int64_t value;
    memcpy(&value, data, sizeof value);
    *out = (double)value;
  } else if (seq_is_dtype(dtype, STG_DTYPE_INT, 32)) {
    int32_t value;
    memcpy(&value, data, sizeof value);
    *out = (double)value;
  } else {
    return 0;
  }
  return 1;
}

void seq_describe(const stg_tensor_view* view, char* text, uint64_t capacity_bytes) {
  static const char* const names[] = {"int", "uint", "float", "?", "bfloat", "complex", "bool"};
  const char* name = view->dtype.code <= STG_DTYPE_BOOL ? names[view->dtype.code] : "?";
  int used = snprintf(text, capacity_bytes, "%s%u (", name, (unsigned)view->dtype.bits);
  for (int32_t dim = 0; dim < view->num_dims && used > 0 && (uint64_t)used < capacity_bytes; ++dim) {
    used += snprintf(text + used, capacity_bytes - (uint64_t)used, dim == 0 ? "%" PRId64 : ", %" PRId64, view->shape[dim]);
  }
  if (used > 0 && (uint64_t)used < capacity_bytes) snprintf(text + used, capacity_bytes - (uint64_t)used, ")");
}
