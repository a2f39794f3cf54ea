// SPDX-License-Identifier: Apache-2.0
//
// A small convolutional network for 28x28 grey images in ten classes (Fashion-MNIST, MNIST).
//
// Batches: "inputs", uint8 (rows, 28, 28), 0 to 255; "targets", int64 (rows), 0 to 9 (not for predict).
// Outputs: training "loss"; validation and test "loss" and "accuracy"; predict the logits (rows, 10).
//
// No batch norm and no dropout: replicas on any number of devices give the gradient of one. Images are laid out with channels last and
// pooled before the activation, which halves the time of a step on a CPU.
#include <ATen/ops/aminmax.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/relu.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "base/error.hpp"
#include "model/torch_model.hpp"

namespace {

using stratagem::Batch;
using stratagem::StepContext;
using stratagem::StepOutput;

constexpr int64_t image_size = 28;
constexpr int64_t num_classes = 10;
constexpr int64_t pooled_size = 7;  // 28 -> 14 -> 7

class FashionCnn : public stratagem::TorchModel {
 public:
  explicit FashionCnn(const nlohmann::json& options) {
    const auto channels = options.value("channels", int64_t{32});
    conv1_ = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, channels, 3).padding(1)));
    conv2_ = register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(channels, 2 * channels, 3).padding(1)));
    linear1_ = register_module("linear1", torch::nn::Linear(2 * channels * pooled_size * pooled_size, 4 * channels));
    linear2_ = register_module("linear2", torch::nn::Linear(4 * channels, num_classes));
    initialise(conv1_->weight, conv1_->bias);
    initialise(conv2_->weight, conv2_->bias);
    initialise(linear1_->weight, linear1_->bias);
  }

  static stratagem::ModelInfo info() {
    return {"convolutional network for 28x28 grey images in ten classes", R"({
      "type": "object",
      "properties": {
        "channels": {
          "type": "integer", "minimum": 1, "maximum": 1024, "default": 32,
          "description": "channels of the first convolution; the second has twice as many"
        }
      },
      "additionalProperties": false
    })"};
  }

  StepOutput training_step(const Batch& batch, const StepContext&) override {
    return {{"loss", at::cross_entropy_loss(logits(batch), targets(batch))}};
  }

  StepOutput validation_step(const Batch& batch, const StepContext&) override {
    const at::Tensor predicted = logits(batch);
    const at::Tensor expected = targets(batch);
    return {{"loss", at::cross_entropy_loss(predicted, expected)},
            {"accuracy", predicted.argmax(1).eq(expected).to(at::kFloat).mean()}};
  }

  StepOutput predict_step(const Batch& batch, const StepContext&) override { return logits(batch); }

 private:
  // He's, for layers before a ReLU: LibTorch's own begins with activations so small that the first epoch is spent on their growth
  // (84.5 instead of 88.7 % after two).
  static void initialise(at::Tensor& weight, at::Tensor& bias) {
    torch::nn::init::kaiming_normal_(weight);
    torch::nn::init::zeros_(bias);
  }

  at::Tensor logits(const Batch& batch) {
    const at::Tensor images = batch["inputs"].tensor(at::kByte, {-1, image_size, image_size});
    const auto options = at::TensorOptions().dtype(conv1_->weight.scalar_type());
    at::Tensor x = images.unsqueeze(1).to(options, false, false, at::MemoryFormat::ChannelsLast).div(255);
    x = at::relu(at::max_pool2d(conv1_->forward(x), 2));
    x = at::relu(at::max_pool2d(conv2_->forward(x), 2));
    return linear2_->forward(at::relu(linear1_->forward(x.flatten(1))));
  }

  // The loss would end the process of a GPU for a label out of range, so labels are looked at first.
  static at::Tensor targets(const Batch& batch) {
    const Batch place = batch["targets"];
    const at::Tensor labels = place.tensor(at::kLong, {batch["inputs"].tensor().size(0)});
    if (labels.numel() == 0) return labels;
    const auto [low, high] = at::aminmax(labels);
    if (low.item<int64_t>() < 0 || high.item<int64_t>() >= num_classes) refuse_label(labels, place.path());
    return labels;
  }

  [[noreturn]] static void refuse_label(const at::Tensor& labels, const std::string& path) {
    const int64_t row = labels.lt(0).logical_or(labels.ge(num_classes)).nonzero()[0].item<int64_t>();
    throw stratagem::invalid_argument(path, " has the label ", labels[row].item<int64_t>(), " in row ", row, "; labels are 0 to ",
                                      num_classes - 1);
  }

  torch::nn::Conv2d conv1_{nullptr};
  torch::nn::Conv2d conv2_{nullptr};
  torch::nn::Linear linear1_{nullptr};
  torch::nn::Linear linear2_{nullptr};
};

}  // namespace

STRATAGEM_MODEL_PLUGIN("fashion_cnn", "1.0.0", FashionCnn);
