// SPDX-License-Identifier: Apache-2.0
#include "strategy/device_optimizer.hpp"

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <map>

#include "torch/bridge.hpp"

namespace stratagem {

namespace {

// The kernels want lists of one type.
std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype(const std::vector<at::Tensor>& tensors) {
  std::map<at::ScalarType, std::vector<at::Tensor>> groups;
  for (const at::Tensor& tensor : tensors) groups[tensor.scalar_type()].push_back(tensor);
  return groups;
}

at::Tensor norm_of(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> norms;
  for (const auto& [dtype, group] : by_dtype(gradients)) {
    for (const at::Tensor& norm : at::_foreach_norm(group, 2)) norms.push_back(norm.to(at::kDouble));
  }
  return at::stack(norms).norm();
}

// As on the CPU: times limit / norm where the norm isn't at most the limit.
void clip_by_norm(const std::vector<at::Tensor>& gradients, const at::Tensor& norm, double limit) {
  const at::Tensor coefficient = at::where(norm.le(limit), at::ones({}, norm.options()), norm.reciprocal().mul(limit));
  for (auto& [dtype, group] : by_dtype(gradients)) {
    const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
    at::_foreach_mul_(group, coefficient.to(is_half ? at::kFloat : dtype));
  }
}

}  // namespace

at::Tensor find_overflow(const std::vector<at::Tensor>& gradients, at::Device device) {
  at::Tensor found = at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(device));
  const at::Tensor one = at::ones({}, found.options());
  for (auto& [dtype, group] : by_dtype(gradients)) at::_amp_foreach_non_finite_check_and_unscale_(group, found, one);
  return found;
}

DeviceOptimizer::DeviceOptimizer(const OptimizerOptions& options, Replicas& replicas, const Lanes& lanes,
                                 const DeviceGradients& gradients)
    : Optimizer(options, replicas.root(), gradients), lanes_(lanes), gradients_(gradients) {
  for (const size_t leader : lanes.leaders()) {
    const Lanes::Scope scope(lanes, leader);
    Device& device = devices_.emplace_back();
    device.lane = leader;
    for (const TensorPtr& parameter : replicas[leader].parameters) device.parameters.push_back(view_tensor(*parameter));
    device.state.resize(slots().size());
    for (size_t p = 0; p < device.parameters.size(); ++p) {
      const bool is_trained = root_.parameter_infos[p].requires_grad;
      for (auto& slot : device.state) slot.push_back(is_trained ? at::zeros_like(device.parameters[p]) : at::Tensor());
    }
  }
  for (const auto& slot : devices_[0].state) {
    auto& shown = shown_state_.emplace_back();
    for (const at::Tensor& tensor : slot) shown.push_back(tensor.defined() ? to_dlpack(tensor) : nullptr);
  }
  for (size_t p = 0; p < root_.parameters.size(); ++p) {
    if (root_.parameter_infos[p].requires_grad) spread_state(p, false);
  }
}

void DeviceOptimizer::spread_state(size_t p, bool is_begun) {
  for (Device& device : devices_) {
    const Lanes::Scope scope(lanes_, device.lane);
    for (size_t s = 0; s < device.state.size(); ++s) {
      if (!is_begun) {
        device.state[s][p].fill_(options_.initial_accumulator_value);
      } else if (&device != &devices_[0]) {
        device.state[s][p].copy_(devices_[0].state[s][p]);
      }
    }
  }
}

DeviceOptimizer::Found DeviceOptimizer::update(size_t leader, const stg_update_args& args, bool looks_for_overflow) {
  const Device& device = *std::find_if(devices_.begin(), devices_.end(), [&](const Device& one) { return one.lane == leader; });
  std::vector<at::Tensor> gradients;
  for (size_t p = 0; p < device.parameters.size(); ++p) {
    if (gradients_.is_present(p)) gradients.push_back(gradients_.gradient(leader, p));
  }
  Found found;
  if (gradients.empty()) return found;
  if (looks_for_overflow) found.overflow = find_overflow(gradients, lanes_[leader].device);
  if (args.clip == STG_CLIP_NORM) {
    found.norm = norm_of(gradients);
    clip_by_norm(gradients, found.norm, args.clip_limit);
  } else if (args.clip == STG_CLIP_VALUE) {
    for (auto& [dtype, group] : by_dtype(gradients)) {
      at::_foreach_clamp_min_(group, -args.clip_limit);
      at::_foreach_clamp_max_(group, args.clip_limit);
    }
  }
  run_all(device, args.lr, found.overflow);
  return found;
}

void DeviceOptimizer::run_all(const Device& device, double lr, const at::Tensor& overflow) {
  // RMSprop has no kernel that could leave an update out, so the host asks.
  if (overflow.defined() && name() == "rmsprop" && overflow.item<float>() != 0) return;
  std::map<std::pair<at::ScalarType, bool>, Lists> lists;  // by type, and whether it is the first gradient
  std::map<int64_t, at::Tensor> counts;                    // many parameters have one
  for (size_t p = 0; p < device.parameters.size(); ++p) {
    if (!gradients_.is_present(p)) continue;
    at::Tensor& count = counts[steps(p) + 1];
    if (has_step() && !count.defined()) {
      count = at::full({}, static_cast<double>(steps(p) + 1),
                       at::TensorOptions().dtype(at::kFloat).device(lanes_[device.lane].device));
    }
    std::vector<at::Tensor> state;
    for (const auto& slot : device.state) state.push_back(slot[p]);
    lists[{device.parameters[p].scalar_type(), !is_begun(p)}].add(device.parameters[p], gradients_.gradient(device.lane, p),
                                                                  state, count);
  }
  for (auto& [kind, list] : lists) run(list, kind.second, lr, overflow);
}

}  // namespace stratagem
