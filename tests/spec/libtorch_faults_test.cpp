// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Errors inside a replica", for models on LibTorch and TorchScript files: what LibTorch itself throws, wherever it
// does. After it the run goes on, bitwise as one that never had it, its random numbers too. Every step has a deadline of 5 seconds.
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/jit/api/module.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "model/tensor_model.hpp"
#include "spec/watch.hpp"
#include "torch/bridge.hpp"
//
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

struct Kind {
  std::string name;
  void (*fail)();
  uint32_t code;
  std::string text;
};

// Nobody has so much: more than an address can name.
at::Tensor too_large() { return at::empty({int64_t{1} << 54}, at::kByte); }

const std::vector<Kind> kinds{
    {"std::exception", [] { throw std::runtime_error("the mask is upside down"); }, STG_INTERNAL, "the mask is upside down"},
    {"no std::exception", [] { throw 42; }, STG_UNKNOWN, "no std::exception"},
    {"TORCH_CHECK", [] { TORCH_CHECK(false, "the mask has holes"); }, STG_INTERNAL, "the mask has holes"},
    {"an operator's check",
     [] {
       static_cast<void>(at::ones({2, 3}).matmul(at::ones({2, 3})));
     },
     STG_INTERNAL, "2x3"},
    {"an index", [] { static_cast<void>(at::ones({2}).select(0, 7)); }, STG_INVALID_ARGUMENT, "7"},
    {"not enough memory", [] { static_cast<void>(too_large()); }, STG_RESOURCE_EXHAUSTED, "18014398509481984 bytes"},
    {"bad_alloc", [] { throw std::bad_alloc(); }, STG_RESOURCE_EXHAUSTED, "out of memory"},
    {"an error of ours",
     [] {
       throw Error{STG_UNAVAILABLE, "the tokenizer's server is away"};
     },
     STG_UNAVAILABLE, "the tokenizer's server is away"},
};

struct Fault {
  const Kind* kind = nullptr;
  std::string place;
  int32_t replica = 1;
};
std::atomic<bool> is_armed{false};
Fault fault;

bool is_due(const std::string& place, int32_t replica) { return is_armed && place == fault.place && replica == fault.replica; }
void fail_where_told(const std::string& place, int32_t replica) {
  if (is_due(place, replica)) fault.kind->fail();
}

// Dropout, a running mean, and a fault where told. The place "NaN in the loss" and "NaN in a gradient" spoil those.
class Faulty : public TensorModel {
 public:
  explicit Faulty(const nlohmann::json&)
      : w_(register_parameter("w", at::ones({3}))), mean_(register_buffer("mean", at::zeros({3}))) {}

  StepOutput training_step(const Batch& batch, const StepContext& context) override {
    const at::Tensor x = batch["x"].tensor();
    mean_.mul_(0.9).add_(x.detach().mean(0), 0.1);
    const int32_t replica = context.replica;
    at::Tensor loss = at::dropout(x, 0.5, true).mul(w_).pow(2).mean();
    fail_where_told("forward", replica);
    loss = loss.mul(1.0);  // so that the hook's tensor is no leaf
    loss.register_hook([replica](const at::Tensor& gradient) -> at::Tensor {
      fail_where_told("backward", replica);
      return is_due("NaN in a gradient", replica) ? gradient.mul(std::nan("")) : gradient;
    });
    loss = loss.mul(1.0);
    return is_due("NaN in the loss", replica) ? loss.mul(std::nan("")) : loss;
  }
  StepOutput validation_step(const Batch&, const StepContext& context) override {
    fail_where_told("evaluation", context.replica);
    return {{"w", w_.clone()}, {"mean", mean_.clone()}};
  }
  TensorTree transfer(const Batch& batch, at::Device, int64_t) override {
    // A share tells its replica: rows of replica 1 begin with 1.
    fail_where_told("transfer", batch["x"].tensor()[0][0].item<double>() == 1 ? 1 : 0);
    return batch.tree();
  }

 private:
  at::Tensor w_, mean_;
};

class FaultyWithSplit : public Faulty {
 public:
  using Faulty::Faulty;
  std::vector<TensorTree> split(const Batch& batch, size_t) override {
    fail_where_told("split", 0);
    const at::Tensor x = batch["x"].tensor();
    return {TensorTree{{"x", x.narrow(0, 0, 2)}}, TensorTree{{"x", x.narrow(0, 2, 2)}}};
  }
};

template <class M>
ModelPtr model_of() {
  const stg_model* made = nullptr;
  check(sdk::create_model("faulty", sdk::model_class<M>, to_abi("{}"), nullptr, &made));
  return ModelPtr{made};
}

Tree batch_at(int step, const char* key = "x") {
  at::Tensor x = at::zeros({4, 3}).add(0.3 + 0.1 * step);
  x[2][0] = 1;
  x[0][1] = -step;
  Dict dict;
  dict.emplace_back(key, to_dlpack(x));
  return make_tree(std::move(dict));
}

const std::string two_devices =
    R"({"devices": [5, 2], "threads": 2, "seed": 7, "optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1}})";

void check_told(const Error& error, uint32_t code, const std::string& phase, const std::string& text) {
  CHECK(error.code == code);
  CHECK(error.replica == fault.replica);
  CHECK(error.device.kind == STG_DEVICE_CPU);
  CHECK(error.device.index == (fault.replica == 1 ? 2 : 5));
  CHECK((error.flags & STG_ERROR_INSTANCE_USABLE) != 0);
  CHECK_THAT(error.message,
             Catch::Contains(concat("replica ", fault.replica, fault.replica == 1 ? " on cpu:2" : " on cpu:5", ", in ", phase)) &&
                 Catch::Contains(text));
  CHECK_THAT(error.message, !Catch::Contains("frame #"));
  REQUIRE(error.cause != nullptr);
  CHECK_THAT(std::string(text_of(error.cause->message)), Catch::Contains(text));
}

// Both replicas' parameters and buffers, as they themselves see them.
void check_alike(Instance& instance) {
  const StepOutcome outcome = instance.validate(batch_at(0));
  for (const char* name : {"w", "mean"}) {
    const std::vector<double> all = numbers(*find(outcome.outputs.root(), name));
    REQUIRE(all.size() == 6);
    CHECK(std::vector<double>(all.begin(), all.begin() + 3) == std::vector<double>(all.begin() + 3, all.end()));
  }
}

// Trains six steps; at step 3 a fault, which must be told as `check_error` wants it. Then all must be as if nothing had been.
void run_with_fault(const stg_model* model, bool in_one, const std::function<Tree(int step, bool is_bad)>& batch, uint64_t flags,
                    const std::function<void(const Error&)>& check_error) {
  const size_t num_threads_before = num_threads();
  Instance instance("data_parallel", two_devices);
  Instance undisturbed("data_parallel", two_devices);
  instance.setup(model);
  undisturbed.setup(model);
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {
      const std::string before = state_bytes(instance.export_state());
      is_armed = true;
      const Error error = error_of([&] { train_by(instance, batch(step, true), in_one, 0.1, flags, step); });
      is_armed = false;
      check_error(error);
      CHECK((state_bytes(instance.export_state()) == before));
      CHECK(instance.status().num_micro_batches == 0);
      CHECK(instance.status().has_graph == 0);
    }
    train_by(instance, batch(step, false), in_one, 0.1, flags, step);
    train_by(undisturbed, batch(step, false), in_one, 0.1, flags, step);
  }
  CHECK((state_bytes(instance.export_state()) == state_bytes(undisturbed.export_state())));
  instance.teardown();
  undisturbed.teardown();
  CHECK(num_threads_becomes(num_threads_before));
}

// LibTorch starts threads of its own at its first operations; they are not ours.
void warm_up(const stg_model* model, const Tree& batch) {
  Instance instance("data_parallel", two_devices);
  instance.setup(model);
  train_by(instance, Tree::view(batch.root()), true, 0.1);
}

}  // namespace

TEST_CASE(
    "whatever LibTorch throws on replica 1 at step 3, anywhere in a step: told in full, and the run goes on, random numbers "
    "too") {
  const ModelPtr plain = model_of<Faulty>();
  const ModelPtr splitting = model_of<FaultyWithSplit>();
  warm_up(plain.get(), batch_at(0));
  for (const std::string place : {"forward", "backward", "transfer", "split"}) {
    const stg_model* model = place == "split" ? splitting.get() : plain.get();
    for (const Kind& kind : kinds) {
      for (const bool in_one : {true, false}) {
        INFO(kind.name << " in " << place << (in_one ? ", train_batch" : ", training_step and backward"));
        fault = {&kind, place, place == "split" ? 0 : 1};
        run_with_fault(
            model, in_one, [](int step, bool) { return batch_at(step); }, 0,
            [&](const Error& error) { check_told(error, kind.code, place == "transfer" ? "forward" : place, kind.text); });
      }
    }
  }
}

TEST_CASE("after a fault of a LibTorch model all replicas are bitwise equal") {
  const ModelPtr model = model_of<Faulty>();
  for (const std::string place : {"forward", "backward"}) {
    fault = {&kinds[0], place};
    Instance instance("data_parallel", two_devices);
    instance.setup(model.get());
    train_by(instance, batch_at(0), true, 0.1);
    is_armed = true;
    error_of([&] { train_by(instance, batch_at(1), true, 0.1); });
    is_armed = false;
    check_alike(instance);
    train_by(instance, batch_at(1), true, 0.1);
    check_alike(instance);
  }
}

TEST_CASE("data_parallel on one device draws single_device's random numbers") {
  const ModelPtr model = model_of<Faulty>();
  std::vector<std::string> states;
  for (const std::string strategy : {"single_device", "data_parallel"}) {
    Instance instance(strategy, R"({"devices": 1, "threads": 2, "seed": 7, "optimizer": {"name": "adamw"}})");
    instance.setup(model.get());
    for (int step = 0; step < 5; ++step) train_by(instance, batch_at(step), true, 0.1);
    states.push_back(state_bytes(instance.export_state()));
  }
  CHECK((states[0] == states[1]));
}

TEST_CASE("whatever LibTorch throws in an evaluation is told, and a training in progress goes on") {
  const ModelPtr model = model_of<Faulty>();
  for (const Kind& kind : kinds) {
    fault = {&kind, "evaluation"};
    Instance instance("data_parallel", two_devices);
    Instance undisturbed("data_parallel", two_devices);
    for (Instance* each : {&instance, &undisturbed}) {
      each->setup(model.get());
      each->accumulate(batch_at(0));
      each->training_step(batch_at(1));
      is_armed = each == &instance;
      if (is_armed) check_told(error_of([&] { each->validate(batch_at(2)); }), kind.code, "forward", kind.text);
      is_armed = false;
      each->validate(batch_at(2));
      each->backward(true);
      each->optimizer_step(0.1);
    }
    CHECK((state_bytes(instance.export_state()) == state_bytes(undisturbed.export_state())));
  }
}

TEST_CASE("with detect_anomaly a NaN of a LibTorch model is named with its replica, and the run goes on") {
  const ModelPtr model = model_of<Faulty>();
  warm_up(model.get(), batch_at(0));
  for (const std::string place : {"NaN in the loss", "NaN in a gradient"}) {
    for (const bool in_one : {true, false}) {
      fault = {&kinds[0], place};
      run_with_fault(
          model.get(), in_one, [](int step, bool) { return batch_at(step); }, STG_BATCH_DETECT_ANOMALY,
          [&](const Error& error) {
            const bool is_loss = place == "NaN in the loss";
            check_told(error, STG_OUT_OF_RANGE, is_loss ? "forward" : "backward", "NaN");
            CHECK_THAT(error.message, Catch::Contains(is_loss ? "outputs" : "gradient of 'w'"));
          });
    }
  }
}

namespace {

// A TorchScript file that goes wrong where its inputs hold 100 (replica 1's rows only): each marker in its own way.
std::string torchscript_file() {
  torch::jit::Module module("Faulty");
  module.register_parameter("w", at::ones({3}).set_requires_grad(true), false);
  module.register_buffer("mean", at::zeros({3}));
  module.define(R"JIT(
def training_step(self, inputs):
    self.mean.mul_(0.9).add_(inputs.mean(0) * 0.1)
    marker = int(inputs.max())
    assert marker != 100, "the mask is upside down"
    if marker == 101:
        return torch.zeros([1 << 54]).sum()
    if marker == 102:
        return torch.zeros([2, 3]).matmul(torch.zeros([2, 3])).sum()
    if marker == 103:
        return torch.zeros([2])[7]
    y = (torch.dropout(inputs, 0.5, True) * self.w).exp()
    loss = y.mean()
    if marker == 104:
        loss = torch.logcumsumexp(inputs * self.w, 0).mean()
        loss.backward()
    if marker == 105:
        loss = loss * float("nan")
    if marker == 106:
        loss = loss + 0.0 * (self.w * 0.0).sqrt().sum()
    return loss

def validation_step(self, inputs):
    assert int(inputs.max()) != 100, "the mask is upside down"
    return {"w": self.w.clone(), "mean": self.mean.clone()}
)JIT");
  const auto path = std::filesystem::temp_directory_path() / concat("stratagem-faulty-", getpid(), ".pt");
  module.save(path.string());
  return path.string();
}

}  // namespace

TEST_CASE(
    "whatever a TorchScript file does wrong on replica 1 at step 3 is told in full, and the run goes on, random numbers too") {
  const std::string path = torchscript_file();
  const ModelPtr model = make_model(load_plugin(TORCHSCRIPT_PLUGIN), "torchscript", concat("{\"path\": \"", path, "\"}"));
  struct Case {
    int marker;
    uint32_t code;
    std::string phase, text;
    uint64_t flags = 0;
  };
  const std::vector<Case> cases{
      {100, STG_INTERNAL, "forward", "the mask is upside down"},
      {101, STG_RESOURCE_EXHAUSTED, "forward", "bytes"},
      {102, STG_INTERNAL, "forward", "2x3"},
      {103, STG_INTERNAL, "forward", "7"},
      {104, STG_INTERNAL, "backward", "a second time"},
      {105, STG_OUT_OF_RANGE, "forward", "outputs has a NaN", STG_BATCH_DETECT_ANOMALY},
      {106, STG_OUT_OF_RANGE, "backward", "gradient of 'w' has a NaN", STG_BATCH_DETECT_ANOMALY},
  };
  fault = {};
  warm_up(model.get(), batch_at(0, "inputs"));
  for (const Case& c : cases) {
    const auto batch = [&](int step, bool is_bad) {
      Tree made = batch_at(step, "inputs");
      if (is_bad) first_element<float>(find(made.root(), "inputs")->as.tensor->view)[9] = static_cast<float>(c.marker);
      return made;
    };
    for (const bool in_one : {true, false}) {
      INFO("marker " << c.marker);
      run_with_fault(model.get(), in_one, batch, c.flags,
                     [&](const Error& error) { check_told(error, c.code, c.phase, c.text); });
    }
  }
  // In an evaluation, with a training in progress.
  Instance instance("data_parallel", two_devices);
  instance.setup(model.get());
  instance.training_step(batch_at(1, "inputs"));
  Tree bad = batch_at(2, "inputs");
  first_element<float>(find(bad.root(), "inputs")->as.tensor->view)[9] = 100;
  check_told(error_of([&] { instance.validate(std::move(bad)); }), STG_INTERNAL, "forward", "the mask is upside down");
  instance.validate(batch_at(2, "inputs"));
  instance.backward(true);
  instance.optimizer_step(0.1);
  CHECK(instance.status().num_updates == 1);
  std::filesystem::remove(path);
}

TEST_CASE("predictions and targets of a TorchScript file that differ in shape are an error with both, not broadcast") {
  const auto path = std::filesystem::temp_directory_path() / concat("stratagem-column-", getpid(), ".pt");
  torch::jit::Module module("Column");
  module.register_parameter("w", at::ones({3}).set_requires_grad(true), false);
  module.define("def forward(self, inputs):\n    return (inputs * self.w).sum(1, keepdim=True)\n");
  module.save(path.string());
  const auto batch = [](std::vector<int64_t> shape) {
    Dict made;
    made.emplace_back("inputs", tensor_of({1, 2, 3, 4, 5, 6}, {2, 3}));
    made.emplace_back("targets", tensor_of(std::vector<double>(shape.size() == 2 && shape[1] == 3 ? 6 : 2, 1.0), shape));
    return make_tree(std::move(made));
  };
  for (const std::string loss : {"mse_loss", "l1_loss", "binary_cross_entropy_with_logits"}) {
    const ModelPtr model = make_model(load_plugin(TORCHSCRIPT_PLUGIN), "torchscript",
                                      concat(R"({"path": ")", path.string(), R"(", "loss": ")", loss, "\"}"));
    Instance instance("single_device", R"({"devices": 1, "optimizer": {"name": "sgd"}})");
    instance.setup(model.get());
    for (const auto& [shape, text] :
         {std::pair{std::vector<int64_t>{2}, "[2]"}, std::pair{std::vector<int64_t>{2, 3}, "[2, 3]"}}) {
      for (const bool is_training : {true, false}) {
        const Error error = error_of([&] { is_training ? instance.train(batch(shape)) : instance.validate(batch(shape)); });
        INFO(error.message);
        CHECK(error.code == STG_INVALID_ARGUMENT);
        CHECK_THAT(error.message, Catch::Contains(loss) && Catch::Contains("[2, 1]") && Catch::Contains(text));
      }
    }
    instance.train(batch({2, 1}));
    CHECK(instance.status().num_updates == 1);
  }
  std::filesystem::remove(path);
}

TEST_CASE("the accuracy of a TorchScript file whose targets are a probability for each class compares the likeliest") {
  const auto path = std::filesystem::temp_directory_path() / concat("stratagem-classes-", getpid(), ".pt");
  torch::jit::Module module("Classes");
  module.register_parameter("w", at::ones({3}).set_requires_grad(true), false);
  module.define("def forward(self, inputs):\n    return inputs * self.w\n");
  module.save(path.string());
  const ModelPtr model = make_model(load_plugin(TORCHSCRIPT_PLUGIN), "torchscript",
                                    concat(R"({"path": ")", path.string(), R"(", "loss": "cross_entropy"})"));
  Instance instance("single_device", R"({"devices": 1, "optimizer": {"name": "sgd"}})");
  instance.setup(model.get());
  Dict batch;
  batch.emplace_back("inputs", tensor_of({9, 0, 0, 0, 9, 0, 0, 0, 9}, {3, 3}));
  batch.emplace_back("targets", tensor_of({0.8, 0.1, 0.1, 0.1, 0.8, 0.1, 0.1, 0.8, 0.1}, {3, 3}));
  const StepOutcome outcome = instance.validate(make_tree(std::move(batch)));
  CHECK(numbers(*find(outcome.outputs.root(), "accuracy")).at(0) == Approx(2.0 / 3));
  std::filesystem::remove(path);
}
