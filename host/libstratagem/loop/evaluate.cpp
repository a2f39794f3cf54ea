// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/loop/evaluate.hpp"

#include <algorithm>

#include "libstratagem/loop/feed.hpp"
#include "libstratagem/loop/outputs.hpp"

namespace stratagem {
namespace {

/// Hands the outcome of each batch and its number of rows to `take`. Returns whether it was stopped before the end.
template <class Take>
bool for_each_batch(StrategyInstance& strategy, const EvaluationData& data, Progress place, const Events& events, Take take) {
  BatchFeed feed(strategy, place.stage, data.dataset, std::nullopt, data.batch_size, 0, data.num_batches);
  place.num_batches = data.num_batches;
  place.batch = 0;
  while (auto batch = feed.next()) {
    if (events.batch_start) events.batch_start(place);
    const int64_t num_rows = std::min(data.batch_size, data.dataset.num_samples() - place.batch * data.batch_size);
    StepOutcome outcome = strategy.evaluate(std::move(*batch), {place.batch, place.step}, place.stage);
    ++place.batch;
    if (events.batch_end) events.batch_end(place, outcome.outputs.root());
    take(std::move(outcome), num_rows);
    if (events.progress) events.progress(place);
    if (events.stop_requested() && place.batch != place.num_batches) return true;
  }
  return false;
}

}  // namespace

Evaluation evaluate(StrategyInstance& strategy, const EvaluationData& data, const Progress& place, const Events& events) {
  EvaluationMetrics metrics(strategy);
  const bool stopped =
      for_each_batch(strategy, data, place, events, [&](StepOutcome outcome, int64_t) { metrics.add(std::move(outcome)); });
  return {metrics.means(), stopped};
}

Evaluation validate_aside(StrategyInstance& strategy, const EvaluationData& data, const Progress& place, const Events& events) {
  Tree side_state = strategy.side_state();
  Evaluation evaluation;
  try {
    evaluation = evaluate(strategy, data, place, events);
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

bool predict(StrategyInstance& strategy, const EvaluationData& data, const Progress& place, const Events& events,
             Predictions& predictions) {
  return for_each_batch(strategy, data, place, events, [&](StepOutcome outcome, int64_t num_rows) {
    predictions.add(here(strategy, std::move(outcome.outputs)).root(), num_rows);
  });
}

}  // namespace stratagem
