// SPDX-License-Identifier: Apache-2.0
//
// Tensors across the ABI, without a copy: stg_tensor <-> at::Tensor. LibTorch's own importer isn't used: it accepts another DLPack
// major, leaks a tensor that it refuses, and in 2.11 ends the process for a negative stride.
#pragma once

#include <ATen/core/Tensor.h>
#include <stratagem/tensor.h>

#include <string>

#include "base/value.hpp"

namespace stratagem {

/// Takes the tensor over. Its deleter runs once, when LibTorch drops the storage (on whichever thread that is), or before this throws.
/// Checked first by check_tensor; `where` names it in the error. Pinned host memory becomes a CPU tensor.
at::Tensor to_tensor(TensorPtr tensor, const std::string& where = "tensor");

/// A view that owns nothing: `tensor` must outlive it and all that is made from it.
at::Tensor view_tensor(const stg_tensor& tensor, const std::string& where = "tensor");

/// A handle that keeps the storage alive, and only that: no graph, no version counter. Strides are always there; conjugate and
/// negative views are resolved; sparse, quantised and meta tensors are refused.
TensorPtr to_dlpack(const at::Tensor& tensor);

}  // namespace stratagem
