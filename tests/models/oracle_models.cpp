// SPDX-License-Identifier: Apache-2.0
//
// The networks of tests/oracle/models.py as a C++ author writes them, with the same parameter names: option "network" says which. Each is
// made of torch::nn's modules, while the Python side uses torch.nn's: two implementations that must give one gradient.
//
// Batches: "inputs", float, (rows, 12) for mlp, (rows, 8, 8) for the two cnn, (rows, 6, 8) for lstm and transformer, int64 (rows, 5) for
// embedding; "targets", float (rows, 2) for lstm (squared error), else int64 (rows), 0 to 3 (cross entropy).
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include <functional>
#include <memory>

#include "model/torch_model.hpp"

namespace {

using stratagem::Batch;
using stratagem::StepContext;
using stratagem::StepOutput;
using torch::nn::Linear;

constexpr int64_t num_classes = 4;

// As Python's nn.Linear. The C++ one adds the bias to what is already rounded, where there are more than two dimensions: 2 % of a gradient
// in bfloat16.
at::Tensor affine(const Linear& linear, const at::Tensor& x) { return at::linear(x, linear->weight, linear->bias); }

// Python's nn.TransformerEncoderLayer, on the operators that it uses: the C++ one has another attention.
class SelfAttention : public torch::nn::Module {
 public:
  SelfAttention(int64_t size, int64_t num_heads, double dropout)
      : num_heads_(num_heads),
        dropout_(dropout),
        in_weight_(register_parameter("in_proj_weight", at::empty({3 * size, size}).uniform_(-0.5, 0.5))),
        in_bias_(register_parameter("in_proj_bias", at::zeros({3 * size}))),
        out_(register_module("out_proj", Linear(size, size))) {}

  at::Tensor forward(const at::Tensor& x) {  // (sequence, rows, features)
    const int64_t length = x.size(0);
    const int64_t rows = x.size(1);
    const int64_t size = x.size(2);
    const at::Tensor in = at::linear(x, in_weight_, in_bias_)
                              .view({length, rows, 3, size})
                              .permute({2, 0, 1, 3})
                              .contiguous()
                              .view({3, length, rows * num_heads_, size / num_heads_})
                              .transpose(1, 2)
                              .view({3, rows, num_heads_, length, size / num_heads_});
    const double dropout = is_training() ? dropout_ : 0.0;
    const at::Tensor joined = at::scaled_dot_product_attention(in[0], in[1], in[2], {}, dropout).permute({2, 0, 1, 3});
    return affine(out_, joined.reshape({length * rows, size})).view({length, rows, size});
  }

 private:
  int64_t num_heads_;
  double dropout_;
  at::Tensor in_weight_;
  at::Tensor in_bias_;
  Linear out_;
};

class EncoderLayer : public torch::nn::Module {
 public:
  EncoderLayer(int64_t size, int64_t num_heads, int64_t num_hidden, double dropout)
      : dropout_(dropout),
        attention_(register_module("self_attn", std::make_shared<SelfAttention>(size, num_heads, dropout))),
        linear1_(register_module("linear1", Linear(size, num_hidden))),
        linear2_(register_module("linear2", Linear(num_hidden, size))),
        norm1_(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({size})))),
        norm2_(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({size})))) {}

  at::Tensor forward(const at::Tensor& inputs) {
    const at::Tensor x = norm1_->forward(inputs + drop(attention_->forward(inputs)));
    return norm2_->forward(x + drop(affine(linear2_, drop(at::gelu(affine(linear1_, x))))));
  }

 private:
  at::Tensor drop(const at::Tensor& x) const { return at::dropout(x, dropout_, is_training()); }

  double dropout_;
  std::shared_ptr<SelfAttention> attention_;
  Linear linear1_;
  Linear linear2_;
  torch::nn::LayerNorm norm1_;
  torch::nn::LayerNorm norm2_;
};

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
    auto layer = register_module("layer", std::make_shared<EncoderLayer>(8, 2, 16, dropout));
    auto linear2 = register_module("linear2", Linear(8, num_classes));
    return [=](const at::Tensor& x) mutable {  // the layer takes (sequence, rows, features)
      return affine(linear2, layer->forward(affine(linear1, x).transpose(0, 1)).mean(0));
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
