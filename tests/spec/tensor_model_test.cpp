// SPDX-License-Identifier: Apache-2.0
//
// Models on LibTorch, written here, under the plugins' strategies: what only shows where both meet.
#include "model/tensor_model.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "spec/own_model.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

std::string sgd(int num_devices, const std::string& more = "") {
  return concat("{\"devices\": ", num_devices, ", \"threads\": ", num_devices, R"(, "optimizer": {"name": "sgd"})", more, "}");
}

// loss = mean over rows of x * sum((a + b)^2): autograd gives a and b one gradient tensor.
class Sum : public TensorModel {
 public:
  explicit Sum(const nlohmann::json&)
      : a_(register_parameter("a", at::ones({2, 2}))), b_(register_parameter("b", at::ones({4}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    return (a_.view(-1) + b_.view(-1)).pow(2).sum().mul(batch["x"].tensor().mean());
  }

 private:
  at::Tensor a_, b_;
};

// A perturbed input, as adversarial training makes it: a backward inside the step, or the same by autograd::grad.
class Adversarial : public TensorModel {
 public:
  explicit Adversarial(const nlohmann::json& options)
      : calls_backward_(options["backward"]), w_(register_parameter("w", at::ones({3}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor x = batch["x"].tensor().detach().clone().requires_grad_();
    const at::Tensor clean = x.mul(w_).pow(2).sum(1).mean();
    at::Tensor gradient;
    if (calls_backward_) {
      clean.backward();
      gradient = x.grad();
    } else {
      gradient = torch::autograd::grad({clean}, {x})[0];
    }
    return x.detach().add(gradient.sign(), 0.1).mul(w_).pow(2).sum(1).mean();
  }

 private:
  bool calls_backward_;
  at::Tensor w_;
};

// Trains on the batch before.
class Remembering : public TensorModel {
 public:
  explicit Remembering(const nlohmann::json&) : w_(register_parameter("w", at::zeros({1}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor before = kept_.defined() ? kept_ : batch["x"].tensor();
    kept_ = batch["x"].tensor();
    return before.mul(w_).mean();
  }
  StepOutput validation_step(const Batch& batch, const StepContext&) override {
    kept_ = batch["x"].tensor();
    return TensorTree(1.0);
  }

 private:
  at::Tensor w_;
  at::Tensor kept_;
};

// Scales its inputs where they are.
class Scaling : public TensorModel {
 public:
  explicit Scaling(const nlohmann::json&) : w_(register_parameter("w", at::zeros({1}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override { return batch["x"].tensor().div_(4).mul(w_).mean(); }

 private:
  at::Tensor w_;
};

// The second parameter is frozen or thawed at a global step.
class Freezing : public TensorModel {
 public:
  explicit Freezing(const nlohmann::json& options)
      : thaws_(options["thaws"]),
        first_(register_parameter("first", at::ones({1}))),
        second_(register_parameter("second", at::ones({1}), !thaws_)) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    if (num_steps_++ == 1) second_.set_requires_grad(thaws_);
    return batch["x"].tensor().mean().mul(first_ + second_).sum();
  }

 private:
  bool thaws_;
  int num_steps_ = 0;
  at::Tensor first_, second_;
};

// Packed rows: "x" has all values, "lengths" how many belong to each sample. loss: the mean over samples of w * (their sum).
class Packed : public TensorModel {
 public:
  explicit Packed(const nlohmann::json& options)
      : reports_(options.value("reports", true)), w_(register_parameter("w", at::zeros({1}))) {}
  std::vector<TensorTree> split(const Batch& batch, size_t num_shares) override {
    const at::Tensor x = batch["x"].tensor();
    const at::Tensor lengths = batch["lengths"].tensor();
    std::vector<TensorTree> shares;
    const int64_t per_share = (lengths.size(0) + static_cast<int64_t>(num_shares) - 1) / static_cast<int64_t>(num_shares);
    int64_t begin = 0;
    for (int64_t sample = 0; sample < lengths.size(0); sample += per_share) {
      const at::Tensor own = lengths.narrow(0, sample, std::min(per_share, lengths.size(0) - sample));
      const auto count = own.sum().item<int64_t>();
      shares.push_back({{"x", x.narrow(0, begin, count)}, {"lengths", own}});
      begin += count;
    }
    return shares;
  }
  TensorTree transfer(const Batch& batch, at::Device, int64_t dataloader_index) override {
    return {{"x", batch["x"].tensor()}, {"lengths", batch["lengths"].tensor()}, {"dataloader", dataloader_index}};
  }
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const auto samples = static_cast<double>(batch["lengths"].tensor().size(0));
    StepOutput output{{"loss", batch["x"].tensor().sum().mul(w_).sum().div(samples)}, {"dataloader", batch["dataloader"].tree()}};
    return reports_ ? std::move(output).over(samples) : std::move(output);
  }

 private:
  bool reports_;
  at::Tensor w_;
};

// Its backward adds many numbers to each row of a small table, from several threads at once.
class Indexing : public TensorModel {
 public:
  explicit Indexing(const nlohmann::json&) : table_(register_parameter("table", at::ones({4, 8}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor x = batch["x"].tensor();
    return at::index(table_, {x.mul(4).to(at::kLong)}).mul(x.unsqueeze(1)).sum();
  }

 private:
  at::Tensor table_;
};

// Batch norm over two columns; counts in its buffers.
class Norm : public TensorModel {
 public:
  explicit Norm(const nlohmann::json&)
      : w_(register_parameter("w", at::ones({2}))),
        mean_(register_buffer("mean", at::zeros({2}))),
        variance_(register_buffer("variance", at::ones({2}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const auto [y, save_mean, save_inverse] =
        at::native_batch_norm(batch["x"].tensor(), w_, {}, mean_, variance_, is_training(), 0.1, 1e-5);
    return y.pow(3).mean();
  }

 private:
  at::Tensor w_, mean_, variance_;
};

// Dropout of its inputs; the loss tells what was dropped.
class Dropping : public TensorModel {
 public:
  explicit Dropping(const nlohmann::json&) : w_(register_parameter("w", at::ones({64}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor kept = at::dropout(batch["x"].tensor(), 0.5, true);
    const at::Tensor loss = kept.mul(w_).mean();
    return {{"loss", loss}, {"own", loss.detach()}};
  }

 private:
  at::Tensor w_;
};

}  // namespace

TEST_CASE("two gradients that autograd keeps in one memory are accumulated each once") {
  for (const int num_devices : {1, 2}) {
    Instance instance("data_parallel", sgd(num_devices));
    instance.setup(model_of<Sum>().get());
    for (const double x : {1.0, 2.0}) instance.accumulate(batch_with(at::ones({2}).mul(x)));
    instance.train(batch_with(at::ones({2}).mul(3)), 0.0625);
    // d/da = 2 (a + b) x, over x = 1, 2, 3.
    CHECK(instance.values("a") == std::vector<double>(4, 1 - 0.0625 * 4 * 2));
    CHECK(instance.values("b") == std::vector<double>(4, 1 - 0.0625 * 4 * 2));
  }
}

TEST_CASE("a backward of the model's own inside a step isn't part of the gradient") {
  std::vector<std::string> results;
  for (const bool calls_backward : {true, false}) {
    Instance instance("data_parallel", sgd(2));
    instance.setup(model_of<Adversarial>(calls_backward ? R"({"backward": true})" : R"({"backward": false})").get());
    for (int step = 0; step < 3; ++step) {
      instance.train(batch_with(at::arange(0.5, 6.5).view({2, 3})), 0.01);
    }
    results.push_back(model_bytes(instance.export_state()));
  }
  CHECK(results[0] == results[1]);
}

TEST_CASE("a model may keep a tensor of a lent batch, which it then has to itself") {
  for (const bool in_validation : {false, true}) {
    Instance instance("single_device", sgd(1));
    instance.setup(model_of<Remembering>().get());
    auto memory = std::make_unique<std::vector<float>>(2, 3.0F);
    const auto lent = batch_with(at::from_blob(memory->data(), {2}));
    if (in_validation) {
      instance.validate(Tree::view(lent.root()));
    } else {
      instance.train(Tree::view(lent.root()), 0);
    }
    std::fill(memory->begin(), memory->end(), 1000.0F);
    memory.reset();
    instance.train(batch_with(at::zeros({2})));
    CHECK(instance.value("w") == -3);
  }
}

TEST_CASE("a model that writes to its batch doesn't write to a lent one") {
  for (const int num_devices : {1, 2}) {
    Instance instance("data_parallel", sgd(num_devices));
    instance.setup(model_of<Scaling>().get());
    const at::Tensor inputs = at::ones({2}).mul(8);
    const Tree lent = batch_with(inputs);
    for (int step = 0; step < 2; ++step) instance.train(Tree::view(lent.root()));
    CHECK(inputs.sum().item<float>() == 16);
    CHECK(instance.value("w") == -4);
  }
}

TEST_CASE("a parameter that a LibTorch model freezes after setup stays, one that it thaws is told") {
  Instance freezing("data_parallel", sgd(2));
  freezing.setup(model_of<Freezing>(R"({"thaws": false})").get());
  for (int step = 0; step < 3; ++step) freezing.train(batch_with(at::ones({2})), 0.25);
  CHECK(freezing.value("first") == 0.25);
  CHECK(freezing.value("second") == 0.75);

  Instance thawing("data_parallel", sgd(2));
  thawing.setup(model_of<Freezing>(R"({"thaws": true})").get());
  thawing.train(batch_with(at::ones({2})), 0.25);
  const Error error = error_of([&] { thawing.train(batch_with(at::ones({2})), 0.25); });
  CHECK(error.code == STG_FAILED_PRECONDITION);
  CHECK_THAT(error.message, Catch::Contains("second has a gradient") && Catch::Contains("frozen at setup"));
  CHECK(thawing.value("first") == 0.75);
}

TEST_CASE("a model's own split packs ragged batches for any number of devices") {
  const auto batch = [](bool is_even) {
    Dict dict;
    dict.emplace_back("x", to_dlpack(at::ones({is_even ? 5 : 17})));
    dict.emplace_back("lengths",
                      to_dlpack(is_even ? at::ones({5}, at::kLong) : at::arange(1, 6).add(at::arange(1, 6).gt(3).to(at::kLong))));
    return make_tree(std::move(dict));
  };
  for (const std::string strategy : {"single_device", "data_parallel"}) {
    for (const int num_devices : {1, 2}) {
      if (strategy == "single_device" && num_devices == 2) continue;
      Instance instance(strategy, sgd(num_devices));
      instance.setup(model_of<Packed>().get());
      const StepOutcome outcome = instance.train(batch(false));
      CHECK(outcome.weights == (num_devices == 1 ? std::vector<double>{5} : std::vector<double>{3, 2}));
      CHECK(instance.value("w") == Approx(-17.0 / 5));
      CHECK(find(outcome.outputs.root(), "dataloader") != nullptr);

      Instance silent(strategy, sgd(num_devices));
      silent.setup(model_of<Packed>(R"({"reports": false})").get());
      const Error error = error_of([&] { silent.train(batch(false)); });
      CHECK(error.code == STG_INVALID_ARGUMENT);
      CHECK_THAT(error.message, Catch::Contains("denominator") && Catch::Contains("rows"));
      CHECK(silent.value("w") == 0);
      silent.train(batch(true));
      CHECK(silent.value("w") == Approx(-1));
    }
  }
}

TEST_CASE("with deterministic, a model whose operators add in any order gives the same bits at each run") {
  const at::Tensor inputs = at::arange(0, 1, 1.0 / 400000).square();
  const auto run = [&](bool is_deterministic) {
    Instance instance("single_device", concat(R"({"threads": 4, "optimizer": {"name": "sgd"}, "deterministic": )",
                                              is_deterministic ? "true}" : "false}"));
    instance.setup(model_of<Indexing>().get());
    instance.train(batch_with(inputs), 1e-6);
    return model_bytes(instance.export_state());
  };
  const bool before = at::globalContext().deterministicAlgorithms();
  const std::string expected = run(true);
  for (int i = 0; i < 8; ++i) CHECK(run(true) == expected);
  CHECK(at::globalContext().deterministicAlgorithms() == before);
  bool differs = false;
  for (int i = 0; i < 50 && !differs; ++i) differs = run(false) != expected;
  CHECK(differs);  // else this test shows nothing
}

TEST_CASE("a host in inference mode, or under autocast, trains as any other") {
  const auto run = [](int mode) {
    Instance instance("single_device", sgd(1));
    const bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
    if (mode == 2) at::autocast::set_autocast_enabled(at::kCPU, true);
    {
      const c10::InferenceMode inference(mode == 1);
      instance.setup(model_of<Adversarial>(R"({"backward": false})").get());
      instance.train(batch_with(at::arange(0.5, 6.5).view({2, 3})), 0.01);
    }
    at::autocast::set_autocast_enabled(at::kCPU, autocast);
    instance.train(batch_with(at::arange(0.5, 6.5).view({2, 3})), 0.01);
    return model_bytes(instance.export_state());
  };
  const std::string expected = run(0);
  CHECK(run(1) == expected);
  CHECK(run(2) == expected);
}

TEST_CASE("replicas draw numbers of their own, and a resumed run goes on with them") {
  const at::Tensor rows = at::ones({2, 64});
  const auto losses = [&](Instance& instance) {
    const StepOutcome outcome = instance.train(batch_with(rows), 0.1);
    return numbers(*find(outcome.outputs.root(), "own"));
  };
  Instance whole("data_parallel", sgd(2, R"(, "seed": 5)"));
  whole.setup(model_of<Dropping>().get());
  const std::vector<double> first = losses(whole);
  REQUIRE(first.size() == 2);
  CHECK(first[0] != first[1]);  // of equal rows
  const Tree state = whole.export_state();
  const std::vector<double> second = losses(whole);
  Instance resumed("data_parallel", sgd(2, R"(, "seed": 6)"));
  resumed.setup(model_of<Dropping>().get(), STG_STAGE_FIT, copy_tree(state.root()));
  CHECK(losses(resumed) == second);
}

TEST_CASE("batch norm equals the same shares one after the other, replica 0's statistics kept") {
  Instance instance("data_parallel", sgd(2));
  instance.setup(model_of<Norm>().get());
  at::Tensor w = at::ones({2}).requires_grad_();
  at::Tensor mean = at::zeros({2});
  at::Tensor variance = at::ones({2});
  for (int step = 0; step < 3; ++step) {
    const at::Tensor inputs = at::arange(0, 14).view({7, 2}).mul(0.37F).add(step).sin();
    instance.train(batch_with(inputs), 0.1);
    at::Tensor loss;
    at::Tensor next_mean, next_variance;
    int64_t begin = 0;
    for (const int64_t size : {4, 3}) {
      at::Tensor own_mean = mean.clone();
      at::Tensor own_variance = variance.clone();
      const at::Tensor y =
          std::get<0>(at::native_batch_norm(inputs.narrow(0, begin, size), w, {}, own_mean, own_variance, true, 0.1, 1e-5));
      const at::Tensor part = y.pow(3).mean().mul(static_cast<double>(size) / 7);
      loss = loss.defined() ? loss + part : part;
      if (begin == 0) next_mean = own_mean, next_variance = own_variance;
      begin += size;
    }
    w = (w - torch::autograd::grad({loss}, {w})[0] * 0.1).detach().requires_grad_();
    mean = next_mean;
    variance = next_variance;
  }
  for (int i = 0; i < 2; ++i) {
    CHECK(instance.values("w")[static_cast<size_t>(i)] == Approx(w[i].item<float>()).epsilon(1e-5));
    CHECK(instance.values("mean")[static_cast<size_t>(i)] == Approx(mean[i].item<float>()).epsilon(1e-5));
    CHECK(instance.values("variance")[static_cast<size_t>(i)] == Approx(variance[i].item<float>()).epsilon(1e-5));
  }
}
