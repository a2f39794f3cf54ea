// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/loop/evaluate.hpp"

#include <numeric>

#include "libstratagem/data/batches.hpp"
#include "libstratagem/loop/outputs.hpp"

namespace stratagem {

Evaluation evaluate(StrategyInstance& strategy, const Dataset& data, int64_t batch_size, uint64_t stage, int64_t global_step,
                    const std::function<bool(int64_t, int64_t)>& go_on) {
  std::vector<int64_t> order(static_cast<size_t>(data.num_samples()));
  std::iota(order.begin(), order.end(), 0);
  BatchStream stream(data, std::move(order), batch_size);
  EvaluationMetrics metrics(strategy);
  const int64_t total = num_batches(data.num_samples(), batch_size);
  for (int64_t batch_index = 0; auto batch = stream.next(); ++batch_index) {
    metrics.add(strategy.evaluate(std::move(*batch), {batch_index, global_step}, stage));
    if (!go_on(batch_index + 1, total) && batch_index + 1 != total) return {metrics.means(), true};
  }
  return {metrics.means(), false};
}

}  // namespace stratagem
