// SPDX-License-Identifier: Apache-2.0
//
// A strategy with the least that the loop can train with, for the loop's tests: no states, so nothing is put back after a validation;
// its updates change no weight, its checkpoints hold the loop's position alone. Options:
//
//   any, all   what it answers to a decision of that mode, as other processes would have it; absent: its input
#include <base/strategy.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>

using namespace stratagem;

class Bare : public Strategy {
 public:
  static StrategyInfo info() { return {"the least", "{}", {STG_DEVICE_CPU}}; }
  explicit Bare(const CreateArgs& args) : options_(args.config.value("options", nlohmann::json::object())) {}

  const std::vector<stg_device>& devices() const override { return devices_; }

  void setup(const Call&, Model model, Tree, uint32_t) override {
    stg_replicate_args args{};
    args.device = devices_.front();
    args.num_replicas = 1;
    replica_ = Replica(std::move(model), args);
  }
  void teardown(const Call&) override {
    graph_.reset();
    replica_ = {};
  }

  StepResult training_step(const Call&, StepArgs args) override { return step(std::move(args), STG_STAGE_FIT); }
  void backward(const Call&, uint64_t) override {
    replica_.backward(std::move(graph_), 1, [](uint64_t, TensorPtr) {});
  }
  UpdateResult optimizer_step(const Call&, const stg_update_args&) override {
    UpdateResult result;
    result.outcome = STG_UPDATE_DONE;
    return result;
  }
  StepResult evaluation_step(const Call&, StepArgs args, uint32_t stage) override { return step(std::move(args), stage); }

  void save(const Call&, const std::string& path, const std::string& host_json) override {
    std::filesystem::create_directories(path);
    std::ofstream(path + "/position") << host_json;
  }
  ImportReport load(const Call&, const std::string& path, uint64_t, std::string& host_json) override {
    std::ifstream in(path + "/position");
    host_json.assign(std::istreambuf_iterator<char>(in), {});
    return {};
  }

  bool reduce_boolean_decision(const Call&, bool decision, uint32_t mode) override {
    return options_.value(mode == STG_DECIDE_ANY ? "any" : "all", decision);
  }

 private:
  StepResult step(StepArgs args, uint32_t stage) {
    stg_step_context context{};
    context.device = devices_.front();
    context.num_replicas = 1;
    context.stage = stage;
    context.flags = stage == STG_STAGE_FIT ? STG_STEP_GRADIENT : STG_STEP_INFERENCE;
    context.global_step = args.global_step;
    ModelStep made = replica_.step(context, std::move(args.batch));
    graph_ = std::move(made.graph);
    return {std::move(made.outputs), {1}};
  }

  nlohmann::json options_;
  std::vector<stg_device> devices_{{STG_DEVICE_CPU, 0}};
  Replica replica_;
  GraphPtr graph_;
};

STRATAGEM_STRATEGY_PLUGIN("bare", "1.0.0", Bare);
