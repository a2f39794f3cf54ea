// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/loop/outputs.hpp"

#include <numeric>
#include <optional>
#include <utility>

#include "base/dlpack.hpp"

namespace stratagem {
namespace {

bool readable_here(stg_device device) { return device.kind == STG_DEVICE_CPU || device.kind == STG_DEVICE_CUDA_HOST; }

bool is_real(stg_dtype dtype) { return dtype.code != STG_DTYPE_COMPLEX; }

/// The numbers of a leaf: one, or one per replica. Nothing where it is neither.
std::optional<std::vector<double>> numbers_of(const stg_value& value, size_t num_replicas) {
  switch (value.type) {
    case STG_BOOL:
    case STG_INT64:
      return std::vector{static_cast<double>(value.as.i64)};
    case STG_DOUBLE:
      return std::vector{value.as.f64};
    case STG_TENSOR:
      break;
    default:
      return std::nullopt;
  }
  const stg_tensor_view& view = value.as.tensor->view;
  const bool per_replica = view.num_dims == 1 && view.shape[0] == static_cast<int64_t>(num_replicas);
  if (!is_real(view.dtype) || (view.num_dims != 0 && !per_replica)) return std::nullopt;
  std::vector<double> numbers;
  for (int64_t i = 0; i < numel(view); ++i) numbers.push_back(read_element(view, i));
  return numbers;
}

}  // namespace

Tree here(StrategyInstance& strategy, Tree tree) {
  bool elsewhere = false;
  for_each_leaf(std::as_const(tree).root(), [&](const KeyPath&, const stg_value& leaf) {
    elsewhere |= leaf.type == STG_TENSOR && !readable_here(leaf.as.tensor->view.device);
  });
  return elsewhere ? strategy.to_host(std::move(tree)) : std::move(tree);
}

void TrainingLoss::add(StepOutcome outcome) {
  stg_value& root = outcome.outputs.root();
  stg_value* loss = root.type == STG_DICT ? find(root, "loss") : &root;
  const bool is_loss = loss != nullptr && loss->type == STG_TENSOR && loss->as.tensor->view.num_dims == 0;
  if (!is_loss) {
    throw invalid_argument("a training step must give a 0-dim loss, or a dict with one under \"loss\"; it gave ",
                           loss == nullptr ? "a dict without \"loss\"" : type_name(loss->type),
                           loss != nullptr && loss->type == STG_TENSOR ? " of shape " + shape_text(loss->as.tensor->view) : "");
  }
  TensorPtr tensor(loss->as.tensor);
  *loss = {};
  kept_.push_back({make_tree(Value(std::move(tensor))), outcome.total_weight()});
}

double TrainingLoss::flush(size_t num_last) {
  WeightedMean last;
  // One that fails to be read is not read again.
  std::vector<Kept> kept = std::exchange(kept_, {});
  num_read_ += kept.size();
  for (size_t i = 0; i < kept.size(); ++i) {
    const Tree loss = here(strategy_, std::move(kept[i].loss));
    const double value = read_element(loss.root().as.tensor->view, 0);
    epoch.add(value, kept[i].weight);
    if (i + num_last >= kept.size()) last.add(value, kept[i].weight);
  }
  return last.mean();
}

void EvaluationMetrics::add(StepOutcome outcome) {
  const Tree outputs = here(strategy_, std::move(outcome.outputs));
  const stg_value& root = outputs.root();
  if (root.type != STG_DICT) return add_entry("loss", root, outcome.weights);
  for (uint32_t i = 0; i < root.count; ++i) {
    add_entry(std::string(text_of(root.as.entries[i].key)), root.as.entries[i].value, outcome.weights);
  }
}

void EvaluationMetrics::add_entry(const std::string& name, const stg_value& value, const std::vector<double>& weights) {
  if (value.type == STG_NONE) return;
  const auto numbers = numbers_of(value, weights.size());
  if (!numbers) {
    others_.insert(name);
  } else if (numbers->size() == weights.size()) {
    for (size_t i = 0; i < weights.size(); ++i) metrics_[name].add((*numbers)[i], weights[i]);
  } else {
    metrics_[name].add(numbers->front(), std::accumulate(weights.begin(), weights.end(), 0.0));
  }
}

std::map<std::string, double> EvaluationMetrics::means() const {
  std::map<std::string, double> means;
  for (const auto& [name, metric] : metrics_) {
    if (!others_.contains(name)) means[name] = metric.mean();
  }
  return means;
}

}  // namespace stratagem
