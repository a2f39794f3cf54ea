// SPDX-License-Identifier: Apache-2.0
//
// Element types and devices, both ways. What the other side has no word for is an error that names it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <stratagem/tensor.h>

namespace stratagem {

at::ScalarType to_scalar_type(stg_dtype dtype);
stg_dtype from_scalar_type(at::ScalarType type);

/// Pinned host memory and every logical CPU device are LibTorch's `cpu`.
at::Device to_device(stg_device device);
/// A CPU tensor is on {STG_DEVICE_CPU, 0}.
stg_device from_device(at::Device device);

}  // namespace stratagem
