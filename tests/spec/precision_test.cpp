// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Mixed precision", with models on LibTorch: what autocast does in every replica's thread. The loss scale by itself is
// in scaler_test.cpp.
#include <ATen/autocast_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/jit/api/module.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <random>

#include "base/structs.hpp"
#include "model/tensor_model.hpp"
#include "torch/bridge.hpp"
//
#include "spec/instance.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

template <class M>
ModelPtr model_of(const std::string& options = "{}") {
  const stg_model* made = nullptr;
  check(sdk::create_model("own", sdk::model_class<M>, to_abi(options), nullptr, &made));
  return ModelPtr{made};
}

Tree batch_with(const at::Tensor& x) {
  Dict dict;
  dict.emplace_back("x", to_dlpack(x));
  return make_tree(std::move(dict));
}

std::string config(int num_devices, const std::string& precision, const std::string& optimizer = R"({"name": "sgd"})") {
  return concat("{\"devices\": ", num_devices, ", \"threads\": ", num_devices, ", \"precision\": \"", precision,
                "\", \"optimizer\": ", optimizer, "}");
}

std::string bytes_of(const stg_value& dict) {
  std::string bytes;
  for (uint32_t e = 0; e < dict.count; ++e) {
    const stg_tensor_view& view = dict.as.entries[e].value.as.tensor->view;
    bytes.append(first_element<const char>(view), static_cast<size_t>(numel(view)) * element_size_bytes(view.dtype));
  }
  return bytes;
}

// A weight of 16 x 16 that is used several times in a step; says under what it was run. The loss is of the type that the options name, else
// as autocast makes it.
class Repeating : public TensorModel {
 public:
  explicit Repeating(const nlohmann::json& options)
      : num_uses_(options.value("uses", 3)),
        fails_(options.value("fails", false)),
        w_(register_parameter("w", at::randn({16, 16}).mul(0.3))) {}

  StepOutput training_step(const Batch& batch, const StepContext&) override {
    at::Tensor x = batch["x"].tensor();
    for (int i = 0; i < num_uses_; ++i) x = at::linear(x, w_);
    if (fails_) throw std::runtime_error("told to fail");
    const at::Tensor loss = x.to(at::kFloat).pow(2).mean().mul(1.0 / 256);  // small enough for the first scale
    return {{"loss", loss},
            {"made", x.detach()},
            {"given", batch["x"].tensor()},
            {"caches", at::autocast::is_autocast_cache_enabled()},
            {"records", c10::GradMode::is_enabled()},
            {"is_inference", c10::InferenceMode::is_enabled()}};
  }
  StepOutput validation_step(const Batch& batch, const StepContext& context) override { return training_step(batch, context); }

 private:
  int num_uses_;
  bool fails_;
  at::Tensor w_;
};

Tree repeating_batch(int seed) {
  at::Tensor x = at::full({6, 16}, 0.0);
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < x.numel(); ++i) x.data_ptr<float>()[i] = normal(random);
  return batch_with(x);
}

// Linear(32,2) without bias, all weights 0.01; the loss is the sum, in the type that autocast makes it.
class Summing : public TensorModel {
 public:
  explicit Summing(const nlohmann::json&) : w_(register_parameter("w", at::full({2, 32}, 0.01))) {}
  uint64_t loss_kind() const override { return STG_LOSS_SUM; }
  StepOutput training_step(const Batch& batch, const StepContext&) override { return at::linear(batch["x"].tensor(), w_).sum(); }

 private:
  at::Tensor w_;
};

// loss = w * mean(x), in a type of its own; over a denominator, if there is one.
class Typed : public TensorModel {
 public:
  explicit Typed(const nlohmann::json& options)
      : dtype_(options["dtype"] == "float16" ? at::kHalf : at::kBFloat16),
        denominator_(options.value("denominator", 0.0)),
        w_(register_parameter("w", at::full({1}, 1.0))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor loss = batch["x"].tensor().mean().mul(w_).squeeze().to(dtype_);
    return denominator_ == 0 ? StepOutput(loss) : StepOutput(loss).over(denominator_);
  }

 private:
  at::ScalarType dtype_;
  double denominator_;
  at::Tensor w_;
};

// A loss that is float16 itself can't hold the first scale.
void lower_scale(Instance& instance, const std::string& precision) {
  if (precision == "16-mixed") instance.import_state(with_scaler(instance.export_state(), 1024, 0));
}

// Notes in which state its backward runs.
class Hooked : public TensorModel {
 public:
  explicit Hooked(const nlohmann::json&) : w_(register_parameter("w", at::ones({4, 4}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor made = at::linear(batch["x"].tensor(), w_);
    made.register_hook([](const at::Tensor& gradient) {
      if (at::autocast::is_autocast_enabled(at::kCPU)) ++num_casting;
      ++num_backwards;
      return gradient;
    });
    return made.to(at::kFloat).mean();
  }
  static inline std::atomic<int> num_casting{0};
  static inline std::atomic<int> num_backwards{0};

 private:
  at::Tensor w_;
};

struct CallerState {
  bool is_enabled = at::autocast::is_autocast_enabled(at::kCPU);
  at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
  bool has_cache = at::autocast::is_autocast_cache_enabled();
  bool operator==(const CallerState&) const = default;
};

// The host's own autocast.
class HostAutocast {
 public:
  explicit HostAutocast(at::ScalarType dtype) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
  }
  HostAutocast(const HostAutocast&) = delete;
  HostAutocast& operator=(const HostAutocast&) = delete;
  ~HostAutocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, before_.is_enabled);
    at::autocast::set_autocast_dtype(at::kCPU, before_.dtype);
  }

 private:
  CallerState before_;
};

}  // namespace

TEST_CASE("autocast is on in every replica's thread in all stages, and parameters, gradients and optimizer keep their type") {
  const auto [precision, made] = GENERATE(
      table<std::string, stg_dtype>({{"16-mixed", {STG_DTYPE_FLOAT, 16, 1}}, {"bf16-mixed", {STG_DTYPE_BFLOAT, 16, 1}}}));
  Instance instance("data_parallel", config(3, precision, R"({"name": "adam"})"));
  const ModelPtr model = model_of<Repeating>();
  instance.setup(model.get());
  for (const bool is_training : {true, false}) {
    const StepOutcome outcome = is_training ? instance.training_step(repeating_batch(1)) : instance.validate(repeating_batch(1));
    const stg_value& outputs = outcome.outputs.root();
    CHECK(same_dtype(find(outputs, "made")->as.tensor->view.dtype, made));
    CHECK(same_dtype(find(outputs, "loss")->as.tensor->view.dtype, float32));
    CHECK(same_dtype(find(outputs, "given")->as.tensor->view.dtype, float32));
    CHECK(numbers(*find(outputs, "records")) == std::vector<double>(3, is_training ? 1 : 0));
    CHECK(numbers(*find(outputs, "is_inference")) == std::vector<double>(3, is_training ? 0 : 1));
    if (is_training) instance.backward(true);
  }
  CHECK(same_dtype(find(instance.gradients().root(), "w")->as.tensor->view.dtype, float32));
  CHECK(instance.optimizer_step(0.1).outcome == STG_UPDATE_DONE);
  const Tree state = instance.export_state();
  CHECK(same_dtype(find(*find(state.root(), "model"), "w")->as.tensor->view.dtype, float32));
  const stg_value& slots = *find(*find(*find(state.root(), "optimizer"), "per_parameter"), "w");
  CHECK(same_dtype(find(slots, "exp_avg")->as.tensor->view.dtype, float32));
}

TEST_CASE("a weight that is used several times in a step gives the same bits in each of 50 runs") {
  const std::string precision = GENERATE("16-mixed", "bf16-mixed");
  const int num_devices = GENERATE(1, 2);
  std::string expected;
  for (int run = 0; run < 50; ++run) {
    Instance instance("data_parallel", config(num_devices, precision));
    const ModelPtr model = model_of<Repeating>();
    instance.setup(model.get());
    const StepOutcome outcome = instance.training_step(repeating_batch(2));
    instance.backward(true);
    std::string bits = bytes_of(instance.gradients().root());
    bits += concat(outcome.loss());
    instance.optimizer_step(0.1);
    for (int step = 0; step < 3; ++step) instance.train(repeating_batch(step), 0.1);
    bits += model_bytes(instance.export_state());
    if (run == 0) expected = bits;
    REQUIRE((bits == expected));  // in brackets: not shown
  }
}

TEST_CASE("a weight is cast once in a step by a replica that is alone, and each time by several") {
  const auto [strategy, num_devices] =
      GENERATE(table<std::string, int>({{"single_device", 1}, {"data_parallel", 1}, {"data_parallel", 2}, {"data_parallel", 3}}));
  Instance instance(strategy, config(num_devices, "bf16-mixed"));
  const ModelPtr model = model_of<Repeating>();
  instance.setup(model.get());
  for (const StepOutcome& outcome : {instance.training_step(repeating_batch(1)), instance.validate(repeating_batch(1))}) {
    const stg_value& caches = *find(outcome.outputs.root(), "caches");
    if (strategy == "single_device") {
      CHECK(caches.as.i64 == 1);
    } else {
      CHECK(numbers(caches) == std::vector<double>(static_cast<size_t>(num_devices), num_devices == 1 ? 1 : 0));
    }
  }
}

TEST_CASE("a TorchScript file is cast by the operators that it calls, in every replica and stage, and its parameters aren't") {
  const auto [precision, made] = GENERATE(table<std::string, stg_dtype>(
      {{"32-true", float32}, {"16-mixed", {STG_DTYPE_FLOAT, 16, 1}}, {"bf16-mixed", {STG_DTYPE_BFLOAT, 16, 1}}}));
  torch::jit::Module module("Cast");
  module.register_parameter("w", at::full({4, 4}, 0.01).set_requires_grad(true), false);
  module.define(R"JIT(
def step(self, inputs):
    made = torch.linear(inputs, self.w)
    return {"loss": made.mean(), "made": made.detach()}

def training_step(self, inputs):
    return self.step(inputs)

def validation_step(self, inputs):
    return self.step(inputs)
)JIT");
  const auto path = std::filesystem::temp_directory_path() / concat("stratagem-cast-", getpid(), ".pt");
  module.save(path.string());
  const ModelPtr model = make_model(load_plugin(TORCHSCRIPT_PLUGIN), "torchscript", concat("{\"path\": ", path, "}"));
  Instance instance("data_parallel", config(2, precision));
  instance.setup(model.get());
  std::filesystem::remove(path);
  const auto batch = [] {
    Dict dict;
    dict.emplace_back("inputs", to_dlpack(at::ones({4, 4})));
    return make_tree(std::move(dict));
  };
  for (const StepOutcome& outcome : {instance.validate(batch()), instance.train(batch(), 0.1)})
    CHECK(same_dtype(find(outcome.outputs.root(), "made")->as.tensor->view.dtype, made));
  const Tree state = instance.export_state();
  CHECK(same_dtype(find(*find(state.root(), "model"), "w")->as.tensor->view.dtype, float32));
}

TEST_CASE("each step casts the weights as they are then: w = 1, x = 1, and the second forward has w = 0") {
  const std::string precision = GENERATE("16-mixed", "bf16-mixed");
  const std::string strategy = GENERATE("single_device", "data_parallel");
  const bool host_casts = GENERATE(false, true);
  const ModelPtr model = make_model(load_plugin(TOY_PLUGIN), "toy_linear", R"({"weight": 1})");
  Instance instance(strategy, config(strategy == "single_device" ? 1 : 2, precision));
  instance.setup(model.get());
  lower_scale(instance, precision);
  std::optional<HostAutocast> host;
  if (host_casts) host.emplace(at::kBFloat16);
  const auto batch = [] {
    Dict dict;
    dict.emplace_back("inputs", to_dlpack(at::ones({2})));
    return make_tree(std::move(dict));
  };
  CHECK(instance.train(batch()).loss() == 1);
  CHECK(instance.validate(batch()).outputs.root().type == STG_DICT);
  CHECK(instance.train(batch(), 0).loss() == 0);
  CHECK(instance.value("linear.weight") == 0);
}

TEST_CASE("nothing of autocast leaks to the calling thread, which is replica 0's, after an error neither") {
  const bool fails = GENERATE(false, true);
  const bool host_casts = GENERATE(false, true);
  std::optional<HostAutocast> host;
  if (host_casts) host.emplace(at::kHalf);
  const CallerState before;
  Instance instance("data_parallel", config(2, "bf16-mixed"));
  const ModelPtr model = model_of<Repeating>(fails ? R"({"fails": true})" : "{}");
  instance.setup(model.get());
  if (fails) {
    CHECK_THAT(error_of([&] { instance.train(repeating_batch(1)); }).message, Catch::Contains("told to fail"));
  } else {
    instance.train(repeating_batch(1));
    instance.validate(repeating_batch(1));
  }
  CHECK(before == CallerState());
  const at::Tensor w = at::ones({2, 2}).requires_grad_();
  CHECK(at::linear(at::ones({2, 2}), w).scalar_type() == (host_casts ? at::kHalf : at::kFloat));
}

TEST_CASE("backward runs without autocast, in the types that forward chose") {
  const bool host_casts = GENERATE(false, true);
  std::optional<HostAutocast> host;
  if (host_casts) host.emplace(at::kBFloat16);
  Hooked::num_backwards = 0;
  Instance instance("data_parallel", config(2, "bf16-mixed"));
  const ModelPtr model = model_of<Hooked>();
  instance.setup(model.get());
  instance.train(batch_with(at::ones({4, 4})));
  instance.training_step(batch_with(at::ones({4, 4})));
  instance.backward(true);
  CHECK(Hooked::num_backwards == 4);
  CHECK(Hooked::num_casting == 0);
}

TEST_CASE("a host that is itself under autocast changes nothing, with the same type, another one, or none asked for") {
  const std::string precision = GENERATE("32-true", "16-mixed", "bf16-mixed");
  const std::string strategy = GENERATE("single_device", "data_parallel");
  const auto run = [&](std::optional<at::ScalarType> host_dtype) {
    std::optional<HostAutocast> host;
    if (host_dtype) host.emplace(*host_dtype);
    Instance instance(strategy, config(strategy == "single_device" ? 1 : 2, precision));
    const ModelPtr model = model_of<Repeating>();
    instance.setup(model.get());
    for (int step = 0; step < 4; ++step) {
      instance.train(repeating_batch(step), 0.1);
      instance.validate(repeating_batch(step));
    }
    return model_bytes(instance.export_state());
  };
  const std::string expected = run(std::nullopt);
  CHECK(run(at::kHalf) == expected);
  CHECK(run(at::kBFloat16) == expected);
}

TEST_CASE("evaluating in between leaves training's bits as they are in mixed precision") {
  const std::string precision = GENERATE("16-mixed", "bf16-mixed");
  const std::string strategy = GENERATE("single_device", "data_parallel");
  const auto run = [&](bool validates) {
    Instance instance(strategy, config(strategy == "single_device" ? 1 : 2, precision));
    const ModelPtr model = model_of<Repeating>();
    instance.setup(model.get());
    for (int step = 0; step < 4; ++step) {
      if (validates) instance.validate(repeating_batch(9));
      instance.training_step(repeating_batch(step));
      if (validates) instance.validate(repeating_batch(9));
      instance.backward(true);
      instance.optimizer_step(0.1);
    }
    return model_bytes(instance.export_state());
  };
  CHECK(run(true) == run(false));
}

TEST_CASE("clipping by norm and by value at half the true size halves the gradient of a Linear(32,2) with a sum loss") {
  const std::string precision = GENERATE("32-true", "bf16-mixed", "16-mixed");
  const std::string strategy = GENERATE("single_device", "data_parallel");
  const uint64_t clip = GENERATE(STG_CLIP_NORM, STG_CLIP_VALUE);
  Instance instance(strategy, config(strategy == "single_device" ? 1 : 2, precision));
  const ModelPtr model = model_of<Summing>();
  instance.setup(model.get());
  lower_scale(instance, precision);
  const at::Tensor x = at::full({1, 32}, 0.1);
  instance.training_step(batch_with(x));
  instance.backward(true);
  // Its own x: 0.1 has no exact value in 8 bits.
  const double gradient = numbers(*find(instance.gradients().root(), "w")).at(0);
  CHECK(gradient == Approx(0.1).epsilon(4e-3));
  const double size = clip == STG_CLIP_NORM ? gradient * 8 : gradient;  // sqrt(64) elements
  const stg_update_result update = instance.optimizer_step(1, clip, size / 2);
  CHECK(update.outcome == STG_UPDATE_DONE);
  if (clip == STG_CLIP_NORM) CHECK(update.gradient_norm == Approx(size));
  for (const double w : instance.values("w")) CHECK(w == Approx(0.01 - gradient / 2).epsilon(1e-5));
}

TEST_CASE("a loss in float16 or bfloat16 has the gradient of its weight, whatever the rows or denominators") {
  const std::string dtype = GENERATE("float16", "bfloat16");
  const std::string precision = GENERATE("32-true", "16-mixed", "bf16-mixed");
  const std::string denominator = GENERATE("", R"(, "denominator": 1e6)");
  Instance instance("data_parallel", config(2, precision));
  const ModelPtr model = model_of<Typed>(R"({"dtype": ")" + dtype + "\"" + denominator + "}");
  instance.setup(model.get());
  // 1025 rows and 1024: the first can't be written in bfloat16's 8 bits, nor its product with a scale in float16.
  const at::Tensor x = at::full({2049}, 0.5);
  x.slice(0, 1025).fill_(0.25);
  stg_update_result update = instance.train(batch_with(x), 0.5).update;
  if (dtype == "float16" && precision == "16-mixed") {  // it can't hold the scale itself, as with GradScaler
    CHECK(update.outcome == STG_UPDATE_SKIPPED_OVERFLOW);
    update = instance.train(batch_with(x), 0.5).update;
    CHECK(update.loss_scale == 32768);
  }
  CHECK(update.outcome == STG_UPDATE_DONE);
  const double expected = denominator.empty() ? (1025 * 0.5 + 1024 * 0.25) / 2049 : 0.375;
  CHECK(instance.value("w") == Approx(1 - 0.5 * expected).epsilon(1e-6));
}

TEST_CASE("gradients that float16 can't hold unscaled survive under 16-mixed") {
  // linear's gradient by its output is 2^-30 before it is scaled.
  class Tiny : public TensorModel {
   public:
    explicit Tiny(const nlohmann::json&) : w_(register_parameter("w", at::ones({1, 4}))) {}
    StepOutput training_step(const Batch& batch, const StepContext&) override {
      return at::linear(batch["x"].tensor(), w_).to(at::kFloat).mul(0x1p-30).mean();
    }

   private:
    at::Tensor w_;
  };
  Instance instance("data_parallel", config(2, "16-mixed"));
  const ModelPtr model = model_of<Tiny>();
  instance.setup(model.get());
  instance.train(batch_with(at::ones({2, 4})), 0x1p30);
  CHECK(instance.values("w") == std::vector<double>(4, 0));
}

TEST_CASE("with dropout a run gives the same losses with the same seed, and after a resume, in all precisions") {
  const std::string precision = GENERATE("32-true", "64-true", "16-mixed", "bf16-mixed");
  const std::string strategy = GENERATE("single_device", "data_parallel");
  const std::string optimizer = R"({"name": "adamw"}, "seed": 7)";
  const ModelPtr model = make_model(load_plugin(MLP_PLUGIN), "mlp", R"({"sizes": [6, 64, 4], "dropout": 0.5})");
  const auto train = [&](Instance& instance, int begin, int end) {
    std::vector<double> losses;
    for (int step = begin; step < end; ++step) {
      std::mt19937 random(static_cast<uint32_t>(step));
      at::Tensor inputs = at::full({7, 6}, 0.0);
      for (int64_t i = 0; i < inputs.numel(); ++i) inputs.data_ptr<float>()[i] = static_cast<float>(random() % 100) / 50;
      Dict dict;
      dict.emplace_back("inputs", to_dlpack(inputs));
      dict.emplace_back("targets", to_dlpack(at::arange(7).remainder(4)));
      const StepOutcome outcome = instance.train(make_tree(std::move(dict)), 0.01);
      losses.push_back(outcome.loss());
    }
    return losses;
  };
  const std::string with = config(strategy == "single_device" ? 1 : 2, precision, optimizer);
  Instance first(strategy, with);
  Instance again(strategy, with);
  first.setup(model.get());
  again.setup(model.get());
  std::vector<double> losses = train(first, 0, 3);
  CHECK(losses == train(again, 0, 3));
  Instance resumed(strategy, with);
  resumed.setup(model.get(), STG_STAGE_FIT, first.export_state());
  losses = train(first, 3, 6);
  CHECK(losses == train(resumed, 3, 6));
  CHECK(model_bytes(first.export_state()) == model_bytes(resumed.export_state()));
}
