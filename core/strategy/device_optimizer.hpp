// SPDX-License-Identifier: Apache-2.0
//
// The optimizer on an accelerator. Clipping, and the look for an overflow, are queued with it; the host reads what came of them when all
// is queued. An update has three parts, each of which all leaders end before the next:
//
//   measure   what an update must know of all devices' gradients; only of a sharded optimizer, and only with clipping by norm or a scaled loss
//   update    each leader updates parameters of its device
//   receive   what the other devices updated; only of a sharded optimizer
//
// ReplicatedOptimizer updates all parameters on each device, all with the same gradients, so that they stay the same bits.
#pragma once

#include <stratagem/strategy.h>

#include <map>
#include <vector>

#include "accelerator/lanes.hpp"
#include "strategy/device_gradients.hpp"
#include "strategy/optimizers.hpp"

namespace stratagem {

class DeviceOptimizer : public Optimizer {
 public:
  /// All references must outlive the optimizer.
  DeviceOptimizer(const OptimizerOptions& options, Replicas& replicas, const Lanes& lanes, const DeviceGradients& gradients);

  /// What an update tells, on the leader's device: 0-dim, undefined where it wasn't asked for.
  struct Found {
    at::Tensor norm;      ///< of the whole gradient
    at::Tensor overflow;  ///< float, not 0: something isn't finite, and nothing was updated
  };
  struct Wish {
    stg_update_args args{};
    bool looks_for_overflow = false;
    bool measures() const { return looks_for_overflow || args.clip == STG_CLIP_NORM; }
  };
  virtual bool is_sharded() const { return false; }
  /// Serial.
  virtual void begin_update() {}
  /// By each leader's worker, in its lane, after DeviceGradients::receive.
  virtual void measure(size_t, const Wish&) {}
  virtual Found update(size_t leader, const Wish& wish) = 0;
  virtual void receive(size_t) {}

 protected:
  // What a kernel works on: a parameter, or a part of one.
  struct Piece {
    size_t parameter;
    at::Tensor values;
    at::Tensor gradient;
    std::vector<at::Tensor> state;  // by slot
  };
  using Counts = std::map<int64_t, at::Tensor>;  // updates with this one, as kernels take them: many parameters have one
  static std::vector<at::Tensor> gradients_of(const std::vector<const Piece*>& pieces);
  void run_all(const std::vector<const Piece*>& pieces, double lr, const at::Tensor& left_out, Counts& counts) const;
  /// A float, 1 where the update is left out; undefined: it isn't.
  at::Tensor left_out(size_t leader, const at::Tensor& overflow) const;
  /// RMSprop has no kernel that could leave an update out, so the host asks.
  bool host_leaves_out(const at::Tensor& left_out) const;

  const Lanes& lanes_;
  const DeviceGradients& gradients_;
};

class ReplicatedOptimizer final : public DeviceOptimizer {
 public:
  ReplicatedOptimizer(const OptimizerOptions& options, Replicas& replicas, const Lanes& lanes, const DeviceGradients& gradients);

  Found update(size_t leader, const Wish& wish) override;
  const stg_tensor* state(size_t parameter, size_t slot) const override { return shown_state_[slot][parameter].get(); }

 private:
  // The memory of one leader.
  struct Device {
    size_t lane;
    std::vector<at::Tensor> parameters;
    std::vector<std::vector<at::Tensor>> state;  // by slot, by parameter
  };
  void spread_state(size_t parameter, bool is_begun) override;

  std::vector<Device> devices_;                      // by leader
  std::vector<std::vector<TensorPtr>> shown_state_;  // by slot, by parameter: the root's
};

}  // namespace stratagem
