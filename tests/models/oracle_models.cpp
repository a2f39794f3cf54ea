// SPDX-License-Identifier: Apache-2.0
//
// The networks of tests/oracle/models.py as a C++ author writes them, with the same parameter names: option "network" says which. Each is
// made of torch::nn's modules, while the Python side uses torch.nn's: two implementations that must give one gradient.
//
// Batches: "inputs", float, (rows, 12) for mlp, (rows, 8, 8) for the two cnn, (rows, 6, 8) for lstm and transformer, int64 (rows, 5) for
// embedding; "targets", float (rows, 2) for lstm (squared error), else int64 (rows), 0 to 3 (cross entropy).
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tanh.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformerlayer.h>

#include <functional>

#include "model/torch_model.hpp"

namespace {

using stratagem::Batch;
using stratagem::StepContext;
using stratagem::StepOutput;
using torch::nn::Linear;

constexpr int64_t num_classes = 4;

class OracleModel : public stratagem::TorchModel {
 public:
  explicit OracleModel(const nlohmann::json& options) {
    const auto network = options.at("network").get<std::string>();
    const double dropout = options.value("dropout", 0.0);
    if (network == "mlp") forward_ = mlp();
    if (network == "cnn") forward_ = cnn();
    if (network == "batch_norm") forward_ = batch_norm();
    if (network == "lstm") forward_ = lstm();
    if (network == "transformer") forward_ = transformer(dropout);
    if (network == "embedding") forward_ = embedding(options.value("sparse", false));
  }

  static stratagem::ModelInfo info() {
    return {"six small networks, for comparison with PyTorch", R"({
      "type": "object",
      "required": ["network"],
      "properties": {
        "network": {"enum": ["mlp", "cnn", "batch_norm", "lstm", "transformer", "embedding"]},
        "dropout": {"type": "number", "minimum": 0, "maximum": 1, "default": 0, "description": "of the transformer"},
        "sparse": {"type": "boolean", "default": false, "description": "the embedding's gradient is sparse"}
      },
      "additionalProperties": false
    })"};
  }

  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor targets = batch["targets"].tensor();
    const at::Tensor predicted = forward_(batch["inputs"].tensor());
    return targets.is_floating_point() ? at::mse_loss(predicted, targets) : at::cross_entropy_loss(predicted, targets);
  }

  StepOutput validation_step(const Batch& batch, const StepContext& context) override {
    return {{"loss", training_step(batch, context).outputs}};
  }

  StepOutput predict_step(const Batch& batch, const StepContext&) override { return forward_(batch["inputs"].tensor()); }

 private:
  using Forward = std::function<at::Tensor(const at::Tensor& inputs)>;

  Forward mlp() {
    auto linear1 = register_module("linear1", Linear(12, 16));
    auto linear2 = register_module("linear2", Linear(16, num_classes));
    return [=](const at::Tensor& x) mutable { return linear2->forward(at::tanh(linear1->forward(x))); };
  }

  Forward cnn() {
    auto conv1 = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).padding(1)));
    auto conv2 = register_module("conv2", torch::nn::Conv2d(4, 6, 3));
    auto linear = register_module("linear", Linear(6 * 4, num_classes));
    return [=](const at::Tensor& x) mutable {
      const at::Tensor pooled = at::max_pool2d(at::relu(conv1->forward(x.unsqueeze(1))), 2);
      return linear->forward(at::gelu(conv2->forward(pooled)).flatten(1));
    };
  }

  Forward batch_norm() {
    auto conv1 = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).bias(false)));
    auto norm1 = register_module("norm1", torch::nn::BatchNorm2d(4));
    auto conv2 = register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 6, 3).bias(false)));
    auto norm2 = register_module("norm2", torch::nn::BatchNorm2d(6));
    auto linear = register_module("linear", Linear(6 * 4 * 4, num_classes));
    return [=](const at::Tensor& x) mutable {
      const at::Tensor hidden = at::gelu(norm1->forward(conv1->forward(x.unsqueeze(1))));
      return linear->forward(at::gelu(norm2->forward(conv2->forward(hidden))).flatten(1));
    };
  }

  Forward lstm() {
    auto lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(8, 10).num_layers(2).batch_first(true)));
    auto linear = register_module("linear", Linear(10, 2));
    return [=](const at::Tensor& x) mutable { return linear->forward(std::get<0>(lstm->forward(x)).select(1, -1)); };
  }

  Forward transformer(double dropout) {
    auto linear1 = register_module("linear1", Linear(8, 8));
    auto layer = register_module(
        "layer",
        torch::nn::TransformerEncoderLayer(
            torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(dropout).activation(torch::kGELU)));
    auto linear2 = register_module("linear2", Linear(8, num_classes));
    return [=](const at::Tensor& x) mutable {  // the layer takes (sequence, rows, features)
      return linear2->forward(layer->forward(linear1->forward(x).transpose(0, 1)).mean(0));
    };
  }

  Forward embedding(bool is_sparse) {
    auto embedding = register_module("embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(30, 8).sparse(is_sparse)));
    auto linear = register_module("linear", Linear(8, num_classes));
    return [=](const at::Tensor& x) mutable { return linear->forward(at::tanh(embedding->forward(x)).mean(1)); };
  }

  Forward forward_;
};

}  // namespace

STRATAGEM_MODEL_PLUGIN("oracle_models", "1.0.0", OracleModel);
