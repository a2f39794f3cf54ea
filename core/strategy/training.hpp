// SPDX-License-Identifier: Apache-2.0
//
// What exists from setup to teardown, the threads apart. Shared, since tensors that an instance lent (states, gradients) keep it
// alive.
#pragma once

#include <memory>
#include <optional>

#include "strategy/gradients.hpp"
#include "strategy/loss_scaler.hpp"
#include "strategy/optimizers.hpp"
#include "strategy/replicas.hpp"

namespace stratagem {

struct Training {
  Training(const Model& model, const Options& options, uint32_t threads_per_replica, bool is_fit, bool state_follows)
      : replicas(model, options, threads_per_replica, is_fit && options.optimizer.has_value(), state_follows) {
    if (!is_fit) return;
    // Momentum moves all rows that ever had a gradient.
    const bool has_momentum = options.optimizer && options.optimizer->name == "sgd" && options.optimizer->momentum != 0;
    gradients.emplace(replicas.root(), replicas.size(), has_momentum);
    if (options.scales_loss) {
      refuse_float16(replicas.root());
      scaler.emplace();
    }
    if (options.optimizer) optimizer.emplace(*options.optimizer, replicas.root(), *gradients);
  }

  /// What losses are multiplied by in backward.
  double loss_scale() const { return scaler ? scaler->scale : 1; }

  static void refuse_float16(const ReplicaSlot& root) {
    for (const ParameterInfo& info : root.parameter_infos) {
      if (!info.requires_grad || info.dtype.code != STG_DTYPE_FLOAT || info.dtype.bits != 16) continue;
      throw invalid_argument("parameter ", info.names[0],
                             " is float16, whose gradient 16-mixed would multiply by the loss scale; ",
                             "keep it in float32: autocast computes in float16 all the same");
    }
  }

  Replicas replicas;
  std::optional<ReducedGradients> gradients;  ///< in fit
  std::optional<Optimizer> optimizer;         ///< in fit, unless the host has its own
  std::optional<LossScaler> scaler;           ///< in fit, with 16-mixed
  uint64_t num_updates = 0;
  std::vector<Bytes> further_generators;  ///< of replicas that this instance doesn't have
};

}  // namespace stratagem
