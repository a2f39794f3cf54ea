/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors: layout-compatible with DLPack 1.x's DLManagedTensorVersioned, under names of our own (the official header's C++ enums and
 * ours could not share its guard). A pointer to one may be cast to the other.
 *
 * Import honours null strides (row-major), byte_offset, read-only, 0-dim, zero-size, and any strides >= 0; strides of dimensions of
 * size 0 or 1 are not read. Export always sets strides. Shape, strides, overflow and alignment are checked before any use.
 */
#ifndef STRATAGEM_TENSOR_H
#define STRATAGEM_TENSOR_H

#include <stratagem/types.h>

STG_EXTERN_C_BEGIN

/* DLPack's major that this ABI takes; another one is refused, minors are compatible. */
#define STG_DLPACK_MAJOR 1u
#define STG_DLPACK_MINOR 0u

/* Type codes of an element: DLPack's. */
#define STG_DTYPE_INT 0u
#define STG_DTYPE_UINT 1u
#define STG_DTYPE_FLOAT 2u
#define STG_DTYPE_BFLOAT 4u
#define STG_DTYPE_COMPLEX 5u
#define STG_DTYPE_BOOL 6u

/* An element's type: code, width in bits, lanes (1). {0,0,0} means none where a function says so. */
typedef struct stg_dtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} stg_dtype;
STG_ASSERT_SIZE(stg_dtype, 4);

/* DLTensor. */
typedef struct stg_tensor_view {
  void *data; /* lifetime: until the owning stg_tensor's deleter; null allowed for zero elements */
  stg_device device;
  int32_t num_dims;
  stg_dtype dtype;
  int64_t *shape;       /* lifetime: as data; num_dims sizes, each >= 0; null allowed when num_dims is 0 */
  int64_t *strides;     /* lifetime: as data; num_dims strides in elements, or null: row-major */
  uint64_t byte_offset; /* the first element lies at data + byte_offset */
} stg_tensor_view;
STG_ASSERT_SIZE(stg_tensor_view, 48);

/* Flags of a tensor. */
#define STG_TENSOR_READ_ONLY 1u /* whoever receives it must not write */
#define STG_TENSOR_IS_COPIED 2u

/* DLManagedTensorVersioned. */
typedef struct stg_tensor {
  uint32_t dlpack_major;
  uint32_t dlpack_minor;
  void *owner; /* the maker's own; lifetime: until deleter */
  /* Releases the tensor. Called once, by whoever owns it, on any thread (with STG_CREATE_CALLER_THREAD_ONLY: only on the thread
   * inside a call). Null is legal: nothing is released. [any] */
  void (*deleter)(struct stg_tensor *self);
  uint64_t flags;
  stg_tensor_view view;
} stg_tensor;
STG_ASSERT_SIZE(stg_tensor, 80);

STG_EXTERN_C_END
#endif
