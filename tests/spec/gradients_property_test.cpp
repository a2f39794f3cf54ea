// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Gradients": for any window, several devices' gradients are one device's on the union of its micro-batches.
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <numeric>

#include "model/tensor_model.hpp"
#include "spec/distance.hpp"
#include "spec/instance.hpp"
//
#include "spec/property.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

// Two layers over three positive inputs, with targets out of reach: no two samples' gradients cancel each other, so rounding errors stay
// in proportion. The loss is the mean or sum over the rows, or the mean over those whose mask isn't 0.
class Samples : public TensorModel {
 public:
  explicit Samples(const nlohmann::json& options)
      : loss_(options["loss"]),
        first_(register_parameter("first", at::zeros({3, 5}).uniform_(0.1, 0.5))),
        bias_(register_parameter("bias", at::zeros({5}).uniform_(-0.5, 0.5))),
        second_(register_parameter("second", at::zeros({5}).uniform_(0.1, 0.5))) {}
  uint64_t loss_kind() const override { return loss_ == "sum" ? STG_LOSS_SUM : STG_LOSS_MEAN; }
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor predicted = at::tanh(batch["x"].tensor().matmul(first_).add(bias_)).matmul(second_);
    const at::Tensor losses = predicted.sub(5).pow(2);
    if (loss_ == "sum") return losses.sum();
    if (loss_ == "mean") return losses.mean();
    const at::Tensor mask = batch["mask"].tensor();
    const at::Tensor count = mask.sum();
    StepOutput output(losses.mul(mask).sum().div(count));
    if (loss_ == "masked") return std::move(output).over(count);
    return std::move(output).over(count.item<double>());
  }

 private:
  std::string loss_;
  at::Tensor first_, bias_, second_;
};

ModelPtr samples_model(const std::string& loss) {
  const stg_model* made = nullptr;
  const std::string options = concat("{\"loss\": \"", loss, "\"}");
  check(sdk::create_model("samples", sdk::model_class<Samples>, to_abi(options), nullptr, &made));
  return ModelPtr{made};
}

struct GradientCase {
  std::vector<int64_t> sizes;  // of a window's micro-batches
  int64_t num_devices = 1;
  std::string loss;
  bool is_double = true;
  bool in_chunks = false;
  int64_t kept_percent = 100;  // of the mask
  unsigned content = 0;

  static GradientCase draw(Random& random) {
    GradientCase made;
    for (int64_t i = draw_between(random, 1, 5); i-- > 0;) made.sizes.push_back(draw_between(random, 1, 30));
    made.num_devices = draw_between(random, 1, 16);
    made.loss =
        std::vector<std::string>{"mean", "sum", "masked", "masked, a number"}[static_cast<size_t>(draw_between(random, 0, 3))];
    made.is_double = draw_chance(random, 50);
    made.in_chunks = draw_chance(random, 30);
    made.kept_percent = draw_between(random, 0, 3) * 30;
    made.content = static_cast<unsigned>(random());
    return made;
  }

  std::string text() const {
    return concat("micro-batches of ", list_text(sizes), " rows over ", num_devices, " devices", in_chunks ? " in chunks" : "",
                  ", loss ", loss, " (", kept_percent, " % kept), ", is_double ? "64-true" : "32-true", ", content ", content);
  }

  std::vector<GradientCase> simpler() const {
    std::vector<GradientCase> out;
    if (sizes.size() > 1) leave_one_out(out, *this, &GradientCase::sizes);
    const auto add = [&](auto change) {
      out.push_back(*this);
      change(out.back());
    };
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] > 1) add([i](GradientCase& next) { next.sizes[i] /= 2; });
    }
    if (num_devices > 1) add([](GradientCase& next) { next.num_devices -= 1; });
    return out;
  }

  // Micro-batch i; all of them in one, for i = sizes.size().
  Tree batch(size_t i) const {
    std::vector<double> x, mask;
    for (size_t part = 0; part < sizes.size(); ++part) {
      std::seed_seq seeds{content, static_cast<unsigned>(part)};
      Random random(seeds);
      std::uniform_real_distribution<double> positive(0.5, 1.5);
      for (int64_t row = 0; row < sizes[part]; ++row) {
        const bool is_wanted = part == i || i == sizes.size();
        for (int column = 0; column < 3; ++column) {
          const double value = positive(random);
          if (is_wanted) x.push_back(value);
        }
        const bool is_kept = draw_chance(random, static_cast<int>(kept_percent));
        if (is_wanted) mask.push_back(is_kept ? 1 : 0);
      }
    }
    const auto num_rows = static_cast<int64_t>(mask.size());
    Dict dict;
    dict.emplace_back("x", tensor_of(x, {num_rows, 3}, is_double ? float64 : float32));
    dict.emplace_back("mask", tensor_of(mask, {num_rows}));
    return make_tree(std::move(dict));
  }

  std::string failure() const {
    const ModelPtr model = samples_model(loss);
    const std::string precision = is_double ? R"(, "precision": "64-true")" : "";
    Instance one("single_device", sgd_config(1, precision));
    Instance whole("single_device", sgd_config(1, precision));
    Instance several("data_parallel",
                     sgd_config(static_cast<size_t>(num_devices), concat(precision, R"(, "threads": 1, "options": {"split": ")",
                                                                         in_chunks ? "chunk" : "balanced", "\"}")));
    for (Instance* each : {&one, &whole, &several}) each->setup(model.get());
    for (size_t i = 0; i < sizes.size(); ++i) {
      const StepOutcome expected = one.training_step(batch(i));
      const StepOutcome found = several.training_step(batch(i));
      const auto sum = [](const StepOutcome& outcome) {
        return std::accumulate(outcome.weights.begin(), outcome.weights.end(), 0.0);
      };
      if (sum(expected) != sum(found))
        return concat("the weights of micro-batch ", i, " add up to ", sum(found), ", not ", sum(expected));
      const bool counts_rows = loss == "mean" || loss == "sum";
      if (counts_rows && sum(found) != static_cast<double>(sizes[i])) return concat("the weights add up to ", sum(found));
      const double difference = std::abs(found.loss() - expected.loss());
      if (!(difference <= 1e-5 * std::abs(expected.loss())) && sum(found) != 0)
        return concat("the losses differ by ", difference);
      one.backward(i + 1 == sizes.size());
      several.backward(i + 1 == sizes.size());
    }
    whole.training_step(batch(sizes.size()));
    whole.backward(true);
    const double tolerance = is_double ? 1e-12 : 1e-5;
    const Tree expected = whole.gradients();
    for (Instance* each : {&one, &several}) {
      const double found = distance(each->gradients().root(), expected.root());
      if (!(found < tolerance))
        return concat(each == &one ? "one device" : "several devices", ": the gradients differ by ", found);
    }
    // The weights, over their total, add up to one: so do the parts of a constant gradient.
    const double total = whole.optimizer_step().total_weight;
    for (Instance* each : {&one, &several}) {
      if (each->optimizer_step().total_weight != total) return "the windows' total weights differ";
    }
    return {};
  }
};

}  // namespace

TEST_CASE(
    "any window's gradients are one device's on the union of its micro-batches, whatever the sizes, denominators and devices") {
  check_cases<GradientCase>(num_cases(40));
}
