// SPDX-License-Identifier: Apache-2.0
//
// One pass over a data set without gradients.
#pragma once

#include <map>
#include <string>

#include "libstratagem/data/dataset.hpp"
#include "libstratagem/loop/events.hpp"
#include "libstratagem/loop/instance.hpp"
#include "libstratagem/loop/predictions.hpp"

namespace stratagem {

struct Evaluation {
  std::map<std::string, double> metrics;
  bool stopped = false;  // before the end: the metrics are of a part only
};

/// The first `num_batches` batches of a data set, in its order.
struct EvaluationData {
  const Dataset& dataset;
  int64_t batch_size;
  int64_t num_batches;

  EvaluationData(const Dataset& data, const DatasetConfig& config, const BatchLimit& limit)
      : dataset(data),
        batch_size(config.batch_size),
        num_batches(limit.of(stratagem::num_batches(data.num_samples(), batch_size))) {}
};

/// `place` says the stage (STG_STAGE_VALIDATE or STG_STAGE_TEST), and where the run is; batches are counted here.
Evaluation evaluate(StrategyInstance& strategy, const EvaluationData& data, const Progress& place, const Events& events);

/// Validation in the middle of training, which leaves no trace: what the model has drawn and counted in it is put back.
Evaluation validate_aside(StrategyInstance& strategy, const EvaluationData& data, const Progress& place, const Events& events);

/// Returns whether it was stopped before the end.
bool predict(StrategyInstance& strategy, const EvaluationData& data, const Progress& place, const Events& events,
             Predictions& predictions);

}  // namespace stratagem
