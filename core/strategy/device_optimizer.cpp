// SPDX-License-Identifier: Apache-2.0
#include "strategy/device_optimizer.hpp"

#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "strategy/device_clipping.hpp"
#include "torch/bridge.hpp"

namespace stratagem {

DeviceOptimizer::DeviceOptimizer(const OptimizerOptions& options, Replicas& replicas, const Lanes& lanes,
                                 const DeviceGradients& gradients)
    : Optimizer(options, replicas.root(), gradients), lanes_(lanes), gradients_(gradients) {}

std::vector<at::Tensor> DeviceOptimizer::gradients_of(const std::vector<const Piece*>& pieces) {
  std::vector<at::Tensor> gradients;
  for (const Piece* piece : pieces) gradients.push_back(piece->gradient);
  return gradients;
}

at::Tensor DeviceOptimizer::left_out(size_t leader, const at::Tensor& overflow) const {
  const at::Tensor& weightless = gradients_.left_out(leader);
  if (!overflow.defined() || !weightless.defined()) return overflow.defined() ? overflow : weightless;
  return at::maximum(overflow, weightless);
}

bool DeviceOptimizer::host_leaves_out(const at::Tensor& left_out) const {
  return left_out.defined() && name() == "rmsprop" && left_out.item<float>() != 0;
}

void DeviceOptimizer::run_all(const std::vector<const Piece*>& pieces, double lr, const at::Tensor& left_out,
                              Counts& counts) const {
  std::map<std::pair<at::ScalarType, bool>, Lists> lists;  // by type, and whether it is the first gradient
  for (const Piece* piece : pieces) {
    const size_t p = piece->parameter;
    at::Tensor count;
    if (has_step()) {
      at::Tensor& known = counts[steps(p) + 1];
      if (!known.defined()) {
        known = at::full({}, static_cast<double>(steps(p) + 1), piece->values.options().dtype(at::kFloat));
      }
      count = known;
    }
    lists[{piece->values.scalar_type(), !is_begun(p)}].add(piece->values, piece->gradient, piece->state, count);
  }
  for (auto& [kind, list] : lists) run(list, kind.second, lr, left_out);
}

// ---- replicated

ReplicatedOptimizer::ReplicatedOptimizer(const OptimizerOptions& options, Replicas& replicas, const Lanes& lanes,
                                         const DeviceGradients& gradients)
    : DeviceOptimizer(options, replicas, lanes, gradients) {
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

void ReplicatedOptimizer::spread_state(size_t p, bool is_begun) {
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

DeviceOptimizer::Found ReplicatedOptimizer::update(size_t leader, const Wish& wish) {
  const Device& device = *std::find_if(devices_.begin(), devices_.end(), [&](const Device& one) { return one.lane == leader; });
  std::vector<Piece> present;
  for (size_t p = 0; p < device.parameters.size(); ++p) {
    if (!gradients_.is_present(p)) continue;
    Piece& piece = present.emplace_back(Piece{p, device.parameters[p], gradients_.gradient(leader, p), {}});
    for (const auto& slot : device.state) piece.state.push_back(slot[p]);
  }
  Found found;
  if (present.empty()) return found;
  std::vector<const Piece*> pieces;
  for (const Piece& piece : present) pieces.push_back(&piece);
  const std::vector<at::Tensor> gradients = gradients_of(pieces);
  const at::Device where = lanes_[leader].device;
  if (wish.looks_for_overflow) found.overflow = find_overflow(gradients, where);
  if (wish.args.clip == STG_CLIP_NORM) {
    found.norm = norm_of(gradients, where);
    clip_by_norm(gradients, found.norm, wish.args.clip_limit);
  } else if (wish.args.clip == STG_CLIP_VALUE) {
    clip_by_value(gradients, wish.args.clip_limit);
  }
  Counts counts;
  const at::Tensor leaves_out = left_out(leader, found.overflow);
  if (!host_leaves_out(leaves_out)) run_all(pieces, wish.args.lr, leaves_out, counts);
  return found;
}

}  // namespace stratagem
