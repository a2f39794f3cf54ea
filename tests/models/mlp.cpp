// SPDX-License-Identifier: Apache-2.0
//
// A multilayer perceptron with what a model can have and a strategy must get right, each by an option: ties, buffers, dropout, frozen and
// unused parameters, and faults.
//
// Batches: "inputs", float (rows, sizes[0]); "targets", int64 (rows) for cross entropy or float (rows, last size) for squared error.
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <stdexcept>

#include "base/error.hpp"
#include "model/tensor_model.hpp"

namespace {

using stratagem::Batch;
using stratagem::StepContext;
using stratagem::StepOutput;

class Mlp : public stratagem::TensorModel {
 public:
  explicit Mlp(const nlohmann::json& options)
      : activation_(options.value("activation", std::string("relu"))),
        dropout_(options.value("dropout", 0.0)),
        is_sum_(options.value("loss", std::string("mean")) == "sum"),
        fault_(options.value("fault", std::string("none"))),
        fault_replica_(options.value("fault_replica", int64_t{0})),
        fault_step_(options.value("fault_step", int64_t{-1})) {
    const auto sizes = options.value("sizes", std::vector<int64_t>{4, 8, 3});
    const bool is_tied = options.value("tied", false);
    const bool is_frozen = options.value("frozen", false);
    for (size_t i = 0; i + 1 < sizes.size(); ++i) add_layer(i, sizes[i], sizes[i + 1], is_tied, is_frozen && i == 0);
    if (options.value("unused", false)) register_parameter("unused.weight", at::zeros({3}));
    if (options.value("shapeless", false)) register_parameter("shapeless.weight", at::Tensor());
    if (options.value("buffers", false)) {
      calls_ = register_buffer("calls", at::zeros({}, at::kLong));
      mean_ = register_buffer("running_mean", at::zeros({sizes.front()}));
      register_buffer("scratch", at::zeros({2}), /*persistent=*/false);
    }
  }

  static stratagem::ModelInfo info() {
    return {"multilayer perceptron for tests", R"({
      "type": "object",
      "properties": {
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 2, "default": [4, 8, 3]},
        "activation": {"enum": ["relu", "tanh", "none"], "default": "relu"},
        "loss": {"enum": ["mean", "sum"], "default": "mean"},
        "dropout": {"type": "number", "minimum": 0, "maximum": 1, "default": 0},
        "tied": {"type": "boolean", "default": false, "description": "neighbouring layers of one shape share their weight"},
        "frozen": {"type": "boolean", "default": false, "description": "the first layer's bias is frozen"},
        "unused": {"type": "boolean", "default": false, "description": "a parameter that no step uses"},
        "shapeless": {"type": "boolean", "default": false, "description": "a parameter without a shape"},
        "buffers": {"type": "boolean", "default": false, "description": "calls, running_mean, and scratch, which is not persistent"},
        "fault": {"enum": ["none", "runtime_error", "c10_error", "int", "nan"], "default": "none"},
        "fault_replica": {"type": "integer", "default": 0},
        "fault_step": {"type": "integer", "default": -1, "description": "global step; -1: in each"}
      },
      "additionalProperties": false
    })"};
  }

  uint64_t loss_kind() const override { return is_sum_ ? STG_LOSS_SUM : STG_LOSS_MEAN; }

  StepOutput training_step(const Batch& batch, const StepContext& context) override {
    const at::Tensor value = loss(forward(batch), batch);
    return {{"loss", add_fault(value, context)}};
  }

  StepOutput validation_step(const Batch& batch, const StepContext& context) override {
    const at::Tensor predicted = forward(batch);
    const at::Tensor value = add_fault(loss(predicted, batch), context);
    const at::Tensor targets = batch["targets"].tensor();
    if (!is_classes(targets)) return {{"loss", value}};
    return {{"loss", value}, {"accuracy", predicted.argmax(1).eq(targets).to(at::kFloat).mean()}};
  }

  StepOutput predict_step(const Batch& batch, const StepContext&) override { return forward(batch); }

 private:
  struct Layer {
    at::Tensor weight;
    at::Tensor bias;
  };

  void add_layer(size_t index, int64_t num_inputs, int64_t num_outputs, bool is_tied, bool is_frozen) {
    const std::string name = "layer" + std::to_string(index);
    const double bound = 1 / std::sqrt(static_cast<double>(num_inputs));
    const bool has_tie =
        is_tied && !layers_.empty() && layers_.back().weight.sizes() == at::IntArrayRef({num_outputs, num_inputs});
    const at::Tensor weight = has_tie ? layers_.back().weight : at::empty({num_outputs, num_inputs}).uniform_(-bound, bound);
    layers_.push_back({register_parameter(name + ".weight", weight),
                       register_parameter(name + ".bias", at::empty({num_outputs}).uniform_(-bound, bound), !is_frozen)});
  }

  at::Tensor forward(const Batch& batch) {
    at::Tensor x = batch["inputs"].tensor();
    if (mean_.defined() && is_training()) {
      calls_.add_(1);
      mean_.mul_(0.9).add_(x.detach().mean(0), 0.1);
    }
    for (size_t i = 0; i < layers_.size(); ++i) {
      x = at::linear(x, layers_[i].weight, layers_[i].bias);
      if (i + 1 == layers_.size()) break;
      if (activation_ != "none") x = activation_ == "tanh" ? at::tanh(x) : at::relu(x);
      if (dropout_ > 0) x = at::dropout(x, dropout_, is_training());
    }
    return x;
  }

  static bool is_classes(const at::Tensor& targets) { return targets.scalar_type() == at::kLong; }

  at::Tensor loss(const at::Tensor& predicted, const Batch& batch) const {
    const at::Tensor targets = batch["targets"].tensor();
    const auto reduction = is_sum_ ? at::Reduction::Sum : at::Reduction::Mean;
    if (is_classes(targets)) return at::cross_entropy_loss(predicted, targets, {}, reduction);
    return at::mse_loss(predicted, targets, reduction);
  }

  at::Tensor add_fault(const at::Tensor& value, const StepContext& context) const {
    if (context.replica != fault_replica_ || (fault_step_ >= 0 && context.global_step != fault_step_)) return value;
    if (fault_ == "runtime_error") throw std::runtime_error("this replica was told to fail");
    if (fault_ == "c10_error") TORCH_CHECK(false, "this replica was told to fail in LibTorch");
    if (fault_ == "int") throw 42;
    return fault_ == "nan" ? value.mul(std::nan("")) : value;
  }

  std::string activation_;
  double dropout_;
  bool is_sum_;
  std::string fault_;
  int64_t fault_replica_;
  int64_t fault_step_;
  std::vector<Layer> layers_;
  at::Tensor calls_;
  at::Tensor mean_;
};

}  // namespace

STRATAGEM_MODEL_PLUGIN("mlp", "1.0.0", Mlp);
