// SPDX-License-Identifier: Apache-2.0
//
// The optimizer on an accelerator: each leader updates the parameters of its device, all with the same gradients, so that they stay the
// same bits. Clipping, and the look for an overflow, are queued with it; the host reads what came of them when all is queued.
#pragma once

#include <stratagem/strategy.h>

#include <vector>

#include "accelerator/lanes.hpp"
#include "strategy/device_gradients.hpp"
#include "strategy/optimizers.hpp"

namespace stratagem {

class DeviceOptimizer final : public Optimizer {
 public:
  /// All references must outlive the optimizer.
  DeviceOptimizer(const OptimizerOptions& options, Replicas& replicas, const Lanes& lanes, const DeviceGradients& gradients);

  /// What an update tells, on the leader's device: 0-dim, undefined where it wasn't asked for.
  struct Found {
    at::Tensor norm;      ///< of the whole gradient
    at::Tensor overflow;  ///< float, not 0: something isn't finite, and nothing was updated
  };
  /// By each leader's worker, in its lane, after DeviceGradients::receive.
  Found update(size_t leader, const stg_update_args& args, bool looks_for_overflow);
  const stg_tensor& state(size_t parameter, size_t slot) const override { return *shown_state_[slot][parameter]; }

 private:
  // The memory of one leader.
  struct Device {
    size_t lane;
    std::vector<at::Tensor> parameters;
    std::vector<std::vector<at::Tensor>> state;  // by slot, by parameter
  };
  void spread_state(size_t parameter, bool is_begun) override;
  void run_all(const Device& device, double lr, const at::Tensor& overflow);

  const Lanes& lanes_;
  const DeviceGradients& gradients_;
  std::vector<Device> devices_;                      // by leader
  std::vector<std::vector<TensorPtr>> shown_state_;  // by slot, by parameter: the root's
};

/// A float on the lane's device, not 0 where any of the gradients isn't finite. Queued.
at::Tensor find_overflow(const std::vector<at::Tensor>& gradients, at::Device device);

}  // namespace stratagem
