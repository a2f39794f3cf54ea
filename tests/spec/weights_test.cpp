// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Gradients": weights, denominators, accumulation, clipping.
#include <cmath>
#include <limits>

#include "spec/instance.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::string lightning = R"(, "options": {"compat": "lightning"})";

// A masked loss: the mean of w*x over the rows whose x isn't 0, with their number as the denominator.
std::unique_ptr<ToyModel> masked_model(bool as_tensor = false) {
  std::vector<ToyParameter> parameters{{{"weight"}, {1}, {1}}};
  return std::make_unique<ToyModel>(parameters,
                                    [as_tensor](ToyReplica& replica, const stg_step_context&, const stg_value& batch) {
                                      double sum = 0;
                                      double count = 0;
                                      for (int64_t i = 0; i < num_rows(batch, "x"); ++i) {
                                        const double x = element(batch, "x", i);
                                        sum += x;
                                        count += x != 0 ? 1 : 0;
                                      }
                                      ToyStep step;
                                      step.outputs = scalar(replica.value(0, 0) * sum / count);  // 0/0 without rows
                                      if (as_tensor) {
                                        step.denominator = scalar(count);
                                      } else {
                                        step.denominator = count;
                                      }
                                      step.gradients = {{sum / count}};
                                      return step;
                                    });
}

}  // namespace

TEST_CASE("a mean loss over unequal shares has the gradient of the whole batch") {
  const auto model = linear_model();
  Instance instance("data_parallel", sgd_config(2));
  instance.setup(*model);
  const StepOutcome outcome = instance.train(batch_of({0, 0, 3}));
  CHECK(instance.value("weight") == -1.0);
  CHECK(outcome.weights == std::vector<double>{2, 1});
  CHECK(outcome.update.total_weight == 3);
  CHECK(outcome.update.outcome == STG_UPDATE_DONE);
}

TEST_CASE("a loss that is a sum has the plain sum of gradients") {
  std::vector<ToyParameter> parameters{{{"weight"}, {1}, {1}}};
  ToyModel model(parameters, [](ToyReplica& replica, const stg_step_context&, const stg_value& batch) {
    double sum = 0;
    for (int64_t i = 0; i < num_rows(batch, "x"); ++i) sum += element(batch, "x", i);
    ToyStep step;
    step.outputs = scalar(replica.value(0, 0) * sum);
    step.gradients = {{sum}};
    return step;
  });
  model.loss_kind = STG_LOSS_SUM;
  for (const size_t devices : {1, 2, 3}) {
    Instance instance("data_parallel", sgd_config(devices));
    instance.setup(model);
    const StepOutcome outcome = instance.train(batch_of({0, 1, 3}));
    CHECK(outcome.loss() == 4);
    CHECK(instance.value("weight") == 1 - 4);
  }
}

TEST_CASE("compat lightning takes the mean over the shares that ran") {
  const auto model = linear_model(1);
  Instance instance("data_parallel", sgd_config(2, lightning));
  instance.setup(*model);
  const StepOutcome outcome = instance.train(batch_of({0, 0, 3}));
  CHECK(outcome.loss() == 1.5);
  CHECK(instance.value("weight") == 1 - 1.5);
}

TEST_CASE("compat lightning takes the mean of a window's micro-batches, each counting alike") {
  const auto model = linear_model();
  Instance instance("data_parallel", sgd_config(2, lightning));
  instance.setup(*model);
  instance.accumulate(batch_of({1, 1, 3, 3}));
  instance.train(batch_of({5}));
  CHECK(instance.value("weight") == -((1.0 + 3.0) / 2 + 5.0) / 2);
}

TEST_CASE("a step's own denominators are the weights") {
  // 7 of 8 in one share, 2 of 8 in the other: the mean over 9.
  const std::vector<double> tokens{1, 2, 3, 4, 5, 6, 7, 0, 8, 0, 0, 0, 9, 0, 0, 0};
  for (const bool as_tensor : {false, true}) {
    const auto model = masked_model(as_tensor);
    Instance instance("data_parallel", sgd_config(2, R"(, "precision": "64-true")"));
    instance.setup(*model);
    const StepOutcome outcome = instance.train(batch_of(tokens));
    CHECK(outcome.weights == std::vector<double>{7, 2});
    CHECK(outcome.loss() == Approx(45.0 / 9).epsilon(1e-6));
    CHECK(instance.value("weight") == Approx(1 - 45.0 / 9).epsilon(1e-12));
  }
}

TEST_CASE("a share with denominator 0 contributes nothing, not even a NaN") {
  const auto model = masked_model();
  int num_backwards = 0;
  model->on_backward = [&](ToyReplica&) { ++num_backwards; };
  Instance instance("data_parallel", sgd_config(2));
  instance.setup(*model);
  const StepOutcome outcome = instance.train(batch_of({0, 0, 2, 4}));
  CHECK(outcome.weights == std::vector<double>{0, 2});
  CHECK(outcome.loss() == 3);
  CHECK(instance.value("weight") == 1 - 3);
  CHECK(num_backwards == 1);
  CHECK(model->num_graphs == 0);
}

TEST_CASE("a total denominator of 0 skips the update with a warning") {
  LoggingHost host;
  const auto model = masked_model();
  Instance instance("data_parallel", sgd_config(2), &host.table);
  instance.setup(*model);
  const StepOutcome outcome = instance.train(batch_of({0, 0, 0, 0}));
  CHECK(outcome.update.outcome == STG_UPDATE_SKIPPED_NO_WEIGHT);
  CHECK(outcome.update.total_weight == 0);
  CHECK(instance.value("weight") == 1);
  CHECK(instance.status().num_updates == 0);
  REQUIRE(host.messages.size() == 1);
  CHECK_THAT(host.messages[0], Catch::Contains("denominators"));
  // Nothing was measured where nothing is clipped.
  CHECK(std::isnan(instance.train(batch_of({0, 0}), 1, STG_CLIP_NORM, 1).update.gradient_norm));
  instance.accumulate(batch_of({0, 0}));
  CHECK(std::isnan(instance.optimizer_step(1, STG_CLIP_NORM, 1).gradient_norm));
  host.messages.clear();
  // The same through the single functions; and the next window is not poisoned.
  instance.training_step(batch_of({0, 0}));
  instance.backward(true);
  CHECK(instance.optimizer_step().outcome == STG_UPDATE_SKIPPED_NO_WEIGHT);
  instance.train(batch_of({2, 2}));
  CHECK(instance.value("weight") == 1 - 2);
}

TEST_CASE("a denominator that is negative, NaN or no number is an error") {
  for (const double bad : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    const auto model = linear_model();
    const auto step = model->on_step;
    model->on_step = [step, bad](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
      ToyStep made = step(replica, context, batch);
      made.denominator = bad;
      return made;
    };
    Instance instance("single_device", sgd_config(1));
    instance.setup(*model);
    CHECK_THAT(error_of([&] { instance.train(batch_of({1})); }).message, Catch::Contains("denominator"));
    CHECK(instance.value("weight") == 0);
  }
}

TEST_CASE("accumulating micro-batches of 5, 5 and 2 equals one batch of 12") {
  const std::vector<double> x{1, -2, 3, 4, 5, 6, 7, 8, 9, 10, 11, -12};
  const double mean = 50.0 / 12;
  for (const size_t devices : {1, 2, 3}) {
    const auto model = linear_model(0.5);
    Instance instance("data_parallel", sgd_config(devices, R"(, "precision": "64-true")"));
    instance.setup(*model);
    instance.accumulate(batch_of({x.begin(), x.begin() + 5}));
    instance.accumulate(batch_of({x.begin() + 5, x.begin() + 10}));
    CHECK(instance.status().num_micro_batches == 2);
    CHECK(instance.value("weight") == 0.5);
    const StepOutcome outcome = instance.train(batch_of({x.begin() + 10, x.end()}));
    CHECK(outcome.update.total_weight == 12);
    CHECK(instance.value("weight") == Approx(0.5 - mean).epsilon(1e-12));
    CHECK(instance.status().num_micro_batches == 0);
    CHECK(instance.status().num_updates == 1);
  }
}

TEST_CASE("gradients that lie in the model's own memory, without a deleter, are accumulated like any other") {
  const auto model = linear_model();
  model->table.backward = [](void* self, stg_replica* replica, stg_graph* graph, double scale, uint32_t,
                             const stg_gradient_sink* sink) {
    static const auto original = linear_model()->table.backward;
    struct Own {
      const stg_gradient_sink* sink;
      float memory = 0;
      TensorPtr tensor = make_tensor(nullptr, &memory, float32, {1});
      stg_tensor lent = *tensor;
    };
    static Own own;
    own.sink = sink;
    stg_gradient_sink between = sized<stg_gradient_sink>();
    between.ready = [](void*, uint64_t index, stg_tensor* gradient, const stg_stream*) {
      const TensorPtr given{gradient};
      own.memory = *first_element<float>(given->view);
      own.lent.deleter = nullptr;
      return own.sink->ready(own.sink->self, index, &own.lent, nullptr);
    };
    return original(self, replica, graph, scale, 0, &between);
  };
  Instance instance("single_device", sgd_config(1));
  instance.setup(*model);
  instance.accumulate(batch_of({1}));
  instance.accumulate(batch_of({2}));
  instance.train(batch_of({6}));
  CHECK(instance.value("weight") == -3);
}

TEST_CASE("replicas whose parameters lie in different orders in memory are bound to the root's, or refused") {
  // Gradients are added up in memory order.
  const auto run = [](bool binds) {
    const std::vector<ToyParameter> parameters{{{"weight"}, {2, 3}, std::vector<double>(6, 0)}};
    ToyModel model(parameters, [](ToyReplica&, const stg_step_context&, const stg_value&) {
      ToyStep step;
      step.outputs = scalar(0);
      step.gradients = {{1, 2, 3, 4, 5, 6}};
      return step;
    });
    static const auto original = model.table.replicate;
    model.table.replicate = [](void* self, const stg_replicate_args* args, stg_replica** out) -> stg_error* {
      if (stg_error* error = original(self, args, out)) return error;
      if (args->replica == 0) return nullptr;
      TensorPtr& weight = reinterpret_cast<ToyReplica*>(*out)->parameters[0];
      const std::shared_ptr<stg_tensor> memory{weight.release(), TensorRelease{}};
      weight = make_strided_tensor(memory, memory->view.data, float32, {2, 3}, {1, 2}, 0, {STG_DEVICE_CPU, 0});
      return nullptr;
    };
    if (!binds) model.table.bind = nullptr;
    Instance instance("data_parallel", sgd_config(2));
    instance.setup(model);
    instance.train(batch_of({1, 1}));
    CHECK(instance.values("weight") == std::vector<double>{-1, -2, -3, -4, -5, -6});
  };
  run(true);
  const Error error = error_of([&] { run(false); });
  CHECK(error.code == STG_INVALID_ARGUMENT);
  CHECK_THAT(error.message, Catch::Contains("weight") && Catch::Contains("order in memory") && Catch::Contains("replica 1"));
}

TEST_CASE("a last window of fewer micro-batches steps with what it has") {
  // Accumulate 4, x = 1,1,1,1 then 2,4.
  for (const std::string strategy : {"single_device", "data_parallel"}) {
    const auto model = linear_model();
    Instance instance(strategy, sgd_config(1));
    instance.setup(*model);
    for (int i = 0; i < 3; ++i) instance.accumulate(batch_of({1}));
    instance.train(batch_of({1}));
    CHECK(instance.value("weight") == -1);
    instance.accumulate(batch_of({2}));
    instance.train(batch_of({4}));
    CHECK(instance.value("weight") == -4);
  }
}

TEST_CASE("clipping acts once, on the whole reduced gradient") {
  // w in R^2, x = [2,0] and [0,2], accumulate 2, clip norm 0.5.
  std::vector<ToyParameter> parameters{{{"weight"}, {2}, {0, 0}}};
  ToyModel model(parameters, [](ToyReplica&, const stg_step_context&, const stg_value& batch) {
    ToyStep step;
    step.outputs = scalar(0);
    step.gradients = {{element(batch, "x", 0), element(batch, "x", 1)}};
    return step;
  });
  const auto row = [](double a, double b) {
    Dict dict;
    dict.emplace_back("x", tensor_of({a, b}, {1, 2}));
    return make_tree(std::move(dict));
  };
  for (const std::string strategy : {"single_device", "data_parallel"}) {
    Instance instance(strategy, sgd_config(1));
    instance.setup(model);
    instance.accumulate(row(2, 0));
    const StepOutcome outcome = instance.train(row(0, 2), 1, STG_CLIP_NORM, 0.5);
    CHECK(outcome.update.gradient_norm == Approx(std::sqrt(2.0)));
    CHECK(instance.values("weight")[0] == Approx(-0.353553).epsilon(1e-5));
    CHECK(instance.values("weight")[1] == Approx(-0.353553).epsilon(1e-5));
  }
}

TEST_CASE("clipping by norm and by value at half the true size halves the update") {
  // Linear(32,2) without bias, w = 0.01, x = 0.1, sum loss: each of 64 entries has the gradient 0.1 * rows.
  std::vector<ToyParameter> parameters{{{"weight"}, {2, 32}, std::vector<double>(64, 0.01)}};
  ToyModel model(parameters, [](ToyReplica&, const stg_step_context&, const stg_value& batch) {
    ToyStep step;
    step.outputs = scalar(0);
    step.gradients = {std::vector<double>(64, 0.1 * static_cast<double>(num_rows(batch, "x")))};
    return step;
  });
  model.loss_kind = STG_LOSS_SUM;
  for (const size_t devices : {1, 2}) {
    for (const uint64_t clip : {STG_CLIP_NORM, STG_CLIP_VALUE}) {
      Instance instance("data_parallel", sgd_config(devices));
      instance.setup(model);
      const double true_size = clip == STG_CLIP_NORM ? 0.4 * 8 : 0.4;
      instance.train(batch_of({1, 1, 1, 1}), 1, clip, true_size / 2);
      for (const double value : instance.values("weight")) CHECK(value == Approx(0.01 - 0.2).epsilon(1e-5));
    }
  }
}

TEST_CASE("a gradient under the limit is left alone, bitwise") {
  const auto model = linear_model();
  Instance instance("single_device", sgd_config(1));
  instance.setup(*model);
  const StepOutcome outcome = instance.train(batch_of({0.1}), 1, STG_CLIP_NORM, 0.2);
  CHECK(instance.value("weight") == -static_cast<double>(0.1f));
  CHECK(outcome.update.gradient_norm == static_cast<double>(0.1f));
  CHECK(std::isnan(instance.train(batch_of({0.1})).update.gradient_norm));
}
