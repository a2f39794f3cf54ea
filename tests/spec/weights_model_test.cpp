// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Gradients", with models on LibTorch: sparse gradients, double backward, parameters of every kind, buffers.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <stdexcept>

#include "spec/own_model.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

std::string config(int num_devices, const std::string& optimizer) {
  return concat("{\"devices\": ", num_devices, ", \"threads\": ", num_devices, R"(, "precision": "64-true", "optimizer": )",
                optimizer, "}");
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

std::vector<double> elements(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().to(at::kDouble).contiguous().view(-1);
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

// Words are looked up, averaged, and told apart by a head, which may be the table itself.
class Words : public TensorModel {
 public:
  explicit Words(const nlohmann::json& options)
      : is_sparse_(options.value("sparse", true)), is_tied_(options.value("tied", false)) {
    table_ = register_parameter("table", at::arange(0, 120, at::kFloat).view({20, 6}).sin());
    head_ = is_tied_ ? table_ : register_parameter("head", at::arange(0, 120, at::kFloat).view({20, 6}).cos());
    if (is_tied_) register_parameter("head", table_);
  }
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor words = at::embedding(table_, batch["x"].tensor(), /*padding_idx=*/0, false, is_sparse_);
    return {{"loss", at::tanh(words.mean(1)).matmul(head_.t()).square().mean(1).mean()}, {"rows", batch["x"].tensor().size(0)}};
  }

 private:
  bool is_sparse_, is_tied_;
  at::Tensor table_, head_;
};

at::Tensor words(int step) { return at::arange(0, 35, at::kLong).view({7, 5}).mul(3 + step).remainder(19); }

// loss = mean of f + |df/dx|^2 / 4 with f = (w x)^2 for each sample x: the gradient with respect to the inputs is differentiated again.
class InputPenalty : public TensorModel {
 public:
  explicit InputPenalty(const nlohmann::json&) : w_(register_parameter("w", at::ones({3}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor x = batch["x"].tensor().detach().clone().requires_grad_();
    const at::Tensor f = x.matmul(w_).square();
    const at::Tensor gradient = torch::autograd::grad({f.sum()}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
    return f.add(gradient.square().sum(1), 0.25).mean();
  }

 private:
  at::Tensor w_;
};

// The same of the loss itself, with respect to the parameters: of a share's mean.
at::Tensor penalised(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) {
  const at::Tensor loss = at::tanh(x.matmul(w) + b).square().mean();
  at::Tensor penalty;
  for (const at::Tensor& gradient : torch::autograd::grad({loss}, {w, b}, {}, std::nullopt, /*create_graph=*/true)) {
    penalty = penalty.defined() ? penalty + gradient.square().sum() : gradient.square().sum();
  }
  return loss + penalty;
}

class ParameterPenalty : public TensorModel {
 public:
  explicit ParameterPenalty(const nlohmann::json&)
      : w_(register_parameter("w", at::ones({3}))), b_(register_parameter("b", at::zeros({1}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override { return penalised(batch["x"].tensor(), w_, b_); }

 private:
  at::Tensor w_, b_;
};

// "some" is used on replica 1 alone, and in every other step; "unused" never; "frozen" is used, and "tied" goes by two names.
class Various : public TensorModel {
 public:
  explicit Various(const nlohmann::json&)
      : tied_(register_parameter("tied", at::ones({1}))),
        some_(register_parameter("some", at::ones({1}))),
        frozen_(register_parameter("frozen", at::ones({1}).mul(3), /*requires_grad=*/false)) {
    register_parameter("unused", at::ones({1}).mul(5));
    register_parameter("tied_too", tied_);
  }
  StepOutput training_step(const Batch& batch, const StepContext& context) override {
    const at::Tensor x = batch["x"].tensor().mean();
    at::Tensor loss = (x * (tied_ * frozen_ + tied_)).sum();
    if (context.replica == 1 && num_steps_ % 2 == 0) loss = loss + (x * some_).sum();
    ++num_steps_;
    return {{"extra", x}, {"loss", loss}, {"words", std::string("done")}};
  }

 private:
  int num_steps_ = 0;
  at::Tensor tied_, some_, frozen_;
};

// Batch norm as torch.nn.BatchNorm1d has it. Fails on replica 1, after its buffers have moved, where an input is over 100.
class Norm : public TensorModel {
 public:
  explicit Norm(const nlohmann::json&)
      : w_(register_parameter("w", at::ones({2}))),
        mean_(register_buffer("running_mean", at::zeros({2}))),
        variance_(register_buffer("running_var", at::ones({2}))),
        count_(register_buffer("num_batches_tracked", at::zeros({}, at::kLong))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor x = batch["x"].tensor();
    count_.add_(1);
    const at::Tensor y = at::batch_norm(x, w_, {}, mean_, variance_, is_training(), 0.1, 1e-5, false);
    if (x.max().item<double>() > 100) throw std::runtime_error("an input is over 100");
    return y.pow(3).mean();
  }
  StepOutput validation_step(const Batch&, const StepContext&) override {
    return {{"count", count_.clone()}, {"mean", mean_.clone().unsqueeze(0)}, {"variance", variance_.clone().unsqueeze(0)}};
  }

 private:
  at::Tensor w_, mean_, variance_, count_;
};

// Linear(32, 2) without bias; the loss is the sum of its outputs.
class Sums : public TensorModel {
 public:
  explicit Sums(const nlohmann::json&) : weight_(register_parameter("weight", at::ones({2, 32}).mul(0.01))) {}
  uint64_t loss_kind() const override { return STG_LOSS_SUM; }
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    return at::linear(batch["x"].tensor(), weight_).sum();
  }

 private:
  at::Tensor weight_;
};

// Its head has no shape until somebody has seen the data.
class Lazy : public TensorModel {
 public:
  explicit Lazy(const nlohmann::json&) {
    register_parameter("body.weight", at::ones({2}));
    register_parameter("head.weight", at::Tensor());
  }
  StepOutput training_step(const Batch&, const StepContext&) override { return at::zeros({}); }
};

}  // namespace

TEST_CASE("an embedding's sparse gradients train as its dense ones, on any number of devices") {
  for (const std::string optimizer : {R"({"name": "sgd"})", R"({"name": "sgd", "momentum": 0.9, "nesterov": true})",
                                      R"({"name": "adagrad", "lr_decay": 0.1})"}) {
    std::vector<double> expected;
    for (const std::string options : {R"({"sparse": false})", R"({"sparse": true})"}) {
      for (const int num_devices : {1, 2, 3}) {
        Instance instance("data_parallel", config(num_devices, optimizer));
        instance.setup(model_of<Words>(options).get());
        for (int step = 0; step < 6; step += 2) {
          instance.accumulate(batch_with(words(step)));
          instance.train(batch_with(words(step + 1).narrow(0, 0, 4)), 0.5, STG_CLIP_NORM, 0.05);
        }
        const std::vector<double> table = instance.values("table");
        if (expected.empty()) expected = table;
        INFO(optimizer << ", " << options << ", " << num_devices << " devices");
        CHECK(largest_difference(table, expected) < 1e-13);
        CHECK(largest_difference(table, std::vector<double>(120, 0)) > 0.1);
      }
    }
  }
}

TEST_CASE("an embedding that is tied to a dense head has a dense gradient, which Adam takes, and another it refuses") {
  const std::string adam = config(2, R"({"name": "adam"})");
  std::vector<std::vector<double>> results;
  for (const std::string options : {R"({"tied": true, "sparse": true})", R"({"tied": true, "sparse": false})"}) {
    Instance instance("data_parallel", adam);
    instance.setup(model_of<Words>(options).get());
    for (int step = 0; step < 3; ++step) instance.train(batch_with(words(step)), 0.1);
    results.push_back(instance.values("table"));
  }
  CHECK(largest_difference(results[0], results[1]) < 1e-12);

  Instance instance("data_parallel", adam);
  instance.setup(model_of<Words>().get());
  const std::string before = model_bytes(instance.export_state());
  const Error error = error_of([&] { instance.train(batch_with(words(0)), 0.1); });
  CHECK(error.code == STG_FAILED_PRECONDITION);
  CHECK_THAT(error.message, Catch::Contains("parameter table has a sparse gradient, which adam doesn't take") &&
                                Catch::Contains("sparse=False"));
  CHECK(model_bytes(instance.export_state()) == before);
}

TEST_CASE("a gradient penalty, differentiated twice, trains as worked out by hand under both strategies") {
  for (const std::string strategy : {"single_device", "data_parallel"}) {
    for (const int num_devices : {1, 2, 3}) {
      if (strategy == "single_device" && num_devices > 1) continue;
      Instance instance(strategy, config(num_devices, R"({"name": "sgd"})"));
      instance.setup(model_of<InputPenalty>().get());
      std::vector<double> w(3, 1);
      for (int step = 0; step < 4; ++step) {
        const at::Tensor inputs = at::arange(0, 21, at::kDouble).view({7, 3}).mul(0.3).add(step).sin();
        instance.train(batch_with(inputs), 0.05);
        // With s = w x: f = s^2, df/dx = 2 s w, so the loss is s^2 (1 + |w|^2), and its gradient 2 s (1 + |w|^2) x + 2 s^2 w.
        const double squares = w[0] * w[0] + w[1] * w[1] + w[2] * w[2];
        std::vector<double> gradient(3);
        const std::vector<double> x = elements(inputs);
        for (size_t i = 0; i < 7; ++i) {
          const double s = w[0] * x[3 * i] + w[1] * x[3 * i + 1] + w[2] * x[3 * i + 2];
          for (size_t c = 0; c < 3; ++c) gradient[c] += (2 * s * (1 + squares) * x[3 * i + c] + 2 * s * s * w[c]) / 7;
        }
        for (size_t c = 0; c < 3; ++c) w[c] -= 0.05 * gradient[c];
      }
      CHECK(largest_difference(instance.values("w"), w) < 1e-12);
      CHECK(std::abs(w[0] - 1) > 0.1);
    }
  }
}

TEST_CASE("a penalty on the gradient of the parameters equals the same shares one after the other") {
  Instance instance("data_parallel", config(2, R"({"name": "sgd"})"));
  instance.setup(model_of<ParameterPenalty>().get());
  at::Tensor w = at::ones({3}, at::kDouble).requires_grad_();
  at::Tensor b = at::zeros({1}, at::kDouble).requires_grad_();
  for (int step = 0; step < 4; ++step) {
    const at::Tensor inputs = at::arange(0, 21, at::kDouble).view({7, 3}).mul(0.7).add(step).sin();
    instance.train(batch_with(inputs), 0.5);
    const at::Tensor loss =
        penalised(inputs.narrow(0, 0, 4), w, b).mul(4.0 / 7) + penalised(inputs.narrow(0, 4, 3), w, b).mul(3.0 / 7);
    const auto gradients = torch::autograd::grad({loss}, {w, b});
    w = (w - gradients[0] * 0.5).detach().requires_grad_();
    b = (b - gradients[1] * 0.5).detach().requires_grad_();
  }
  CHECK(largest_difference(instance.values("w"), elements(w)) < 1e-12);
  CHECK(largest_difference(instance.values("b"), elements(b)) < 1e-12);
}

TEST_CASE("clipping by norm and by value at half the true size halves the update of a model on LibTorch, in every precision") {
  for (const std::string precision : {"32-true", "64-true", "bf16-mixed", "16-mixed"}) {
    for (const int num_devices : {1, 2}) {
      for (const uint64_t clip : {STG_CLIP_NORM, STG_CLIP_VALUE}) {
        Instance instance("data_parallel", concat("{\"devices\": ", num_devices, R"(, "precision": ")", precision,
                                                  R"(", "optimizer": {"name": "sgd"}})"));
        instance.setup(model_of<Sums>().get());
        const at::Tensor inputs = at::ones({4, 32}).mul(0.1);
        // Each of the 64 entries has the gradient 4 * 0.1, with 0.1 in the precision's type.
        const auto type = precision == "bf16-mixed" ? at::kBFloat16 : precision == "16-mixed" ? at::kHalf : at::kDouble;
        const double entry = 4 * inputs.to(type).to(at::kDouble).select(0, 0).select(0, 0).item<double>();
        // A scale of 65536 is more than float16 has: in 16-mixed the first update is skipped.
        const double limit = clip == STG_CLIP_NORM ? entry * 8 / 2 : entry / 2;
        const uint64_t outcome = instance.train(batch_with(inputs), 1, clip, limit).update.outcome;
        CHECK(outcome == (precision == "16-mixed" ? STG_UPDATE_SKIPPED_OVERFLOW : STG_UPDATE_DONE));
        if (outcome != STG_UPDATE_DONE) instance.train(batch_with(inputs), 1, clip, limit);
        INFO(precision << " on " << num_devices);
        CHECK(largest_difference(instance.values("weight"), std::vector<double>(64, 0.01 - entry / 2)) < 1e-7);
      }
    }
  }
}

TEST_CASE("a parameter that is not materialised yet is an error at setup that names it, and another model may follow") {
  for (const std::string strategy : {"single_device", "data_parallel"}) {
    Instance instance(strategy, config(strategy == "single_device" ? 1 : 2, R"({"name": "sgd"})"));
    for (const uint64_t stage : {STG_STAGE_FIT, STG_STAGE_PREDICT}) {
      const Error error = error_of([&] { instance.setup(model_of<Lazy>().get(), stage); });
      CHECK(error.code == STG_INVALID_ARGUMENT);
      CHECK_THAT(error.message, Catch::Contains("head.weight") && Catch::Contains("no shape yet"));
    }
    instance.setup(model_of<InputPenalty>().get());
    instance.train(batch_with(at::ones({2, 3})), 0.01);
    CHECK(instance.value("w") < 1);
  }
}

TEST_CASE("tied, frozen and unused parameters of a model whose loss is in a dict are each what the rules say") {
  const auto model = model_of<Various>();
  for (const int num_devices : {1, 2}) {
    Instance instance("data_parallel", config(num_devices, R"({"name": "sgd", "momentum": 0.5, "weight_decay": 0.25})"));
    instance.setup(model.get());
    double tied = 1, some = 1, tied_buffer = 0, some_buffer = 0;
    for (int step = 0; step < 4; ++step) {
      const double lr = 0.125;
      const StepOutcome outcome = instance.train(batch_with(at::arange(1, 4, at::kDouble)), lr);
      // The mean of 1, 2 and 3; the shares are 1, 2 and 3.
      CHECK(outcome.loss() == Approx(2 * 4 * tied + (num_devices == 2 && step % 2 == 0 ? 3 * some / 3 : 0)));
      CHECK(numbers(*find(outcome.outputs.root(), "extra")) ==
            (num_devices == 1 ? std::vector<double>{2} : std::vector<double>{1.5, 3}));
      tied_buffer = 0.5 * tied_buffer + 2 * 4 + 0.25 * tied;
      tied -= lr * tied_buffer;
      if (num_devices == 1 || step % 2 == 1) continue;  // passed over, momentum and weight decay too
      some_buffer = 0.5 * some_buffer + 3.0 / 3 + 0.25 * some;
      some -= lr * some_buffer;
    }
    CHECK(instance.value("tied") == Approx(tied).epsilon(1e-14));
    CHECK(instance.value("some") == Approx(some).epsilon(1e-14));
    CHECK(instance.value("frozen") == 3);
    CHECK(instance.value("unused") == 5);
    const Tree state = instance.export_state();
    const stg_value& slots = *find(*find(state.root(), "optimizer"), "per_parameter");
    CHECK(find(slots, "tied") != nullptr);
    CHECK((find(slots, "some") != nullptr) == (num_devices == 2));
    CHECK(slots.count == static_cast<uint32_t>(num_devices));
    CHECK(text_of(*find(*find(state.root(), "aliases"), "tied_too")) == "tied");
    CHECK(find(*find(state.root(), "model"), "tied_too") == nullptr);
  }
}

TEST_CASE("batch norm's buffers are replica 0's, its int64 count too, in each micro-batch, and put back after a failed step") {
  for (const int num_devices : {1, 2, 3}) {
    Instance instance("data_parallel", config(num_devices, R"({"name": "sgd"})"));
    instance.setup(model_of<Norm>().get());
    at::Tensor mean = at::zeros({2}, at::kDouble);
    at::Tensor variance = at::ones({2}, at::kDouble);
    const auto check_all_replicas = [&](int64_t count) {
      const StepOutcome outcome = instance.validate(batch_with(at::ones({6, 2})));
      const stg_value& counts = *find(outcome.outputs.root(), "count");
      CHECK(counts.as.tensor->view.dtype.code == STG_DTYPE_INT);
      CHECK(numbers(counts) == std::vector<double>(static_cast<size_t>(num_devices), static_cast<double>(count)));
      std::vector<double> means, variances;
      for (int i = 0; i < num_devices; ++i) {
        for (const double value : elements(mean)) means.push_back(value);
        for (const double value : elements(variance)) variances.push_back(value);
      }
      CHECK(largest_difference(numbers(*find(outcome.outputs.root(), "mean")), means) < 1e-14);
      CHECK(largest_difference(numbers(*find(outcome.outputs.root(), "variance")), variances) < 1e-14);
    };
    for (int64_t batch = 0; batch < 4; ++batch) {
      const at::Tensor inputs = at::arange(0, 14, at::kDouble).view({7, 2}).mul(0.37).add(batch).sin();
      if (batch == 2) {
        // A replica that fails has moved its own buffers, and replica 0 its own.
        instance.accumulate(batch_with(inputs.mul(0)));
        mean.mul_(0.9);
        variance.mul_(0.9);
        at::Tensor bad = inputs.clone();
        bad.select(0, 6).fill_(101);
        CHECK_THAT(error_of([&] { instance.train(batch_with(bad)); }).message, Catch::Contains("an input is over 100"));
        check_all_replicas(batch + 1);
      }
      if (batch % 2 == 0) {
        instance.accumulate(batch_with(inputs));
      } else {
        instance.train(batch_with(inputs), 0.1);
      }
      const at::Tensor share = inputs.narrow(0, 0, num_devices == 1 ? 7 : num_devices == 2 ? 4 : 3);
      mean.mul_(0.9).add_(share.mean(0), 0.1);
      variance.mul_(0.9).add_(share.var(0, /*unbiased=*/true), 0.1);
      check_all_replicas(batch + 1 + (batch >= 2 ? 1 : 0));
    }
    const Tree state = instance.export_state();
    const stg_value& count = *find(*find(state.root(), "model"), "num_batches_tracked");
    CHECK((count.as.tensor->view.dtype.code == STG_DTYPE_INT && count.as.tensor->view.num_dims == 0));
    CHECK(numbers(count) == std::vector<double>{5});
  }
}
