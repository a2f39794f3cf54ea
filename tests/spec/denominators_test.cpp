// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Gradients": who reports denominators and who doesn't, in one step and over a window; the norm; the window's end.
#include <cmath>

#include "spec/instance.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::string precise = R"(, "precision": "64-true")";

// The loss of a sample is w * x; the step gives their mean or sum, and the denominator that the test says (none: none).
std::unique_ptr<ToyModel> reporting_model(uint64_t loss_kind, std::function<Value(int32_t replica)> denominator) {
  auto model = std::make_unique<ToyModel>(std::vector<ToyParameter>{{{"weight"}, {1}, {0}}},
                                          [=](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
                                            double value = 0;
                                            for (int64_t i = 0; i < num_rows(batch, "x"); ++i) value += element(batch, "x", i);
                                            ToyStep step;
                                            step.denominator = denominator(context.replica);
                                            if (loss_kind == STG_LOSS_MEAN) value /= static_cast<double>(num_rows(batch, "x"));
                                            if (const auto* over = std::get_if<double>(&step.denominator.data);
                                                over != nullptr && loss_kind == STG_LOSS_SUM)
                                              value /= *over;
                                            step.outputs = scalar(replica.value(0, 0) * value, float64);
                                            step.gradients = {{value}};
                                            return step;
                                          });
  model->loss_kind = loss_kind;
  return model;
}

}  // namespace

TEST_CASE("with a mean loss, shares that report no denominator count their rows") {
  const auto model = reporting_model(STG_LOSS_MEAN, [](int32_t replica) { return replica == 0 ? Value(6.0) : Value(); });
  Instance instance("data_parallel", sgd_config(2, precise));
  instance.setup(*model);
  const StepOutcome outcome = instance.train(batch_of({1, 3, 8, 10}));
  CHECK(outcome.weights == std::vector<double>{6, 2});
  CHECK(instance.value("weight") == -(6 * 2.0 + 2 * 9.0) / 8);
  instance.accumulate(batch_of({1, 1}));
  CHECK(instance.train(batch_of({1, 1})).update.total_weight == 14);
}

TEST_CASE("a step's own denominators are the weights of evaluation, too") {
  const auto model = reporting_model(STG_LOSS_MEAN, [](int32_t replica) { return replica == 0 ? Value(6.0) : Value(); });
  for (const std::string strategy : {"single_device", "data_parallel"}) {
    const bool is_single = strategy == "single_device";
    Instance instance(strategy, sgd_config(is_single ? 1 : 2, precise));
    instance.setup(*model, STG_STAGE_VALIDATE);
    for (const auto function : {instance.api.validation_step, instance.api.test_step, instance.api.predict_step}) {
      const StepOutcome outcome = instance.evaluate(function, batch_of({1, 3, 8}));
      CHECK(outcome.weights == (is_single ? std::vector<double>{6} : std::vector<double>{6, 1}));
    }
  }
}

TEST_CASE("a denominator makes a loss that is a sum a mean over it") {
  for (const int num_devices : {1, 2}) {
    const auto model = reporting_model(STG_LOSS_SUM, [=](int32_t replica) {
      return Value(num_devices == 1 ? 8.0 : replica == 0 ? 3.0 : 5.0);
    });
    Instance instance("data_parallel", sgd_config(static_cast<size_t>(num_devices), precise));
    instance.setup(*model);
    const StepOutcome outcome = instance.train(batch_of({1, 3, 8, 12}));
    CHECK(outcome.update.total_weight == 8);
    CHECK(instance.value("weight") == Approx(-24.0 / 8).epsilon(1e-15));
  }
}

TEST_CASE("where a loss is a sum all shares of a window report a denominator, or none does") {
  for (const int32_t reporting : {0, 1}) {
    const auto model =
        reporting_model(STG_LOSS_SUM, [=](int32_t replica) { return replica == reporting ? Value(2.0) : Value(); });
    Instance instance("data_parallel", sgd_config(2));
    instance.setup(*model);
    const Error error = error_of([&] { instance.train(batch_of({1, 1})); });
    CHECK(error.code == STG_INVALID_ARGUMENT);
    CHECK_THAT(error.message, Catch::Contains("replica 1") && Catch::Contains("denominator") && Catch::Contains("a sum") &&
                                  Catch::Contains(reporting == 1 ? "replica 0 none" : "replica 0 one"));
    CHECK(instance.value("weight") == 0);
  }
  for (const bool reports_first : {true, false}) {
    bool reports = reports_first;
    const auto model = reporting_model(STG_LOSS_SUM, [&](int32_t) { return reports ? Value(2.0) : Value(); });
    Instance instance("data_parallel", sgd_config(2));
    instance.setup(*model);
    instance.accumulate(batch_of({1, 1}));
    reports = !reports;
    const Error error = error_of([&] { instance.train(batch_of({1, 1})); });
    CHECK(error.code == STG_INVALID_ARGUMENT);
    CHECK_THAT(error.message, Catch::Contains("micro-batch") && Catch::Contains("denominators") && Catch::Contains("earlier"));
    CHECK(instance.value("weight") == 0);
    CHECK(instance.status().num_micro_batches == 0);
    instance.train(batch_of({1, 1}));
    CHECK(instance.value("weight") == (reports ? -0.5 : -2));
  }
}

TEST_CASE("a window's micro-batches are weighted by their denominators, whatever the number of devices") {
  // The mean of w * x over the rows whose x isn't 0: 1 + 2 + 3 + 40 + 5 over 5 of them.
  const std::vector<ToyParameter> parameters{{{"weight"}, {1}, {0}}};
  ToyModel model(parameters, [](ToyReplica& replica, const stg_step_context&, const stg_value& batch) {
    double sum = 0;
    double count = 0;
    for (int64_t i = 0; i < num_rows(batch, "x"); ++i) {
      sum += element(batch, "x", i);
      count += element(batch, "x", i) != 0 ? 1 : 0;
    }
    ToyStep step;
    step.outputs = scalar(replica.value(0, 0) * sum / count, float64);
    step.denominator = count;
    step.gradients = {{sum / count}};
    return step;
  });
  for (const size_t num_devices : {1, 2, 4}) {
    Instance instance("data_parallel", sgd_config(num_devices, precise));
    instance.setup(model);
    instance.accumulate(batch_of({1, 2, 0, 3}));
    instance.accumulate(batch_of({0, 0, 0, 0}));
    instance.accumulate(batch_of({0, 40, 0, 0}));
    const StepOutcome outcome = instance.train(batch_of({0, 0, 0, 5}));
    CHECK(outcome.update.total_weight == 5);
    CHECK(outcome.update.outcome == STG_UPDATE_DONE);
    CHECK(instance.value("weight") == Approx(-51.0 / 5).epsilon(1e-15));
  }
}

TEST_CASE("compat lightning passes over denominators, and over whether a loss is a sum") {
  for (const uint64_t kind : {STG_LOSS_MEAN, STG_LOSS_SUM}) {
    const auto model = reporting_model(kind, [](int32_t replica) { return replica == 0 ? Value(1.0) : Value(); });
    Instance instance("data_parallel", sgd_config(2, precise + R"(, "options": {"compat": "lightning"})"));
    instance.setup(*model);
    instance.accumulate(batch_of({1, 3, 8}));
    instance.train(batch_of({5}));
    const double first = kind == STG_LOSS_MEAN ? (2 + 8) / 2.0 : (4 + 8) / 2.0;
    CHECK(instance.value("weight") == -(first + 5) / 2);
  }
}

TEST_CASE("the norm is summed in float64 and doesn't depend on the number of workers, and clipping leaves just the limit") {
  const int64_t numel = 50021;
  std::vector<double> gradient(static_cast<size_t>(numel));
  for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = std::sin(static_cast<double>(i)) * (i % 1000 == 0 ? 1e4 : 1);
  ToyParameter weight{{"weight"}, {numel}, std::vector<double>(gradient.size(), 0)};
  const std::vector<ToyParameter> parameters{weight, {{"other"}, {3}, {0, 0, 0}}};
  ToyModel model(parameters, [&](ToyReplica&, const stg_step_context&, const stg_value&) {
    ToyStep step;
    step.outputs = scalar(0);
    step.gradients = {gradient, {1, 2, 3}};
    return step;
  });
  for (const std::string precision : {"32-true", "64-true"}) {
    double squares = 1 + 4 + 9;
    for (const double g : gradient)
      squares += precision == "32-true" ? std::pow(static_cast<double>(static_cast<float>(g)), 2) : g * g;
    std::vector<double> norms;
    for (const size_t num_devices : {1, 2, 3, 7}) {
      Instance instance("data_parallel", sgd_config(num_devices, R"(, "precision": ")" + precision + "\""));
      instance.setup(model);
      // One row: one replica runs, all workers reduce.
      norms.push_back(instance.train(batch_of({1}), 1, STG_CLIP_NORM, 2).update.gradient_norm);
      CHECK(norms.back() == norms.front());
      double moved = 0;
      for (const double value : instance.values("weight")) moved += value * value;
      for (const double value : instance.values("other")) moved += value * value;
      CHECK(std::sqrt(moved) == Approx(2).epsilon(precision == "32-true" ? 1e-6 : 1e-14));
    }
    CHECK(norms.front() == Approx(std::sqrt(squares)).epsilon(1e-13));
  }
  const auto small = linear_model(0, float64);
  Instance instance("single_device", sgd_config(1, precise));
  instance.setup(*small);
  instance.train(batch_of({0.001}, float64), 1, STG_CLIP_NORM, 0.0005);
  CHECK(instance.value("weight") == Approx(-0.0005).epsilon(1e-14));
}

TEST_CASE("once the gradients of a window are reduced it takes no more micro-batches") {
  const auto model = linear_model();
  for (const bool asks : {true, false}) {
    Instance instance("data_parallel", sgd_config(2));
    instance.setup(*model);
    const auto reduce = [&] {
      instance.training_step(batch_of({1, 1}));
      instance.backward(!asks);
      if (asks) instance.gradients();
    };
    reduce();
    const Error batch = error_of([&] { instance.train(batch_of({1, 1})); });
    instance.training_step(batch_of({1, 1}));
    const Error backward = error_of([&] { instance.backward(false); });
    for (const Error& error : {batch, backward}) {
      CHECK(error.code == STG_FAILED_PRECONDITION);
      CHECK_THAT(error.message,
                 Catch::Contains("were reduced") && Catch::Contains("optimizer_step") && Catch::Contains("zero_grad"));
    }
    // What was reduced is still there.
    CHECK(instance.optimizer_step().outcome == STG_UPDATE_DONE);
    CHECK(instance.value("weight") == -1);
    instance.train(batch_of({1, 1}));
    CHECK(instance.value("weight") == -2);
  }
}
