// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic on the fields of a DLPack tensor: checks, sizes, rows, element reads. It needs no LibTorch, which makes splitting a batch
// cheap (a LibTorch narrow costs over a microsecond) and keeps the host free of it.
#pragma once

#include <stratagem/tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/value.hpp"

namespace stratagem {

inline constexpr stg_dtype float32{STG_DTYPE_FLOAT, 32, 1};
inline constexpr stg_dtype float64{STG_DTYPE_FLOAT, 64, 1};
inline constexpr stg_dtype int64{STG_DTYPE_INT, 64, 1};
inline constexpr stg_dtype uint8{STG_DTYPE_UINT, 8, 1};
inline constexpr stg_dtype boolean{STG_DTYPE_BOOL, 8, 1};

inline bool same_dtype(stg_dtype a, stg_dtype b) noexcept { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }
inline bool is_floating(stg_dtype dtype) noexcept { return dtype.code == STG_DTYPE_FLOAT || dtype.code == STG_DTYPE_BFLOAT; }

/// "float32", "bool", "complex64", ...; "code 9, 8 bits, 1 lanes" for one without a name here.
std::string dtype_name(stg_dtype dtype);
/// "(2, 3)"; "()" for 0-dim.
std::string shape_text(const stg_tensor_view& view);
/// "cpu", "cuda:1", ...
std::string device_name(stg_device device);

inline uint64_t element_size_bytes(stg_dtype dtype) noexcept { return uint64_t{dtype.bits} / 8 * dtype.lanes; }
inline std::span<const int64_t> shape_of(const stg_tensor_view& view) noexcept {
  return {view.shape, static_cast<size_t>(view.num_dims)};
}
/// Product of the sizes; of a checked tensor it doesn't overflow.
int64_t numel(const stg_tensor_view& view) noexcept;
/// Bytes that a row-major tensor of this shape needs; none if they, or the product of its sizes other than 0, are over 2^62 (zero
/// sizes don't excuse an overflow of the others: whoever multiplies in another order meets it). Sizes are >= 0.
std::optional<uint64_t> checked_size_bytes(stg_dtype dtype, std::span<const int64_t> shape) noexcept;
/// Strides in elements, computed row-major where the tensor has none.
std::vector<int64_t> strides_of(const stg_tensor_view& view);
/// Row-major and without gaps; strides of dimensions of size 0 or 1 don't matter.
bool is_contiguous(const stg_tensor_view& view) noexcept;

template <class T = void>
T* first_element(const stg_tensor_view& view) noexcept {
  return static_cast<T*>(static_cast<void*>(static_cast<char*>(view.data) + view.byte_offset));
}

/// Why LibTorch or we could not handle the tensor, with the shape: DLPack major, unknown dtype, lanes, negative or overflowing sizes,
/// negative strides, null data with elements, an address that the element type can't have. None: it is good.
std::optional<std::string> tensor_fault(const stg_tensor& tensor);
/// Refuses such a tensor; concat(where...) names it, and is put together only then.
template <class... Where>
void check_tensor(const stg_tensor& tensor, const Where&... where) {
  if (const std::optional<std::string> fault = tensor_fault(tensor)) throw invalid_argument(where..., ": ", *fault);
}

/// Whether the CPU can read a tensor of this device.
inline bool is_in_host_memory(stg_device device) noexcept {
  return device.kind == STG_DEVICE_CPU || device.kind == STG_DEVICE_CUDA_HOST;
}
/// Refuses a tensor that the CPU can't read; concat(where...) names it.
template <class... Where>
void check_in_host_memory(const stg_tensor_view& view, const Where&... where) {
  if (!is_in_host_memory(view.device)) {
    throw unimplemented(where..., " is on ", device_name(view.device), "; this plugin takes tensors in host memory");
  }
}

/// A tensor over `data` that keeps `storage` alive. Row-major.
TensorPtr make_tensor(std::shared_ptr<const void> storage, void* data, stg_dtype dtype, std::vector<int64_t> shape,
                      uint64_t flags = 0, stg_device device = {STG_DEVICE_CPU, 0});
/// The same with strides of its own, in elements.
TensorPtr make_strided_tensor(std::shared_ptr<const void> storage, void* data, stg_dtype dtype, std::vector<int64_t> shape,
                              std::vector<int64_t> strides, uint64_t flags, stg_device device);
/// From this size on, memory of ours is mapped: it costs nothing until it is written.
inline constexpr uint64_t large_memory_bytes = uint64_t{32} << 20;

/// New host memory, 64-byte aligned, for `numel` elements of zero bytes, with the tensor over it.
TensorPtr allocate_tensor(stg_dtype dtype, std::vector<int64_t> shape);
/// A row-major copy in new host memory of a tensor in host memory; one on another device is refused.
TensorPtr copy_tensor(const stg_tensor_view& source);
/// Rows [begin, begin + num_rows) of dimension 0: a view that keeps `keep` alive.
TensorPtr narrow_rows(std::shared_ptr<const void> keep, const stg_tensor& source, int64_t begin, int64_t num_rows);

/// Element number `index` (row-major order) of a host tensor as a double. Bool, integers and real floating types.
double read_element(const stg_tensor_view& view, int64_t index);

/// The size of dimension 0 that all tensor leaves agree on; nothing if no leaf has one. Disagreement is an error with both key paths.
std::optional<int64_t> batch_rows(const stg_value& root);

/// A copy of a borrowed tree of host tensors; opaques are retained. A tensor on another device is refused by its key path.
using CopyTensor = TensorPtr (*)(const stg_tensor_view& source);
Tree copy_tree(const stg_value& root, CopyTensor copy = &copy_tensor);

}  // namespace stratagem
