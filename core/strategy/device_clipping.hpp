// SPDX-License-Identifier: Apache-2.0
//
// What is done to gradients on an accelerator between their reduction and the update. All of it is queued; nothing is read.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace stratagem {

/// A double: the 2-norm of all of them together.
at::Tensor norm_of(const std::vector<at::Tensor>& gradients, at::Device device);
/// As on the CPU: times limit / norm where the norm isn't at most the limit.
void clip_by_norm(const std::vector<at::Tensor>& gradients, const at::Tensor& norm, double limit);
/// Cut to [-limit, limit].
void clip_by_value(const std::vector<at::Tensor>& gradients, double limit);
/// A float, not 0 where any of them isn't finite.
at::Tensor find_overflow(const std::vector<at::Tensor>& gradients, at::Device device);

}  // namespace stratagem
