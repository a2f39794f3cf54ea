// SPDX-License-Identifier: Apache-2.0
//
// Elements of host tensors as C++ types, without LibTorch: what splitting, gathering and reducing batches need. The functions that take
// whole tensors also take those of an accelerator, by LibTorch, where an instance works on one.
#pragma once

#include <stratagem/tensor.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dlpack.hpp"
#include "base/error.hpp"

namespace stratagem {

/// IEEE binary16, as memory; arithmetic is done in float.
struct Half {
  uint16_t bits;
  explicit operator float() const noexcept;
  static Half from(float value) noexcept;
};

/// The upper half of a float.
struct BFloat16 {
  uint16_t bits;
  explicit operator float() const noexcept { return std::bit_cast<float>(uint32_t{bits} << 16); }
  /// Rounds to the nearest, ties to even.
  static BFloat16 from(float value) noexcept {
    const auto word = std::bit_cast<uint32_t>(value);
    if (std::isnan(value)) return {0x7FC0};
    return {static_cast<uint16_t>((word + 0x7FFF + ((word >> 16) & 1)) >> 16)};
  }
};

/// A float or double as an element: rounded for the 16-bit types, itself otherwise.
template <class T, class Number>
T as_element(Number value) noexcept {
  if constexpr (sizeof(T) == 2) {
    return T::from(static_cast<float>(value));
  } else {
    return value;
  }
}

/// A row-major copy of a real floating tensor in another floating type.
TensorPtr cast_tensor(const stg_tensor_view& source, stg_dtype dtype);

/// Copies all elements of `source` into `destination`: same shape and type, any strides and devices.
void copy_elements(const stg_tensor_view& destination, const stg_tensor_view& source);

/// A row-major copy, on the same device.
TensorPtr clone_tensor(const stg_tensor_view& source);

/// A row-major copy in host memory, finished.
TensorPtr copy_to_host(const stg_tensor_view& source);

/// Writes `value` as an element of the floating type `dtype`.
void store_floating(void* at, stg_dtype dtype, double value);

/// Whether any element of a floating tensor is NaN.
bool has_nan(const stg_tensor_view& view);

/// No two elements share memory, as far as strides can tell: every stride steps over all that the smaller ones reach.
bool has_distinct_elements(const stg_tensor_view& view);

struct MemoryRange {
  const char* begin;
  const char* end;
};
/// From the first byte of the tensor to one past its last.
MemoryRange memory_range(const stg_tensor_view& view);

/// Elements lie without gaps, in some order of the dimensions: memory can be walked flat.
bool is_dense(const stg_tensor_view& view);

/// Equal shapes, and equal strides where they matter: the same flat index is the same element in both.
bool same_layout(const stg_tensor_view& a, const stg_tensor_view& b);

/// What of this an accelerator's tensors need. All but `to_host` and `has_nan` are queued on the current streams and return at once.
struct DeviceElements {
  void (*copy)(const stg_tensor_view& destination, const stg_tensor_view& source);
  TensorPtr (*clone)(const stg_tensor_view& source);
  TensorPtr (*to_host)(const stg_tensor_view& source);
  bool (*has_nan)(const stg_tensor_view& view);
  /// Along dimension 0, numbers stacked; on the device of the first.
  TensorPtr (*join)(const std::vector<const stg_tensor_view*>& parts);
  /// (sum of weight x number) / divisor, of the type and on the device of the first.
  TensorPtr (*combine)(const std::vector<const stg_tensor_view*>& numbers, const std::vector<double>& weights, double divisor);
};
/// Once an instance has an accelerator; any thread.
void set_device_elements(const DeviceElements& functions);
bool has_device_elements();
/// Throws where there is no accelerator, naming the tensor's device.
const DeviceElements& device_elements(const stg_tensor_view& view);
/// Refuses a tensor that these functions can't take; concat(where...) names it.
template <class... Where>
void check_reachable(const stg_tensor_view& view, const Where&... where) {
  if (!has_device_elements()) check_in_host_memory(view, where...);
}

}  // namespace stratagem
