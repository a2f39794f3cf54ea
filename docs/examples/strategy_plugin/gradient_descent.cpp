// SPDX-License-Identifier: Apache-2.0
// A whole strategy plugin: one replica on the CPU, plain gradient descent.
#include <base/dlpack.hpp>
#include <base/strategy.hpp>

using namespace stratagem;

class GradientDescent : public Strategy {
 public:
  static StrategyInfo info() {
    return {"one replica on the cpu, plain gradient descent", R"({"type": "object", "additionalProperties": false})", {STG_DEVICE_CPU}};
  }

  explicit GradientDescent(const CreateArgs& args) : seed_(args.config.value("seed", uint64_t{0})) {}

  const std::vector<stg_device>& devices() const override { return devices_; }

  void setup(const Call&, Model model, Tree, uint32_t) override {
    stg_replicate_args args{};
    args.device = devices_.front();
    args.num_replicas = 1;
    args.seed = seed_;
    replica_ = Replica(std::move(model), args);
    gradients_.resize(replica_.describe().num_parameters);
  }

  void teardown(const Call&) override {
    graph_.reset();
    gradients_.clear();
    replica_ = {};
  }

  StepResult training_step(const Call&, StepArgs args) override {
    replica_.set_mode(true);
    stg_step_context context{};
    context.device = devices_.front();
    context.num_replicas = 1;
    context.flags = STG_STEP_GRADIENT;
    context.batch_index = args.batch_index;
    ModelStep step = replica_.step(context, std::move(args.batch));
    graph_ = std::move(step.graph);
    return {std::move(step.outputs), {1.0}};
  }

  void backward(const Call&, uint64_t) override {
    replica_.backward(std::move(graph_), 1.0,
                      [this](uint64_t index, TensorPtr gradient) { gradients_[index] = std::move(gradient); });
  }

  UpdateResult optimizer_step(const Call&, const stg_update_args& update) override {
    const stg_model_description model = replica_.describe();
    for (uint64_t i = 0; i < model.num_parameters; ++i) {
      const stg_tensor_view& weight = model.parameters[i]->tensor->view;
      if (!same_dtype(weight.dtype, float32)) throw unimplemented("parameter ", i, " is ", dtype_name(weight.dtype), ", not float32");
      for (int64_t j = 0; gradients_[i] != nullptr && j < numel(weight); ++j) {
        first_element<float>(weight)[j] -= static_cast<float>(update.lr * read_element(gradients_[i]->view, j));
      }
      gradients_[i].reset();
    }
    UpdateResult result;
    result.outcome = STG_UPDATE_DONE;
    return result;
  }

 private:
  uint64_t seed_;
  std::vector<stg_device> devices_{{STG_DEVICE_CPU, 0}};
  Replica replica_;
  GraphPtr graph_;
  std::vector<TensorPtr> gradients_;
};

STRATAGEM_STRATEGY_PLUGIN("gradient_descent", "1.0.0", GradientDescent);
