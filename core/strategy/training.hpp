// SPDX-License-Identifier: Apache-2.0
//
// What exists from setup to teardown, the threads apart. Shared, since tensors that an instance lent (states, gradients) keep it
// alive.
#pragma once

#include <memory>
#include <optional>

#include "strategy/gradients.hpp"
#include "strategy/optimizers.hpp"
#include "strategy/replicas.hpp"

namespace stratagem {

struct Training {
  Training(const Model& model, const Options& options, uint32_t threads_per_replica, bool is_fit)
      : replicas(model, options, threads_per_replica, is_fit && options.optimizer.has_value()) {
    if (!is_fit) return;
    gradients.emplace(replicas.root(), replicas.size());
    if (options.optimizer) optimizer.emplace(*options.optimizer, replicas.root(), *gradients);
  }

  Replicas replicas;
  std::optional<ReducedGradients> gradients;  ///< in fit
  std::optional<Optimizer> optimizer;         ///< in fit, unless the host has its own
  uint64_t num_updates = 0;
  std::vector<Bytes> further_generators;  ///< of replicas that this instance doesn't have
};

}  // namespace stratagem
