// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/loop/evaluate.hpp"

#include <algorithm>
#include <numeric>

#include "libstratagem/data/batches.hpp"
#include "libstratagem/loop/outputs.hpp"

namespace stratagem {
namespace {

/// Hands the outcome of each batch and its number of rows to `take`. Returns whether it was stopped before the end.
template <class Take>
bool for_each_batch(StrategyInstance& strategy, const EvaluationData& data, uint64_t stage, int64_t global_step,
                    const GoOn& go_on, Take take) {
  std::vector<int64_t> order(static_cast<size_t>(data.dataset.num_samples()));
  std::iota(order.begin(), order.end(), 0);
  BatchStream stream(data.dataset, std::move(order), data.batch_size, 0, data.num_batches);
  for (int64_t batch_index = 0; auto batch = stream.next(); ++batch_index) {
    take(strategy.evaluate(std::move(*batch), {batch_index, global_step}, stage),
         std::min(data.batch_size, data.dataset.num_samples() - batch_index * data.batch_size));
    if (!go_on(batch_index + 1, data.num_batches) && batch_index + 1 != data.num_batches) return true;
  }
  return false;
}

}  // namespace

Evaluation evaluate(StrategyInstance& strategy, const EvaluationData& data, uint64_t stage, int64_t global_step,
                    const GoOn& go_on) {
  EvaluationMetrics metrics(strategy);
  const bool stopped = for_each_batch(strategy, data, stage, global_step, go_on,
                                      [&](StepOutcome outcome, int64_t) { metrics.add(std::move(outcome)); });
  return {metrics.means(), stopped};
}

Evaluation validate_aside(StrategyInstance& strategy, const EvaluationData& data, int64_t global_step, const GoOn& go_on) {
  Tree side_state = strategy.side_state();
  Evaluation evaluation;
  try {
    evaluation = evaluate(strategy, data, STG_STAGE_VALIDATE, global_step, go_on);
  } catch (...) {
    try {
      strategy.put_back(std::move(side_state));
    } catch (const Error&) {
      // An instance that can't be used any more says so in the first error.
    }
    throw;
  }
  strategy.put_back(std::move(side_state));
  return evaluation;
}

bool predict(StrategyInstance& strategy, const EvaluationData& data, const GoOn& go_on, Predictions& predictions) {
  return for_each_batch(strategy, data, STG_STAGE_PREDICT, 0, go_on, [&](StepOutcome outcome, int64_t num_rows) {
    predictions.add(here(strategy, std::move(outcome.outputs)).root(), num_rows);
  });
}

}  // namespace stratagem
