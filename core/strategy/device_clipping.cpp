// SPDX-License-Identifier: Apache-2.0
#include "strategy/device_clipping.hpp"

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <map>

namespace stratagem {

namespace {

// The kernels want lists of one type.
std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype(const std::vector<at::Tensor>& tensors) {
  std::map<at::ScalarType, std::vector<at::Tensor>> groups;
  for (const at::Tensor& tensor : tensors) groups[tensor.scalar_type()].push_back(tensor);
  return groups;
}

}  // namespace

at::Tensor norm_of(const std::vector<at::Tensor>& gradients, at::Device device) {
  std::vector<at::Tensor> norms;
  for (const auto& [dtype, group] : by_dtype(gradients)) {
    for (const at::Tensor& norm : at::_foreach_norm(group, 2)) norms.push_back(norm.to(at::kDouble));
  }
  if (norms.empty()) return at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device));
  return at::stack(norms).norm();
}

void clip_by_norm(const std::vector<at::Tensor>& gradients, const at::Tensor& norm, double limit) {
  const at::Tensor coefficient = at::where(norm.le(limit), at::ones({}, norm.options()), norm.reciprocal().mul(limit));
  for (auto& [dtype, group] : by_dtype(gradients)) {
    const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
    at::_foreach_mul_(group, coefficient.to(is_half ? at::kFloat : dtype));
  }
}

void clip_by_value(const std::vector<at::Tensor>& gradients, double limit) {
  for (auto& [dtype, group] : by_dtype(gradients)) {
    at::_foreach_clamp_min_(group, -limit);
    at::_foreach_clamp_max_(group, limit);
  }
}

at::Tensor find_overflow(const std::vector<at::Tensor>& gradients, at::Device device) {
  at::Tensor found = at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(device));
  const at::Tensor one = at::ones({}, found.options());
  std::vector<at::Tensor> reals;
  for (const at::Tensor& gradient : gradients) reals.push_back(gradient.is_complex() ? at::view_as_real(gradient) : gradient);
  for (auto& [dtype, group] : by_dtype(reals)) at::_amp_foreach_non_finite_check_and_unscale_(group, found, one);
  return found;
}

}  // namespace stratagem
