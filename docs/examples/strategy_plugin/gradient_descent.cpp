// SPDX-License-Identifier: Apache-2.0
// A whole strategy plugin: one replica on the CPU, plain gradient descent. What it doesn't have it refuses in words.
#include <base/dlpack.hpp>
#include <base/strategy.hpp>

using namespace nlohmann::literals;
using namespace stratagem;

class GradientDescent : public Strategy {
 public:
  static StrategyInfo info() {
    return {"one replica on the cpu, plain gradient descent",
            R"({"type": "object", "additionalProperties": false})",
            {STG_DEVICE_CPU}};
  }

  explicit GradientDescent(const CreateArgs& args) : seed_(args.config.value("seed", uint64_t{0})) {
    nlohmann::json config = args.config;
    if (config.contains("/optimizer/lr"_json_pointer)) config["optimizer"].erase("lr");  // comes with each update
    const nlohmann::json only{{"accelerator", "cpu"}, {"devices", 1}, {"precision", "32-true"}, {"optimizer", {{"name", "sgd"}}}};
    for (const auto& [key, value] : only.items()) {
      if (config.value(key, value) != value) throw unimplemented("config at /", key, ": this strategy has only ", value.dump());
    }
  }

  const std::vector<stg_device>& devices() const override { return devices_; }

  void setup(const Call&, Model model, Tree state, uint32_t) override {
    if (state.root().type != STG_NONE) throw unimplemented("this strategy can't begin from a state");
    if (!model) throw unimplemented("this strategy needs a model");
    stg_replicate_args args{};
    args.device = devices_.front();
    args.num_replicas = 1;
    args.seed = seed_;
    Replica replica(std::move(model), args);
    const stg_model_description made = replica.describe();
    for (uint64_t i = 0; i < made.num_parameters; ++i) {
      const stg_tensor_view& weight = made.parameters[i]->tensor->view;
      if ((made.parameters[i]->flags & STG_PARAMETER_PINNED) == 0 || !same_dtype(weight.dtype, float32) ||
          !is_contiguous(weight)) {
        throw unimplemented("parameter ", i, " is no row-major float32 tensor that may be written in place");
      }
    }
    replica_ = std::move(replica);
  }

  void teardown(const Call&) override {
    graph_.reset();
    gradients_.clear();
    replica_ = {};
  }

  StepResult training_step(const Call&, StepArgs args) override {
    if (!gradients_.empty()) throw unimplemented("this strategy takes one micro-batch for each update");
    if (args.batch.borrowed()) args.batch = copy_tree(args.batch.root());  // the graph reads it until backward
    double rows = 1;
    for_each_leaf(args.batch.root(), [&](const KeyPath&, stg_value& leaf) {
      if (leaf.type == STG_TENSOR && leaf.as.tensor->view.num_dims > 0) rows = static_cast<double>(leaf.as.tensor->view.shape[0]);
    });
    replica_.set_mode(true);
    stg_step_context context{};
    context.device = devices_.front();
    context.num_replicas = 1;
    context.flags = STG_STEP_GRADIENT | ((args.flags & STG_BATCH_DETECT_ANOMALY) != 0 ? STG_STEP_DETECT_ANOMALY : 0);
    context.batch_index = args.batch_index;
    context.global_step = args.global_step;
    ModelStep step = replica_.step(context, std::move(args.batch));
    if (step.denominator.type != STG_NONE) throw unimplemented("this strategy takes no denominators");
    graph_ = std::move(step.graph);
    return {std::move(step.outputs), {rows}};
  }

  void backward(const Call&, uint64_t) override {
    const stg_model_description model = replica_.describe();
    std::vector<TensorPtr> gradients(model.num_parameters);
    replica_.backward(std::move(graph_), 1.0, [&](uint64_t index, TensorPtr gradient) {
      if (index >= gradients.size())
        throw invalid_argument("gradient ", index, "; the model has ", gradients.size(), " parameters");
      const stg_tensor_view& weight = model.parameters[index]->tensor->view;
      if (gradient && numel(gradient->view) != numel(weight)) {
        throw invalid_argument("gradient ", index, " is ", shape_text(gradient->view), ", its parameter ", shape_text(weight));
      }
      gradients[index] = std::move(gradient);
    });
    gradients_ = std::move(gradients);
  }

  UpdateResult optimizer_step(const Call&, const stg_update_args& update) override {
    if (update.clip != STG_CLIP_NONE) throw unimplemented("this strategy doesn't clip gradients");
    if (gradients_.empty()) throw failed_precondition("optimizer_step without a backward since the last update");
    const stg_model_description model = replica_.describe();
    for (uint64_t i = 0; i < model.num_parameters; ++i) {
      const stg_tensor_view& weight = model.parameters[i]->tensor->view;
      for (int64_t j = 0; gradients_[i] != nullptr && j < numel(weight); ++j) {
        first_element<float>(weight)[j] -= static_cast<float>(update.lr * read_element(gradients_[i]->view, j));
      }
    }
    gradients_.clear();
    UpdateResult result;
    result.outcome = STG_UPDATE_DONE;
    return result;
  }

 private:
  uint64_t seed_;
  std::vector<stg_device> devices_{{STG_DEVICE_CPU, 0}};
  Replica replica_;
  GraphPtr graph_;
  std::vector<TensorPtr> gradients_;  // empty: none since the last update
};

STRATAGEM_STRATEGY_PLUGIN("gradient_descent", "1.0.0", GradientDescent);
