// SPDX-License-Identifier: Apache-2.0
//
// The model whose every step can be worked out by hand: "linear.weight", (1, size), all `weight` to begin with; the loss of a sample is
// its product with the weight, so the gradient is the mean (or sum) of the samples.
//
// Batches: "inputs", float (rows) or (rows, size); "mask", optional, one number per row: the loss is then over the kept rows, and the
// step reports their number.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "base/error.hpp"
#include "model/tensor_model.hpp"

namespace {

using stratagem::Batch;
using stratagem::StepContext;
using stratagem::StepOutput;

class ToyLinear : public stratagem::TensorModel {
 public:
  explicit ToyLinear(const nlohmann::json& options)
      : size_(options.value("size", int64_t{1})),
        is_sum_(options.value("loss", std::string("mean")) == "sum"),
        weight_(register_parameter("linear.weight", at::full({1, size_}, options.value("weight", 0.0), at::kFloat))) {}

  static stratagem::ModelInfo info() {
    return {"one weight vector, loss linear in it", R"({
      "type": "object",
      "properties": {
        "size": {"type": "integer", "minimum": 1, "default": 1},
        "weight": {"type": "number", "default": 0, "description": "what every weight is to begin with"},
        "loss": {"enum": ["mean", "sum"], "default": "mean"}
      },
      "additionalProperties": false
    })"};
  }

  uint64_t loss_kind() const override { return is_sum_ ? STG_LOSS_SUM : STG_LOSS_MEAN; }

  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor losses = products(batch);
    if (batch.contains("mask")) {
      const at::Tensor mask = batch["mask"].tensor().to(losses.scalar_type());
      const at::Tensor kept = mask.sum();
      return StepOutput{{"loss", losses.mul(mask).sum().div(kept)}}.over(kept);
    }
    return {{"loss", is_sum_ ? losses.sum() : losses.mean()}};
  }

  StepOutput validation_step(const Batch& batch, const StepContext& context) override { return training_step(batch, context); }

  StepOutput predict_step(const Batch& batch, const StepContext&) override { return products(batch); }

 private:
  at::Tensor products(const Batch& batch) const {
    at::Tensor inputs = batch["inputs"].tensor();
    if (inputs.dim() == 1) inputs = inputs.unsqueeze(1);
    if (inputs.dim() != 2 || inputs.size(1) != size_) {
      throw stratagem::invalid_argument("batch[\"inputs\"] has the shape ", c10::str(inputs.sizes()), "; expected (rows, ", size_,
                                        ")");
    }
    return inputs.matmul(weight_.t()).squeeze(1);
  }

  int64_t size_;
  bool is_sum_;
  at::Tensor weight_;
};

}  // namespace

STRATAGEM_MODEL_PLUGIN("toy_linear", "1.0.0", ToyLinear);
