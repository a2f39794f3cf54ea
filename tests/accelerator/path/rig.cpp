// SPDX-License-Identifier: Apache-2.0
#include "accelerator/path/rig.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "support/plugin.hpp"

namespace stratagem::test {

Net::Net(const nlohmann::json& options)
    : w1_(register_parameter("w1", at::randn({5, 6}))),
      b1_(register_parameter("b1", at::zeros({5}))),
      w2_(register_parameter("w2", at::randn({3, 5}))),
      b2_(register_parameter("b2", at::zeros({3}))),
      has_norm_(options.value("norm", false)) {
  if (has_norm_) {
    mean_ = register_buffer("mean", at::zeros({5}));
    variance_ = register_buffer("variance", at::ones({5}));
  }
  if (options.value("unused", false)) register_parameter("unused", at::ones({4}));
}

at::Tensor Net::forward(const at::Tensor& x) {
  at::Tensor hidden = at::linear(x, w1_, b1_);
  if (has_norm_) hidden = at::batch_norm(hidden, {}, {}, mean_, variance_, is_training(), 0.1, 1e-5, false);
  return at::linear(at::gelu(hidden), w2_, b2_);
}

StepOutput Net::training_step(const Batch& batch, const StepContext&) {
  return at::mse_loss(forward(batch["x"].tensor()), batch["y"].tensor());
}

StepOutput Net::validation_step(const Batch& batch, const StepContext&) {
  const at::Tensor out = forward(batch["x"].tensor());
  return TensorTree(TensorTree::Dict{{"loss", TensorTree(at::mse_loss(out, batch["y"].tensor()))}, {"out", TensorTree(out)}});
}

StepOutput Net::predict_step(const Batch& batch, const StepContext&) { return forward(batch["x"].tensor()); }

Tree net_batch(int64_t num_rows, int64_t index, at::ScalarType dtype) {
  const auto numbers = [&](int64_t columns) {
    return at::arange(num_rows * columns, at::kDouble)
        .add(static_cast<double>(31 * index))
        .sin()
        .view({num_rows, columns})
        .to(dtype);
  };
  Dict dict;
  dict.emplace_back("x", to_dlpack(numbers(6)));
  dict.emplace_back("y", to_dlpack(numbers(3)));
  return make_tree(std::move(dict));
}

std::unique_ptr<Instance> on_emulated(const std::string& strategy, const std::string& devices, const std::string& more,
                                      uint64_t flags) {
  const stg_plugin& plugin = load_plugin(EMULATED_PLUGINS "/emulated_" + strategy + ".so");
  return std::make_unique<Instance>(strategy_api(plugin, strategy),
                                    concat(R"({"accelerator": "emulated", "devices": )", devices, more, "}"), nullptr, flags);
}

std::unique_ptr<Instance> on_cpu(const std::string& strategy, size_t num_devices, const std::string& more) {
  return std::make_unique<Instance>(
      strategy, concat(R"({"accelerator": "cpu", "threads": )", num_devices, R"(, "devices": )", num_devices, more, "}"));
}

Tree on_host(Instance& instance, Tree tree) {
  stg_tree out{};
  check(instance.api.to_host(instance.self, nullptr, tree.argument(), &out));
  return Tree{out};
}

double loss_of(Instance& instance, StepOutcome step) {
  step.outputs = on_host(instance, std::move(step.outputs));
  return step.loss();
}

double distance(const Tree& a, const Tree& b, const char* part) {
  const stg_value* mine = find(a.root(), part);
  const stg_value* its = find(b.root(), part);
  std::vector<double> values, others;
  const auto collect = [](const stg_value& root, std::vector<double>& to) {
    for_each_leaf(root, [&](const KeyPath&, const stg_value& leaf) {
      if (leaf.type != STG_TENSOR) return;
      for (int64_t i = 0; i < numel(leaf.as.tensor->view); ++i) to.push_back(read_element(leaf.as.tensor->view, i));
    });
  };
  collect(*mine, values);
  collect(*its, others);
  if (values.size() != others.size() || values.empty()) return std::nan("");
  double largest = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double one = std::fabs(values[i] - others[i]) / std::max(1.0, std::fabs(others[i]));
    if (!(one <= largest)) largest = one;  // NaN, too
  }
  return largest;
}

void begin_emulation() {
  emulated::drain();
  emulated::take_reports();
  emulated::set_delays(1, std::chrono::microseconds(0));
  emulated::release_ranks();
  emulated::heal();
  emulated::fail_transport_call(0, "");
  leave_out("");
  take_places();
}

std::string reports() {
  std::string all;
  for (const std::string& report : emulated::take_reports()) all += report + "\n";
  return all;
}

}  // namespace stratagem::test
