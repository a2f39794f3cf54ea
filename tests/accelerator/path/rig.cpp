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
#include <time.h>

#include <algorithm>
#include <cmath>

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

uint64_t in_ms(uint64_t milliseconds) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec) + milliseconds * 1'000'000u;
}

namespace {

struct Clipped {
  stg_update_args update = sized<stg_update_args>();
  Clipped() {
    update.lr = 0.05;
    update.clip = STG_CLIP_NORM;
    update.clip_limit = 0.5;
  }
};

stg_error* train_clipped(Instance& instance, const stg_call* call, stg_step_args args) {
  const Clipped clipped;
  args.update = &clipped.update;
  args.flags = STG_BATCH_LAST_MICRO_BATCH;
  stg_step_result result = sized<stg_step_result>();
  stg_error* error = instance.api.train_batch(instance.self, call, &args, &result, nullptr);
  const Tree outputs{result.outputs};
  return error;
}

}  // namespace

stg_error* train_until(Instance& instance, uint64_t deadline_ns) {
  Tree batch = net_batch(8, 5);
  stg_call call = sized<stg_call>();
  call.deadline_ns = deadline_ns;
  stg_step_args args = sized<stg_step_args>();
  args.batch = batch.argument();
  return train_clipped(instance, &call, args);
}

uint64_t announce(Instance& instance, Tree batch) {
  stg_transfer_args transfer = sized<stg_transfer_args>();
  transfer.batch = batch.argument();
  transfer.device = {STG_DEVICE_NONE, -1};
  uint64_t ticket = 0;
  check(instance.api.announce_batch(instance.self, nullptr, &transfer, STG_STAGE_FIT, &ticket));
  return ticket;
}

void train_announced(Instance& instance, uint64_t ticket) {
  stg_step_args args = sized<stg_step_args>();
  args.announced = ticket;
  check(train_clipped(instance, nullptr, args));
}

}  // namespace stratagem::test
