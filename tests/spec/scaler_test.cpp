// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Mixed precision": the loss scale of 16-mixed, with models that compute in double, so that what autocast does is left
// out and every number is worked out by hand.
#include "spec/scaler.hpp"

#include <cmath>
#include <limits>

#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;
using Catch::Contains;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity();

std::string adam_config(size_t num_devices, const std::string& more = mixed) {
  return concat("{\"devices\": ", num_devices, R"(, "optimizer": {"name": "adam"})", more, "}");
}

// Two weights of 1, gradients of both the mean of x; those that `fault` returns are put in place of replica `replica`'s.
struct Faulty {
  int32_t replica = 1;
  std::vector<double> gradients;  // empty: no fault
  std::unique_ptr<ToyModel> model;

  Faulty() {
    std::vector<ToyParameter> parameters{{{"a"}, {1}, {1}}, {{"b"}, {1}, {1}}};
    model = std::make_unique<ToyModel>(parameters, [this](ToyReplica& here, const stg_step_context&, const stg_value& batch) {
      double mean = 0;
      for (int64_t i = 0; i < num_rows(batch, "x"); ++i)
        mean += element(batch, "x", i) / static_cast<double>(num_rows(batch, "x"));
      ToyStep step;
      step.outputs = scalar(mean);
      step.gradients = {{mean}, {mean}};
      if (!gradients.empty() && here.args.replica == replica) step.gradients = {{gradients[0]}, {gradients[1]}};
      return step;
    });
  }
};

}  // namespace

TEST_CASE("the precision's dtype is told to every replica in every stage") {
  const auto [precision, code] = GENERATE(table<std::string, int>(
      {{"32-true", -1}, {"64-true", -1}, {"16-mixed", STG_DTYPE_FLOAT}, {"bf16-mixed", STG_DTYPE_BFLOAT}}));
  std::vector<ToyParameter> parameters{{{"w"}, {1}, {1}}};
  ToyModel model(parameters, [&](ToyReplica& replica, const stg_step_context& context, const stg_value&) {
    ToyStep step;
    Dict outputs;
    outputs.emplace_back("loss", scalar(1));
    outputs.emplace_back("code", int64_t{context.autocast_dtype.bits == 0 ? -1 : context.autocast_dtype.code});
    outputs.emplace_back("bits", int64_t{context.autocast_dtype.bits});
    outputs.emplace_back("parameter_bits", int64_t{replica.parameters[0]->view.dtype.bits});
    step.outputs = std::move(outputs);
    step.gradients = {{1}};
    return step;
  });
  Instance instance("data_parallel", sgd_config(3, R"(, "precision": ")" + precision + "\""));
  instance.setup(model);
  const auto check_told = [&, expected = double(code)](const StepOutcome& outcome) {
    CHECK(numbers(*find(outcome.outputs.root(), "code")) == std::vector<double>(3, expected));
    CHECK(numbers(*find(outcome.outputs.root(), "bits")) == std::vector<double>(3, expected < 0 ? 0.0 : 16.0));
    CHECK(numbers(*find(outcome.outputs.root(), "parameter_bits")) == std::vector<double>(3, precision == "64-true" ? 64 : 32));
  };
  check_told(instance.train(batch_of({1, 2, 3})));
  check_told(instance.training_step(batch_of({1, 2, 3})));
  check_told(instance.validate(batch_of({1, 2, 3})));
  check_told(instance.evaluate(instance.api.test_step, batch_of({1, 2, 3})));
  check_told(instance.predict(batch_of({1, 2, 3})));
}

TEST_CASE("scaling and unscaling are exact: without an overflow 16-mixed has the bits of 32-true") {
  for (const std::string strategy : {"single_device", "data_parallel"}) {
    const size_t num_devices = strategy == "single_device" ? 1 : 2;
    std::vector<std::string> bits;
    for (const std::string& precision : {std::string(), mixed}) {
      const auto model = linear_model();
      Instance instance(strategy, adam_config(num_devices, precision));
      instance.setup(*model);
      for (int step = 0; step < 5; ++step) {
        // Sums of eighths: no rounding but the optimizer's.
        const double x = (step + 1) / 8.0;
        instance.accumulate(batch_of({x, -2 * x, 3 * x, x}));
        const double before = instance.value("weight");
        const StepOutcome outcome = instance.train(batch_of({x, x, 5 * x, x}), 0.1);
        CHECK(outcome.update.outcome == STG_UPDATE_DONE);
        CHECK(outcome.update.loss_scale == (precision.empty() ? 1 : 65536));
        CHECK(outcome.loss() == Approx(before * 2 * x).epsilon(1e-6));  // not scaled
      }
      bits.push_back(model_bytes(instance.export_state()) + optimizer_bytes(instance.export_state()));
    }
    CHECK(bits[0] == bits[1]);
  }
}

TEST_CASE("an overflow on one replica only skips the step on all, halves the scale, and the next step works") {
  const std::vector<double> gradients =
      GENERATE(values<std::vector<double>>({{inf, 1}, {1, -inf}, {std::nan(""), 1}, {1, 3e38}}));
  const int32_t replica = GENERATE(0, 1, 2);
  Faulty faulty;
  faulty.replica = replica;
  Instance instance("data_parallel", adam_config(3));
  instance.setup(*faulty.model);
  instance.train(batch_of({1, 1, 1}));
  const Tree before = instance.export_state();
  faulty.gradients = gradients;
  const bool clips = GENERATE(false, true);
  const StepOutcome skipped = instance.train(batch_of({1, 1, 1}), 1, clips ? STG_CLIP_NORM : STG_CLIP_NONE, clips ? 0.5 : 0);
  CHECK(skipped.update.outcome == STG_UPDATE_SKIPPED_OVERFLOW);
  CHECK(skipped.update.loss_scale == 32768);
  CHECK(std::isnan(skipped.update.gradient_norm));
  CHECK(skipped.loss() == 1);
  const Tree after = instance.export_state();
  CHECK(model_bytes(after) == model_bytes(before));
  CHECK(optimizer_bytes(after) == optimizer_bytes(before));
  CHECK(instance.status().num_updates == 1);
  CHECK(instance.status().num_micro_batches == 0);
  CHECK(scale_in(after) == 32768);
  CHECK(good_steps_in(after) == 0);
  faulty.gradients.clear();
  const StepOutcome good = instance.train(batch_of({1, 1, 1}));
  CHECK(good.update.outcome == STG_UPDATE_DONE);
  CHECK(good.update.loss_scale == 32768);
  CHECK(instance.status().num_updates == 2);
  CHECK(good_steps_in(instance.export_state()) == 1);
  // As if the bad batch had never been.
  Faulty whole;
  Instance unbroken("data_parallel", adam_config(3));
  unbroken.setup(*whole.model);
  unbroken.train(batch_of({1, 1, 1}));
  unbroken.train(batch_of({1, 1, 1}));
  CHECK(model_bytes(instance.export_state()) == model_bytes(unbroken.export_state()));
  CHECK(optimizer_bytes(instance.export_state()) == optimizer_bytes(unbroken.export_state()));
}

TEST_CASE("an overflow in any micro-batch of a window skips the window's update, whose scale is one") {
  const int bad = GENERATE(0, 1, 2);
  const auto model = linear_model();
  Instance instance("data_parallel", sgd_config(2, mixed));
  instance.setup(*model);
  for (int i = 0; i < 2; ++i) {
    const double x = i == bad ? 3e38 : 1;
    instance.accumulate(batch_of({1, x}));
    CHECK(scale_in(instance.export_state()) == 65536);
  }
  CHECK(instance.train(batch_of({1, bad == 2 ? 3e38 : 1})).update.outcome == STG_UPDATE_SKIPPED_OVERFLOW);
  CHECK(instance.value("weight") == 0);
  instance.accumulate(batch_of({1, 2}));
  CHECK(instance.train(batch_of({3, 4})).update.outcome == STG_UPDATE_DONE);
  CHECK(instance.value("weight") == -2.5);
}

TEST_CASE("with one replica's thread being the caller's alone an overflow skips as well") {
  Faulty faulty;
  Instance instance("data_parallel", adam_config(2), nullptr, STG_CREATE_CALLER_THREAD_ONLY);
  instance.setup(*faulty.model);
  faulty.gradients = {inf, 0};
  CHECK(instance.train(batch_of({1, 1})).update.outcome == STG_UPDATE_SKIPPED_OVERFLOW);
  CHECK(instance.value("b") == 1);
}

TEST_CASE("after 2000 good updates in a row the scale is doubled") {
  const auto model = linear_model();
  Instance instance("single_device", sgd_config(1, mixed));
  instance.setup(*model);
  instance.import_state(with_scaler(instance.export_state(), 1024, 1998));
  CHECK(instance.train(batch_of({1})).update.loss_scale == 1024);
  CHECK(good_steps_in(instance.export_state()) == 1999);
  CHECK(instance.train(batch_of({1})).update.loss_scale == 2048);
  CHECK(good_steps_in(instance.export_state()) == 0);
  instance.import_state(with_scaler(instance.export_state(), 2048, 1999));
  instance.train(batch_of({3e38}));  // starts the count anew
  CHECK(instance.train(batch_of({1})).update.loss_scale == 1024);
  CHECK(good_steps_in(instance.export_state()) == 1);
}

TEST_CASE("the scale stays from 2^-24 to 2^127") {
  const auto model = linear_model();
  Instance instance("single_device", sgd_config(1, mixed));
  instance.setup(*model);
  instance.import_state(with_scaler(instance.export_state(), 0x1p-23, 5));
  for (int i = 0; i < 3; ++i) {
    const stg_update_result skipped = instance.train(batch_of({inf})).update;
    CHECK(skipped.outcome == STG_UPDATE_SKIPPED_OVERFLOW);
    CHECK(skipped.loss_scale == 0x1p-24);
  }
  CHECK(instance.train(batch_of({1})).update.outcome == STG_UPDATE_DONE);
  CHECK(instance.value("weight") == -1);
  for (int i = 0; i < 2; ++i) {
    instance.import_state(with_scaler(instance.export_state(), 0x1p127, 1999));
    CHECK(instance.train(batch_of({0.25})).update.loss_scale == 0x1p127);
  }
  CHECK(instance.value("weight") == -1.5);
}

TEST_CASE("a large scale, or denominators that float32 can't hold, leave the weighted mean what it is") {
  std::vector<ToyParameter> parameters{{{"w"}, {1}, {0}}};
  double denominator = 1;
  ToyModel model(parameters, [&](ToyReplica& replica, const stg_step_context&, const stg_value&) {
    ToyStep step;
    step.outputs = scalar(0);
    step.denominator = replica.args.replica == 0 ? denominator : 3 * denominator;
    step.gradients = {{replica.args.replica == 0 ? 0x1p-4 : 0x1p-5}};
    return step;
  });
  const std::string precision = GENERATE("16-mixed", "bf16-mixed");
  Instance instance("data_parallel", sgd_config(2, R"(, "precision": ")" + precision + "\""));
  instance.setup(model);
  double expected = 0;
  for (const double scale : {1.0, 0x1p124, 0x1p125, 0x1p127}) {
    if (precision == "16-mixed") instance.import_state(with_scaler(instance.export_state(), scale, 0));
    for (const double each : {1.0, 2.0, 1e-46, 1e39, 1e300}) {
      denominator = each;
      CHECK(instance.train(batch_of({1, 1})).update.outcome == STG_UPDATE_DONE);
      expected -= (0x1p-4 + 3 * 0x1p-5) / 4;
      CHECK(instance.value("w") == Approx(expected).epsilon(1e-5));
    }
  }
}

TEST_CASE("a host's own update of a window that overflowed lowers the scale, asked for gradients or not") {
  Faulty faulty;
  Instance instance("data_parallel", R"({"devices": 2, "precision": "16-mixed"})");
  instance.setup(*faulty.model);
  const auto update = [&] {
    instance.training_step(batch_of({1, 1}));
    instance.backward(true);
    check(instance.api.parameters_changed(instance.self, nullptr));
  };
  update();
  CHECK(good_steps_in(instance.export_state()) == 1);
  faulty.gradients = {inf, 0};
  update();
  CHECK(scale_in(instance.export_state()) == 32768);
  CHECK(good_steps_in(instance.export_state()) == 0);
}

TEST_CASE("denominators that add up to 0 neither lower the scale nor count as a good update") {
  std::vector<ToyParameter> parameters{{{"w"}, {1}, {1}}};
  double denominator = 0;
  ToyModel model(parameters, [&](ToyReplica&, const stg_step_context&, const stg_value&) {
    ToyStep step;
    step.outputs = scalar(1);
    step.denominator = denominator;
    step.gradients = {{denominator == 0 ? inf : 1}};
    return step;
  });
  Instance instance("data_parallel", sgd_config(2, mixed));
  instance.setup(model);
  denominator = 3;
  instance.train(batch_of({1, 1}));
  denominator = 0;
  const stg_update_result nothing = instance.train(batch_of({1, 1})).update;
  CHECK(nothing.outcome == STG_UPDATE_SKIPPED_NO_WEIGHT);
  CHECK(nothing.loss_scale == 65536);
  CHECK(good_steps_in(instance.export_state()) == 1);
}

TEST_CASE(
    "weights are those of 32-true in mixed precision: rows, denominators, sums, lightning's, and micro-batches that differ") {
  const std::string precision = GENERATE("32-true", "16-mixed", "bf16-mixed");
  const std::string kind = GENERATE("rows", "denominators", "sum", "lightning");
  std::vector<ToyParameter> parameters{{{"w"}, {2}, {0, 0}}, {{"sometimes"}, {1}, {0}}, {{"never"}, {1}, {0}}};
  ToyModel model(parameters, [&](ToyReplica&, const stg_step_context&, const stg_value& batch) {
    const int64_t rows = num_rows(batch, "x");
    double sum = 0;
    double count = 0;
    for (int64_t i = 0; i < rows; ++i) {
      sum += element(batch, "x", i);
      count += element(batch, "x", i) > 4 ? 2 : 1;
    }
    const double divisor = kind == "denominators" ? count : kind == "sum" ? 1 : static_cast<double>(rows);
    ToyStep step;
    step.outputs = scalar(sum / divisor);
    if (kind == "denominators") step.denominator = count;
    step.gradients = {{sum / divisor, 2 * sum / divisor}, {}, {}};
    if (sum > 6) step.gradients[1] = {sum / divisor};
    return step;
  });
  if (kind == "sum") model.loss_kind = STG_LOSS_SUM;
  const std::string more = kind == "lightning" ? R"(, "options": {"compat": "lightning"})" : "";
  Instance instance("data_parallel", sgd_config(2, R"(, "precision": ")" + precision + "\"" + more));
  instance.setup(model);
  // Shares {1,2,3},{4,5}; {6},{}; {1,1},{7}.
  instance.accumulate(batch_of({1, 2, 3, 4, 5}));
  instance.accumulate(batch_of({6}));
  instance.train(batch_of({1, 1, 7}));
  double whole = 30.0 / 9;
  double sometimes = (9 + 7) / 9.0;
  if (kind == "denominators") {
    whole = 30.0 / (6 + 2 + 4);
    sometimes = (9 + 7) / 12.0;
  } else if (kind == "sum") {
    whole = 30;
    sometimes = 9 + 7;
  } else if (kind == "lightning") {  // the mean of shares' means, and of micro-batches'
    whole = ((2 + 4.5) / 2 + 6 + (1 + 7) / 2.0) / 3;
    sometimes = (4.5 + 7) / 2 / 3;
  }
  CHECK(instance.values("w")[0] == Approx(-whole).epsilon(1e-6));
  CHECK(instance.values("w")[1] == Approx(-2 * whole).epsilon(1e-6));
  CHECK(instance.value("sometimes") == Approx(-sometimes).epsilon(1e-6));
  CHECK(instance.value("never") == 0);
}

TEST_CASE("rows and denominators don't lift what backward begins with over the scale") {
  // In float16 there is nothing over 65504.
  const auto [precision, expected] = GENERATE(table<std::string, double>({{"16-mixed", 65536}, {"bf16-mixed", 1}}));
  std::vector<double> reported;
  std::vector<ToyParameter> parameters{{{"w"}, {1}, {0}}};
  ToyModel model(parameters, [&](ToyReplica&, const stg_step_context&, const stg_value&) {
    ToyStep step;
    step.outputs = scalar(1);
    step.denominator = 1e6;
    step.gradients = {{1}};
    return step;
  });
  // What backward is given comes out as the gradient of 1.
  static decltype(stg_model::backward) original = nullptr;
  static std::vector<double>* scales = nullptr;
  original = model.table.backward;
  scales = &reported;
  model.table.backward = [](void* self, stg_replica* replica, stg_graph* graph, double scale, uint32_t flags,
                            const stg_gradient_sink* sink) {
    scales->push_back(scale);
    return original(self, replica, graph, scale, flags, sink);
  };
  Instance instance("single_device", sgd_config(1, R"(, "precision": ")" + precision + "\""));
  instance.setup(model);
  instance.train(batch_of({1}));
  CHECK(reported == std::vector<double>{expected});
  CHECK(instance.value("w") == -1);
}

TEST_CASE("clipping acts on the unscaled gradient") {
  Faulty faulty;
  Instance instance("data_parallel", sgd_config(2, mixed));
  instance.setup(*faulty.model);
  // Both weights have the gradient 3: the norm is 3 sqrt(2).
  const stg_update_result update = instance.train(batch_of({2, 4}), 1, STG_CLIP_NORM, std::sqrt(2.0)).update;
  CHECK(update.gradient_norm == Approx(3 * std::sqrt(2.0)));
  CHECK(instance.value("a") == Approx(0).margin(1e-6));
  instance.train(batch_of({2, 4}), 1, STG_CLIP_VALUE, 0.5);
  CHECK(instance.value("b") == Approx(-0.5));
}

TEST_CASE(
    "gradients for a host's own optimizer are unscaled, and an overflow is an error that lowers the scale and drops the window") {
  Faulty faulty;
  Instance instance("data_parallel", R"({"devices": 2, "precision": "16-mixed"})");
  instance.setup(*faulty.model);
  instance.training_step(batch_of({2, 4}));
  const bool is_last = GENERATE(false, true);
  instance.backward(is_last);
  const Tree gradients = instance.gradients();
  CHECK(numbers(*find(gradients.root(), "a")) == std::vector<double>{3});
  check(instance.api.parameters_changed(instance.self, nullptr));
  CHECK(good_steps_in(instance.export_state()) == 1);
  check(instance.api.parameters_changed(instance.self, nullptr));  // of its own accord: no update
  CHECK(good_steps_in(instance.export_state()) == 1);

  faulty.gradients = {inf, 1};
  instance.training_step(batch_of({2, 4}));
  instance.backward(is_last);
  const Error error = error_of([&] { instance.gradients(); });
  CHECK(error.code == STG_OUT_OF_RANGE);
  CHECK((error.flags & STG_ERROR_INSTANCE_DRAINING) == 0);
  CHECK_THAT(error.message, Contains("overflowed") && Contains("65536") && Contains("32768") && Contains("next batch"));
  CHECK(scale_in(instance.export_state()) == 32768);
  CHECK(good_steps_in(instance.export_state()) == 0);
  CHECK(instance.status().num_micro_batches == 0);
  faulty.gradients.clear();
  instance.training_step(batch_of({2, 4}));
  instance.backward(is_last);
  CHECK(numbers(*find(instance.gradients().root(), "a")) == std::vector<double>{3});
}

TEST_CASE("training_step, backward and optimizer_step skip and step as train_batch does") {
  const bool is_last = GENERATE(false, true);
  const uint64_t clip = GENERATE(STG_CLIP_NONE, STG_CLIP_NORM, STG_CLIP_VALUE);
  const auto model = linear_model();
  const auto model_in_parts = linear_model();
  Instance whole("data_parallel", adam_config(2));
  Instance parts("data_parallel", adam_config(2));
  whole.setup(*model);
  parts.setup(*model_in_parts);
  for (const double x : {1.0, 3e38, 2.0, -3e38, 0.5}) {
    const stg_update_result expected = whole.train(batch_of({x, 1, 2}), 0.1, clip, clip == STG_CLIP_NONE ? 0 : 0.3).update;
    parts.training_step(batch_of({x, 1, 2}));
    parts.backward(is_last);
    const stg_update_result update = parts.optimizer_step(0.1, clip, clip == STG_CLIP_NONE ? 0 : 0.3);
    CHECK(update.outcome == expected.outcome);
    CHECK(update.loss_scale == expected.loss_scale);
    CHECK(parts.status().num_updates == whole.status().num_updates);
  }
  CHECK(scale_in(parts.export_state()) == 16384);
  CHECK(model_bytes(parts.export_state()) == model_bytes(whole.export_state()));
  CHECK(optimizer_bytes(parts.export_state()) == optimizer_bytes(whole.export_state()));
}

TEST_CASE("detect_anomaly looks at the loss in 16-mixed: an overflow of a gradient is none") {
  stg_update_args update = sized<stg_update_args>();
  update.lr = 1;
  Faulty faulty;
  Instance instance("data_parallel", sgd_config(2, mixed));
  instance.setup(*faulty.model);
  faulty.gradients = {std::nan(""), inf};
  const auto run = [&](double x) {
    return instance.run_batch(batch_of({x, x}), &update, STG_BATCH_LAST_MICRO_BATCH | STG_BATCH_DETECT_ANOMALY).update.outcome;
  };
  CHECK(run(1) == STG_UPDATE_SKIPPED_OVERFLOW);
  CHECK_THAT(error_of([&] { run(std::nan("")); }).message, Contains("the loss is NaN"));
  // Elsewhere a NaN is a NaN.
  Instance unscaled("data_parallel", sgd_config(2, R"(, "precision": "bf16-mixed")"));
  unscaled.setup(*faulty.model);
  const Error error = error_of([&] {
    unscaled.run_batch(batch_of({1, 1}), &update, STG_BATCH_LAST_MICRO_BATCH | STG_BATCH_DETECT_ANOMALY);
  });
  CHECK_THAT(error.message, Contains("the gradient of a has a NaN"));
  CHECK(error.replica == 1);
}

TEST_CASE("32-true, 64-true and bf16-mixed have no scale: what isn't finite reaches the weights") {
  const std::string precision = GENERATE("32-true", "64-true", "bf16-mixed");
  const auto model = linear_model();
  Instance instance("data_parallel", sgd_config(2, R"(, "precision": ")" + precision + "\""));
  instance.setup(*model);
  const stg_update_result update = instance.train(batch_of({inf, 1})).update;
  CHECK(update.outcome == STG_UPDATE_DONE);
  CHECK(update.loss_scale == 1);
  CHECK(instance.value("weight") == -inf);
  CHECK(find(instance.export_state().root(), "scaler")->type == STG_NONE);
}

TEST_CASE("a float16 parameter is refused in 16-mixed, by its name, unless it is frozen or the run evaluates") {
  const auto model = linear_model(0, {STG_DTYPE_FLOAT, 16, 1});
  const auto set_up = [&](const std::string& precision, uint64_t stage) {
    Instance instance("data_parallel", sgd_config(2, precision));
    instance.setup(*model, stage);
  };
  CHECK_THAT(error_of([&] { set_up(mixed, STG_STAGE_FIT); }).message,
             Contains("parameter weight is float16") && Contains("float32"));
  set_up(mixed, STG_STAGE_VALIDATE);
  set_up(R"(, "precision": "bf16-mixed")", STG_STAGE_FIT);
  model->parameters[0].flags &= ~STG_PARAMETER_REQUIRES_GRAD;
  set_up(mixed, STG_STAGE_FIT);
}

TEST_CASE("an overflow in a sparse gradient skips the update, too") {
  double value = 1;
  std::vector<ToyParameter> parameters{{{"table"}, {4, 1}, {1, 1, 1, 1}}};
  ToyModel model(parameters, [&](ToyReplica& replica, const stg_step_context&, const stg_value&) {
    ToyStep step;
    step.outputs = scalar(1);
    step.gradients = {{}};
    const double here = replica.args.replica == 1 ? value : 1;
    step.sparse_gradients[0] = {tensor_of({2}, {1, 1}, int64), tensor_of({here}, {1, 1}), {4, 1}};
    return step;
  });
  Instance instance("data_parallel", sgd_config(2, mixed));
  instance.setup(model);
  instance.accumulate(batch_of({1, 1, 1}));  // shares of two rows and one
  CHECK(instance.train(batch_of({1, 1})).update.outcome == STG_UPDATE_DONE);
  CHECK(instance.values("table") == std::vector<double>{1, 1, 0, 1});
  value = inf;
  const stg_update_result skipped = instance.train(batch_of({1, 1})).update;
  CHECK(skipped.outcome == STG_UPDATE_SKIPPED_OVERFLOW);
  CHECK(skipped.loss_scale == 32768);
  CHECK(instance.values("table") == std::vector<double>{1, 1, 0, 1});
}
