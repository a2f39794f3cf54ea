// SPDX-License-Identifier: Apache-2.0
// A whole model library: one linear layer on images, by batches of {"inputs": uint8 (N, ...), "targets": int64 (N)}.
#include <ATen/ops/cross_entropy_loss.h>
#include <torch/nn/modules/linear.h>

#include "model/torch_model.hpp"

using stratagem::Batch;
using stratagem::StepContext;
using stratagem::StepOutput;

class SoftmaxRegression : public stratagem::TorchModel {
 public:
  explicit SoftmaxRegression(const nlohmann::json& options)
      : linear_(register_module("linear", torch::nn::Linear(options.value("pixels", 784), options.value("classes", 10)))) {}

  static stratagem::ModelInfo info() {
    return {"one linear layer on images", R"({
      "type": "object",
      "properties": { "pixels": {"type": "integer", "minimum": 1}, "classes": {"type": "integer", "minimum": 2} },
      "additionalProperties": false
    })"};
  }

  StepOutput training_step(const Batch& batch, const StepContext&) override {
    return at::cross_entropy_loss(logits(batch), batch["targets"].tensor());
  }

  StepOutput validation_step(const Batch& batch, const StepContext&) override {
    const at::Tensor predicted = logits(batch);
    const at::Tensor correct = predicted.argmax(1).eq(batch["targets"].tensor());
    return {{"loss", at::cross_entropy_loss(predicted, batch["targets"].tensor())}, {"accuracy", correct.to(at::kFloat).mean()}};
  }

 private:
  at::Tensor logits(const Batch& batch) {
    const at::Tensor pixels = batch["inputs"].tensor().flatten(1).to(linear_->weight.scalar_type());
    return linear_->forward(pixels / 255);
  }

  torch::nn::Linear linear_;
};

STRATAGEM_MODEL_PLUGIN("softmax_regression", "1.0.0", SoftmaxRegression);
