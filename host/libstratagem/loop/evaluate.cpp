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
bool for_each_batch(StrategyInstance& strategy, const Dataset& data, int64_t batch_size, uint64_t stage, int64_t global_step,
                    const GoOn& go_on, Take take) {
  std::vector<int64_t> order(static_cast<size_t>(data.num_samples()));
  std::iota(order.begin(), order.end(), 0);
  BatchStream stream(data, std::move(order), batch_size);
  const int64_t total = num_batches(data.num_samples(), batch_size);
  for (int64_t batch_index = 0; auto batch = stream.next(); ++batch_index) {
    take(strategy.evaluate(std::move(*batch), {batch_index, global_step}, stage),
         std::min(batch_size, data.num_samples() - batch_index * batch_size));
    if (!go_on(batch_index + 1, total) && batch_index + 1 != total) return true;
  }
  return false;
}

}  // namespace

Evaluation evaluate(StrategyInstance& strategy, const Dataset& data, int64_t batch_size, uint64_t stage, int64_t global_step,
                    const GoOn& go_on) {
  EvaluationMetrics metrics(strategy);
  const bool stopped = for_each_batch(strategy, data, batch_size, stage, global_step, go_on,
                                      [&](StepOutcome outcome, int64_t) { metrics.add(std::move(outcome)); });
  return {metrics.means(), stopped};
}

bool predict(StrategyInstance& strategy, const Dataset& data, int64_t batch_size, const GoOn& go_on, Predictions& predictions) {
  return for_each_batch(strategy, data, batch_size, STG_STAGE_PREDICT, 0, go_on, [&](StepOutcome outcome, int64_t num_rows) {
    predictions.add(here(strategy, std::move(outcome.outputs)).root(), num_rows);
  });
}

}  // namespace stratagem
