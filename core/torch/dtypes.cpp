// SPDX-License-Identifier: Apache-2.0
#include "torch/dtypes.hpp"

#include <array>

#include "base/dlpack.hpp"
#include "base/error.hpp"

namespace stratagem {

namespace {

struct Pair {
  stg_dtype ours;
  at::ScalarType theirs;
};

// The types that LibTorch takes in and gives out unchanged.
constexpr std::array<Pair, 16> pairs{{
    {{STG_DTYPE_FLOAT, 32, 1}, at::kFloat},
    {{STG_DTYPE_FLOAT, 64, 1}, at::kDouble},
    {{STG_DTYPE_FLOAT, 16, 1}, at::kHalf},
    {{STG_DTYPE_BFLOAT, 16, 1}, at::kBFloat16},
    {{STG_DTYPE_INT, 64, 1}, at::kLong},
    {{STG_DTYPE_INT, 32, 1}, at::kInt},
    {{STG_DTYPE_INT, 16, 1}, at::kShort},
    {{STG_DTYPE_INT, 8, 1}, at::kChar},
    {{STG_DTYPE_UINT, 8, 1}, at::kByte},
    {{STG_DTYPE_UINT, 16, 1}, at::kUInt16},
    {{STG_DTYPE_UINT, 32, 1}, at::kUInt32},
    {{STG_DTYPE_UINT, 64, 1}, at::kUInt64},
    {{STG_DTYPE_BOOL, 8, 1}, at::kBool},
    {{STG_DTYPE_COMPLEX, 64, 1}, at::kComplexFloat},
    {{STG_DTYPE_COMPLEX, 128, 1}, at::kComplexDouble},
    {{STG_DTYPE_COMPLEX, 32, 1}, at::kComplexHalf},
}};

at::DeviceIndex device_index(stg_device device) {
  if (device.index < 0 || device.index > 127) throw invalid_argument("there is no device ", device_name(device));
  return static_cast<at::DeviceIndex>(device.index);
}

}  // namespace

at::ScalarType to_scalar_type(stg_dtype dtype) {
  for (const Pair& pair : pairs) {
    if (same_dtype(pair.ours, dtype)) return pair.theirs;
  }
  throw invalid_argument("LibTorch has no element type ", dtype_name(dtype));
}

stg_dtype from_scalar_type(at::ScalarType type) {
  for (const Pair& pair : pairs) {
    if (pair.theirs == type) return pair.ours;
  }
  throw unimplemented("a tensor of ", c10::toString(type), " elements has no form in the ABI; convert it first");
}

at::Device to_device(stg_device device) {
  switch (device.kind) {
    case STG_DEVICE_CPU:
    case STG_DEVICE_CUDA_HOST:
      return at::Device(at::kCPU);
    case STG_DEVICE_CUDA:
      return at::Device(at::kCUDA, device_index(device));
    case STG_DEVICE_EXTENSION:
      return at::Device(at::kPrivateUse1, device_index(device));
    default:
      throw invalid_argument("no LibTorch device for ", device_name(device));
  }
}

stg_device from_device(at::Device device) {
  switch (device.type()) {
    case at::kCPU:
      return {STG_DEVICE_CPU, 0};
    case at::kCUDA:
      return {STG_DEVICE_CUDA, device.index()};
    case at::kPrivateUse1:
      return {STG_DEVICE_EXTENSION, device.index()};
    default:
      throw unimplemented("a tensor on ", device.str(), " has no form in the ABI; move it to cpu, cuda or an extension device");
  }
}

}  // namespace stratagem
