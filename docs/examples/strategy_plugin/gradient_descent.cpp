// SPDX-License-Identifier: Apache-2.0
// A whole strategy plugin: one replica on the CPU, plain gradient descent. What it doesn't have it refuses in words.
#include <base/dlpack.hpp>
#include <base/strategy.hpp>

using namespace stratagem;

class GradientDescent : public Strategy {
 public:
  static StrategyInfo info() {
    return {"one replica on the cpu, plain gradient descent", R"({"additionalProperties": false})", {STG_DEVICE_CPU}};
  }

  explicit GradientDescent(const CreateArgs& args) : seed_(args.config.value("seed", uint64_t{0})) {
    accept_only(args.config, {{"accelerator", "cpu"},
                              {"devices", 1},
                              {"precision", "32-true"},
                              {"deterministic", false},
                              {"optimizer", {{"name", "sgd"}}},
                              {"options", nlohmann::json::object()}});
  }

  const std::vector<stg_device>& devices() const override { return devices_; }

  void setup(const Call&, Model model, Tree state, uint32_t) override {
    if (state.root().type != STG_NONE) throw unimplemented("this strategy can't begin from a state");
    if (!model) return;
    stg_replicate_args args{};
    args.device = devices_.front();
    args.num_replicas = 1;
    args.seed = seed_;
    Replica replica(std::move(model), args);
    const stg_model_description made = replica.describe();
    for (uint64_t i = 0; i < made.num_parameters; ++i) {
      const stg_tensor_view& weight = made.parameters[i]->tensor->view;
      if ((made.parameters[i]->flags & STG_PARAMETER_PINNED) == 0 || !same_dtype(weight.dtype, float32) || !is_contiguous(weight))
        throw unimplemented("parameter ", i, " is no row-major float32 tensor that may be written in place");
    }
    replica_ = std::move(replica);
  }

  void teardown(const Call& call) override {
    zero_grad(call);
    replica_ = {};
  }

  void zero_grad(const Call&) override {
    graph_.reset();
    sums_.clear();
    total_rows_ = 0;
  }

  StepResult training_step(const Call&, StepArgs args) override {
    if (args.batch.borrowed()) args.batch = copy_tree(args.batch.root());  // the graph reads it until backward
    num_rows_ = static_cast<double>(batch_rows(args.batch.root()).value_or(1));
    replica_.set_mode(true);
    stg_step_context context{};
    context.device = devices_.front();
    context.num_replicas = 1;
    context.flags = STG_STEP_GRADIENT | ((args.flags & STG_BATCH_DETECT_ANOMALY) != 0 ? STG_STEP_DETECT_ANOMALY : 0);
    context.batch_index = args.batch_index;
    context.global_step = args.global_step;
    ModelStep step = replica_.step(context, std::move(args.batch));
    graph_ = std::move(step.graph);
    return {std::move(step.outputs), {num_rows_}};
  }

  // The loss is a mean over the rows: times their number, micro-batches of any size add up.
  void backward(const Call&, uint64_t) override {
    const stg_model_description model = replica_.describe();
    std::vector<std::vector<double>> sums = sums_;
    sums.resize(model.num_parameters);
    replica_.backward(std::move(graph_), num_rows_, [&](uint64_t index, TensorPtr gradient) {
      if (index >= sums.size()) throw invalid_argument("gradient ", index, "; the model has ", sums.size(), " parameters");
      const std::string wanted = shape_text(model.parameters[index]->tensor->view);
      if (gradient && shape_text(gradient->view) != wanted)
        throw invalid_argument("gradient ", index, " is ", shape_text(gradient->view), ", its parameter ", wanted);
      if (gradient) sums[index].resize(static_cast<size_t>(numel(gradient->view)));
      for (size_t i = 0; gradient && i < sums[index].size(); ++i)
        sums[index][i] += read_element(gradient->view, static_cast<int64_t>(i));
    });
    sums_ = std::move(sums);
    total_rows_ += num_rows_;
  }

  UpdateResult optimizer_step(const Call& call, const stg_update_args& update) override {
    if (update.clip != STG_CLIP_NONE) throw unimplemented("this strategy doesn't clip gradients");
    if (sums_.empty()) throw failed_precondition("optimizer_step without a backward since the last update");
    const stg_model_description model = replica_.describe();
    for (uint64_t p = 0; p < sums_.size(); ++p) {
      float* weight = first_element<float>(model.parameters[p]->tensor->view);
      for (size_t i = 0; i < sums_[p].size(); ++i) weight[i] -= static_cast<float>(update.lr * sums_[p][i] / total_rows_);
    }
    UpdateResult result;
    result.outcome = STG_UPDATE_DONE;
    result.total_weight = total_rows_;
    zero_grad(call);
    return result;
  }

 private:
  uint64_t seed_;
  std::vector<stg_device> devices_{{STG_DEVICE_CPU, 0}};
  Replica replica_;
  GraphPtr graph_;
  double num_rows_ = 0;                    // of the latest batch
  std::vector<std::vector<double>> sums_;  // by parameter: rows times gradient, since the last update
  double total_rows_ = 0;
};

STRATAGEM_STRATEGY_PLUGIN("gradient_descent", "1.0.0", GradientDescent);
