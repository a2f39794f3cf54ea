// SPDX-License-Identifier: Apache-2.0
#include "strategy/elements.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

namespace stratagem {

namespace {

// (stride, size) of the dimensions that have more than one element, the nearest in memory first.
std::vector<std::pair<int64_t, int64_t>> sorted_steps(const stg_tensor_view& view) {
  const std::vector<int64_t> strides = strides_of(view);
  std::vector<std::pair<int64_t, int64_t>> steps;
  for (size_t d = 0; d < strides.size(); ++d) {
    if (view.shape[d] > 1) steps.emplace_back(strides[d], view.shape[d]);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

void copy_strided(char* to, const int64_t* to_strides, const char* from, const int64_t* from_strides,
                  std::span<const int64_t> shape, int64_t element_bytes) {
  if (shape.empty()) {
    std::memcpy(to, from, static_cast<size_t>(element_bytes));
    return;
  }
  if (shape.size() == 1 && to_strides[0] == 1 && from_strides[0] == 1) {
    std::memcpy(to, from, static_cast<size_t>(shape[0] * element_bytes));
    return;
  }
  for (int64_t i = 0; i < shape[0]; ++i) {
    copy_strided(to + i * to_strides[0] * element_bytes, to_strides + 1, from + i * from_strides[0] * element_bytes,
                 from_strides + 1, shape.subspan(1), element_bytes);
  }
}

template <class T>
bool any_nan(const stg_tensor_view& view) {
  const T* elements = first_element<T>(view);
  const int64_t count = numel(view);
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(static_cast<float>(elements[i]))) return true;
  }
  return false;
}

std::atomic<const DeviceElements*> accelerator_functions{nullptr};

}  // namespace

void set_device_elements(const DeviceElements& functions) { accelerator_functions.store(&functions, std::memory_order_release); }

bool has_device_elements() { return accelerator_functions.load(std::memory_order_acquire) != nullptr; }

const DeviceElements& device_elements(const stg_tensor_view& view) {
  const DeviceElements* functions = accelerator_functions.load(std::memory_order_acquire);
  if (functions == nullptr) check_in_host_memory(view, "a tensor");
  return *functions;
}

Half::operator float() const noexcept {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1Fu;
  const uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign == 0 ? magnitude : -magnitude;
}

Half Half::from(float value) noexcept {
  const auto word = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((word >> 16) & 0x8000u);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return {static_cast<uint16_t>(sign | 0x7E00u)};
  if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7C00u)};
  if (magnitude < 0x1p-14f) {
    // Adding 0.5 rounds away what lies below the smallest subnormal, to the nearest, ties to even.
    const auto rounded = std::bit_cast<uint32_t>(magnitude + 0.5f) - std::bit_cast<uint32_t>(0.5f);
    return {static_cast<uint16_t>(sign | rounded)};
  }
  const uint32_t absolute = word & 0x7FFFFFFFu;
  const uint32_t rounded = absolute + 0xFFFu + ((absolute >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13))};
}

TensorPtr cast_tensor(const stg_tensor_view& source, stg_dtype dtype) {
  TensorPtr result = allocate_tensor(dtype, {source.shape, source.shape + source.num_dims});
  const int64_t count = numel(source);
  if (count == 0) return result;
  if (same_dtype(source.dtype, float32) && same_dtype(dtype, float64) && is_contiguous(source)) {
    std::copy_n(first_element<const float>(source), count, first_element<double>(result->view));
    return result;
  }
  char* to = first_element<char>(result->view);
  const auto step = static_cast<int64_t>(element_size_bytes(dtype));
  for (int64_t i = 0; i < count; ++i) store_floating(to + i * step, dtype, read_element(source, i));
  return result;
}

void copy_elements(const stg_tensor_view& destination, const stg_tensor_view& source) {
  if (numel(source) == 0) return;
  for (const stg_tensor_view* view : {&destination, &source}) {
    if (!is_in_host_memory(view->device)) return device_elements(*view).copy(destination, source);
  }
  const auto element_bytes = static_cast<int64_t>(element_size_bytes(source.dtype));
  if (is_dense(source) && same_layout(destination, source)) {
    std::memcpy(first_element<>(destination), first_element<>(source), static_cast<size_t>(numel(source) * element_bytes));
    return;
  }
  copy_strided(first_element<char>(destination), strides_of(destination).data(), first_element<char>(source),
               strides_of(source).data(), shape_of(source), element_bytes);
}

TensorPtr clone_tensor(const stg_tensor_view& source) {
  return is_in_host_memory(source.device) ? copy_tensor(source) : device_elements(source).clone(source);
}

TensorPtr copy_to_host(const stg_tensor_view& source) {
  return is_in_host_memory(source.device) ? copy_tensor(source) : device_elements(source).to_host(source);
}

void store_floating(void* at, stg_dtype dtype, double value) {
  const auto put = [at](auto element) { std::memcpy(at, &element, sizeof element); };
  if (same_dtype(dtype, float64)) return put(value);
  if (same_dtype(dtype, float32)) return put(static_cast<float>(value));
  if (dtype.code == STG_DTYPE_BFLOAT) return put(BFloat16::from(static_cast<float>(value)));
  if (dtype.code == STG_DTYPE_FLOAT && dtype.bits == 16) return put(Half::from(static_cast<float>(value)));
  throw invalid_argument(dtype_name(dtype), " is no floating type");
}

bool has_nan(const stg_tensor_view& view) {
  if (!is_floating(view.dtype) || numel(view) == 0) return false;
  if (!is_in_host_memory(view.device)) return device_elements(view).has_nan(view);
  if (!is_contiguous(view)) return has_nan(copy_tensor(view)->view);
  if (same_dtype(view.dtype, float32)) return any_nan<float>(view);
  if (same_dtype(view.dtype, float64)) return any_nan<double>(view);
  return view.dtype.code == STG_DTYPE_BFLOAT ? any_nan<BFloat16>(view) : any_nan<Half>(view);
}

bool has_distinct_elements(const stg_tensor_view& view) {
  if (numel(view) == 0) return true;
  int64_t reach = 1;  // elements from the first to one past the last, of the dimensions so far
  for (const auto& [stride, size] : sorted_steps(view)) {
    if (stride < reach) return false;
    reach += (size - 1) * stride;
  }
  return true;
}

MemoryRange memory_range(const stg_tensor_view& view) {
  const char* begin = first_element<const char>(view);
  if (numel(view) == 0) return {begin, begin};
  int64_t reach = 1;
  const std::vector<int64_t> strides = strides_of(view);
  for (size_t d = 0; d < strides.size(); ++d) reach += (view.shape[d] - 1) * strides[d];
  return {begin, begin + reach * static_cast<int64_t>(element_size_bytes(view.dtype))};
}

bool is_dense(const stg_tensor_view& view) {
  if (numel(view) == 0) return true;
  int64_t expected = 1;
  for (const auto& [stride, size] : sorted_steps(view)) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

bool same_layout(const stg_tensor_view& a, const stg_tensor_view& b) {
  if (a.num_dims != b.num_dims || !std::equal(a.shape, a.shape + a.num_dims, b.shape)) return false;
  if (is_contiguous(a) && is_contiguous(b)) return true;
  const std::vector<int64_t> a_strides = strides_of(a);
  const std::vector<int64_t> b_strides = strides_of(b);
  for (size_t d = 0; d < a_strides.size(); ++d) {
    if (a.shape[d] > 1 && a_strides[d] != b_strides[d]) return false;
  }
  return true;
}

}  // namespace stratagem
