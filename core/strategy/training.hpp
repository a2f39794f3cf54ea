// SPDX-License-Identifier: Apache-2.0
//
// What exists from setup to teardown, the threads apart. Shared, since tensors that an instance lent (states, gradients) keep it
// alive.
#pragma once

#include <memory>
#include <optional>

#include "accelerator/lanes.hpp"
#include "strategy/device_gradients.hpp"
#include "strategy/device_optimizer.hpp"
#include "strategy/gradients.hpp"
#include "strategy/loss_scaler.hpp"
#include "strategy/optimizers.hpp"
#include "strategy/replicas.hpp"

namespace stratagem {

/// What replicas on an accelerator have besides.
struct DeviceTraining {
  /// Opens the transport's group, until the call's deadline.
  DeviceTraining(const Call& call, const Options& options, const TransportApi& transport);

  /// What `reader` queues next comes after what `writer` has queued.
  void let_wait(const char* name, size_t reader, size_t writer) const;
  /// Before and after a lane that leads its device reads what the other replicas there made: they may use that memory again. Between
  /// calls there is no need of either: all lanes of a device wait for the caller's stream there, which has waited for them all.
  void wait_for_followers(const char* name, size_t leader) const;
  void let_followers_go_on(const char* name, size_t leader) const;
  /// Blocks until all lanes are done.
  void await(const Call& call, const char* waiting_for) const;

  Lanes lanes;
  std::vector<stg_stream> compute_streams;  ///< by lane: what a model is told
};

struct Training {
  /// `device`: of an accelerator, else null.
  Training(const Model& model, const Options& options, uint32_t threads_per_replica, bool is_fit, bool state_follows,
           std::shared_ptr<DeviceTraining> device);

  ReducedGradients& host_gradients() { return static_cast<ReducedGradients&>(*gradients); }
  HostOptimizer& host_optimizer() { return static_cast<HostOptimizer&>(*optimizer); }
  DeviceGradients& device_gradients() { return static_cast<DeviceGradients&>(*gradients); }
  DeviceOptimizer& device_optimizer() { return static_cast<DeviceOptimizer&>(*optimizer); }
  /// What losses are multiplied by in backward.
  double loss_scale() const { return scaler ? scaler->scale : 1; }

  std::shared_ptr<DeviceTraining> device;  ///< null on the CPU
  Replicas replicas;
  std::unique_ptr<Gradients> gradients;  ///< in fit
  std::unique_ptr<Optimizer> optimizer;  ///< in fit, unless the host has its own
  std::optional<LossScaler> scaler;      ///< in fit, with 16-mixed
  uint64_t num_updates = 0;
  std::vector<Bytes> further_generators;  ///< of replicas that this instance doesn't have
};

}  // namespace stratagem
