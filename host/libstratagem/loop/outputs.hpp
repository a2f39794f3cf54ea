// SPDX-License-Identifier: Apache-2.0
//
// What the loop reads from a step's outputs.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "libstratagem/loop/instance.hpp"
#include "libstratagem/loop/means.hpp"

namespace stratagem {

/// The tree with all that is elsewhere brought to host memory; what is there already is not touched.
Tree here(StrategyInstance& strategy, Tree tree);

/// Training losses, read late: a loss may lie on a device that is still computing it, and reading it would wait. They are kept until
/// somebody wants a number.
class TrainingLoss {
 public:
  explicit TrainingLoss(StrategyInstance& strategy) : strategy_(strategy) {}

  /// Takes the loss out of a training step's outputs: a bare 0-dim tensor, or a dict's "loss".
  void add(StepOutcome outcome);
  /// Reads what is kept. Returns the mean of the last `num_last` of them.
  double flush(size_t num_last);
  size_t num_kept() const { return kept_.size(); }
  /// How many were added so far, and forgetting those after the first so many, which are not read yet.
  size_t num_added() const { return num_read_ + kept_.size(); }
  void forget_after(size_t num_wanted) {
    while (!kept_.empty() && num_added() > num_wanted) kept_.pop_back();
  }

  WeightedMean epoch;  // of all that was flushed; the loop resets and restores it

 private:
  struct Kept {
    Tree loss;
    double weight;
  };
  StrategyInstance& strategy_;
  std::vector<Kept> kept_;
  size_t num_read_ = 0;
};

/// Metrics of an evaluation: each number, or tensor with one entry per replica, of the outputs; a bare tensor is the loss. An entry
/// that is something else in any batch (predictions, texts) is no metric.
class EvaluationMetrics {
 public:
  explicit EvaluationMetrics(StrategyInstance& strategy) : strategy_(strategy) {}

  void add(StepOutcome outcome);
  std::map<std::string, double> means() const;

 private:
  void add_entry(const std::string& name, const stg_value& value, const std::vector<double>& weights);

  StrategyInstance& strategy_;
  std::map<std::string, WeightedMean> metrics_;
  std::set<std::string> others_;
};

}  // namespace stratagem
