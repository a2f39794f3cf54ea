// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Gradients" and "Context": steps in their order, and what they leave behind.
#include <array>
#include <atomic>

#include "spec/instance.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

TEST_CASE("training_step, backward and optimizer_step equal train_batch bitwise") {
  for (const size_t devices : {1, 2, 3}) {
    for (const uint64_t clip : {STG_CLIP_NONE, STG_CLIP_NORM, STG_CLIP_VALUE}) {
      const auto model = linear_model(0.3);
      const std::string adam = concat("{\"devices\": ", devices, R"(, "optimizer": {"name": "adam"}})");
      Instance whole("data_parallel", adam);
      Instance parts("data_parallel", adam);
      whole.setup(*model);
      parts.setup(*model);
      for (int step = 0; step < 5; ++step) {
        const std::vector<double> first{0.1 * step, 0.7, -0.3, 0.9};
        const std::vector<double> second{1.1, 0.2 * step, 0.5};
        whole.accumulate(batch_of(first));
        const StepOutcome a = whole.train(batch_of(second), 0.01, clip, 0.4);
        parts.training_step(batch_of(first));
        CHECK(parts.status().has_graph == 1);
        parts.backward(false);
        const StepOutcome b = parts.training_step(batch_of(second));
        parts.backward(step % 2 == 0);  // the reduction may start in backward, or in optimizer_step
        const stg_update_result update = parts.optimizer_step(0.01, clip, 0.4);
        CHECK(a.loss() == b.loss());
        CHECK(std::memcmp(&a.update.gradient_norm, &update.gradient_norm, sizeof(double)) == 0);
      }
      CHECK(model_bytes(whole.export_state()) == model_bytes(parts.export_state()));
      CHECK(optimizer_bytes(whole.export_state()) == optimizer_bytes(parts.export_state()));
    }
  }
}

TEST_CASE("parameters without a gradient on any replica keep none, on some they count as zero there") {
  std::vector<ToyParameter> parameters{
      {{"never"}, {1}, {1}}, {{"sometimes"}, {1}, {1}}, {{"frozen"}, {1}, {1}, STG_PARAMETER_PINNED}};
  ToyModel model(parameters, [](ToyReplica&, const stg_step_context& context, const stg_value&) {
    ToyStep step;
    step.outputs = scalar(0);
    step.gradients = {{}, {}, {}};
    if (context.replica == 1) step.gradients[1] = {2};
    return step;
  });
  // Weight decay would move a parameter that had a gradient of zero.
  Instance instance("data_parallel", R"({"devices": 2, "optimizer": {"name": "sgd", "momentum": 0.5, "weight_decay": 0.5}})");
  instance.setup(model);
  instance.training_step(batch_of({0, 0}));
  instance.backward(true);
  const Tree gradients = instance.gradients();
  CHECK(find(gradients.root(), "never")->type == STG_NONE);
  CHECK(numbers(*find(gradients.root(), "sometimes")) == std::vector<double>{1});
  CHECK(find(gradients.root(), "frozen")->type == STG_NONE);
  instance.optimizer_step();
  CHECK(instance.value("never") == 1);
  CHECK(instance.value("sometimes") == 1 - (1 + 0.5));
  CHECK(instance.value("frozen") == 1);
  const Tree state = instance.export_state();
  CHECK(find(*find(*find(state.root(), "optimizer"), "per_parameter"), "never") == nullptr);
}

TEST_CASE("a parameter that was frozen since setup has no gradient, one that was thawed since is an error") {
  std::vector<ToyParameter> parameters{{{"trained"}, {1}, {1}}, {{"frozen"}, {1}, {1}, STG_PARAMETER_PINNED}};
  ToyModel model(parameters, [](ToyReplica&, const stg_step_context&, const stg_value& batch) {
    ToyStep step;
    step.outputs = scalar(0);
    step.gradients = {{1}, {}};
    if (element(batch, "x", 0) == 2) step.gradients[1] = {1};
    return step;
  });
  Instance instance("data_parallel", sgd_config(2));
  instance.setup(model);
  const Error error = error_of([&] { instance.train(batch_of({2, 2})); });
  CHECK(error.code == STG_FAILED_PRECONDITION);
  CHECK_THAT(error.message, Catch::Contains("frozen has a gradient") && Catch::Contains("set up again"));
  CHECK(instance.value("trained") == 1);
  // Nor after the model has described itself anew, for an export of floating memory.
  model.buffers.push_back({{"floating"}, {1}, {0}, STG_PARAMETER_PERSISTENT});
  Instance thawing("data_parallel", sgd_config(2));
  thawing.setup(model);
  model.parameters[1].flags |= STG_PARAMETER_REQUIRES_GRAD;
  thawing.export_state();
  CHECK_THAT(error_of([&] {
               thawing.train(batch_of({2, 2}), 1, STG_CLIP_NORM, 1);
             }).message,
             Catch::Contains("frozen has a gradient"));
  // A parameter that is no longer there is told, and the next export is right.
  model.parameters.pop_back();
  CHECK_THAT(error_of([&] { thawing.export_state(); }).message, Catch::Contains("describes 1 parameters, at setup they were 2"));
  model.parameters.push_back(parameters[1]);
  thawing.export_state();
  CHECK(thawing.value("frozen") == 1);
  model.buffers.clear();

  // Reports the gradients but for those of "trained".
  model.table.backward = [](void* self, stg_replica* replica, stg_graph* graph, double, uint32_t, const stg_gradient_sink* sink) {
    static_cast<ToyModel*>(self)->table.release_graph(self, replica, graph);
    return sink->ready(sink->self, 1, nullptr, nullptr);
  };
  Instance freezing("data_parallel", sgd_config(2));
  freezing.setup(model);
  CHECK(freezing.train(batch_of({1, 1})).update.outcome == STG_UPDATE_DONE);
  CHECK(freezing.value("trained") == 1);
}

TEST_CASE("a model that fails to hear of new parameters is told again") {
  static bool fails;
  fails = true;
  const auto model = linear_model();
  static int num_told;
  num_told = 0;
  model->table.parameters_changed = [](void*, stg_replica*) -> stg_error* {
    if (std::exchange(fails, false)) return to_abi(Error{STG_RESOURCE_EXHAUSTED, "no memory for the packed weights"});
    ++num_told;
    return nullptr;
  };
  Instance instance("single_device", sgd_config(1));
  instance.setup(*model);
  instance.train(batch_of({1}));
  CHECK(error_of([&] { instance.train(batch_of({1})); }).code == STG_RESOURCE_EXHAUSTED);
  CHECK(num_told == 0);
  instance.train(batch_of({1}));
  CHECK(num_told == 1);
}

TEST_CASE("a batch for fewer replicas leaves no graph of the step before it") {
  const auto model = linear_model();
  Instance instance("data_parallel", sgd_config(2));
  instance.setup(*model);
  instance.training_step(batch_of({1, 1, 1, 1}));
  CHECK(model->num_graphs == 2);
  instance.train(batch_of({1}));
  CHECK(model->num_graphs == 0);
}

TEST_CASE("batch size 1 with two devices trains") {
  const auto model = linear_model();
  Instance instance("data_parallel", sgd_config(2));
  instance.setup(*model);
  for (int i = 0; i < 3; ++i) CHECK(instance.train(batch_of({2})).weights.size() == 1);
  CHECK(instance.value("weight") == -6);
}

TEST_CASE("a host's own optimizer reads the reduced gradients and says when parameters changed") {
  for (const bool has_bind : {true, false}) {
    const auto model = linear_model(1);
    if (!has_bind) model->table.bind = nullptr;
    Instance instance("data_parallel", R"({"devices": 2})");
    instance.setup(*model);
    for (int step = 0; step < 2; ++step) {
      instance.training_step(batch_of({1, 2, 6}));
      instance.backward(step == 0);
      CHECK(numbers(*find(instance.gradients().root(), "weight")) == std::vector<double>{3});
      stg_model_description description = sized<stg_model_description>();
      check(instance.api.describe_parameters(instance.self, &description));
      *first_element<float>(description.parameters[0]->tensor->view) -= 0.25f;
      check(instance.api.parameters_changed(instance.self, nullptr));
    }
    CHECK(instance.status().num_micro_batches == 0);
    // All replicas see the new weight: predicts w * mean.
    const StepOutcome outcome = instance.validate(batch_of({1, 1}));
    CHECK(numbers(*find(outcome.outputs.root(), "loss")) == std::vector<double>{0.5, 0.5});
    const Error error = error_of([&] { instance.optimizer_step(); });
    CHECK(error.code == STG_FAILED_PRECONDITION);
    CHECK_THAT(error.message, Catch::Contains("optimizer"));
  }
}

TEST_CASE("steps out of order are refused in words") {
  const auto model = linear_model();
  Instance instance("data_parallel", sgd_config(2));
  instance.setup(*model);
  CHECK(error_of([&] { instance.backward(true); }).code == STG_FAILED_PRECONDITION);
  CHECK(error_of([&] { instance.optimizer_step(); }).code == STG_FAILED_PRECONDITION);
  CHECK(error_of([&] { instance.gradients(); }).code == STG_FAILED_PRECONDITION);
  instance.training_step(batch_of({1, 1}));
  instance.backward(true);
  CHECK(error_of([&] { instance.backward(true); }).code == STG_FAILED_PRECONDITION);
  CHECK(error_of([&] { instance.train(batch_of({1, 1})); }).code == STG_FAILED_PRECONDITION);
  check(instance.api.zero_grad(instance.self, nullptr));
  CHECK(error_of([&] { instance.optimizer_step(); }).code == STG_FAILED_PRECONDITION);
  instance.train(batch_of({1, 1}));
  CHECK(instance.value("weight") == -1);
}

TEST_CASE("evaluating leaves every weight unchanged, bitwise, and predicts the same rows in the same order") {
  std::vector<ToyParameter> parameters{{{"weight"}, {1}, {0.3}}};
  std::atomic<bool> all_in_inference{true};  // Catch2's macros are for one thread
  ToyModel model(parameters, [&](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
    const uint32_t mode = context.flags & (STG_STEP_INFERENCE | STG_STEP_GRADIENT);
    if (replica.is_training || mode != STG_STEP_INFERENCE) all_in_inference = false;
    std::vector<double> out;
    for (int64_t i = 0; i < num_rows(batch, "x"); ++i) out.push_back(replica.value(0, 0) * element(batch, "x", i));
    ToyStep step;
    step.outputs = tensor_of(out, {static_cast<int64_t>(out.size())});
    return step;
  });
  std::vector<std::vector<double>> predictions;
  for (const size_t devices : {1, 2, 3, 7}) {
    Instance instance("data_parallel", sgd_config(devices));
    instance.setup(model);
    const std::string before = model_bytes(instance.export_state());
    predictions.push_back(numbers(instance.predict(batch_of({1, 2, 3, 4, 5})).outputs.root()));
    CHECK(model_bytes(instance.export_state()) == before);
  }
  for (const auto& prediction : predictions) CHECK(prediction == predictions[0]);
  CHECK(all_in_inference);
}

TEST_CASE("an evaluation that fails leaves generators where it came to, a training step puts them back") {
  static std::array<std::atomic<uint8_t>, 3> num_drawn;  // a generator's state is how often it was drawn from
  for (auto& drawn : num_drawn) drawn = 0;
  const auto model = linear_model();
  model->table.get_generator_state = [](void*, stg_replica* replica, stg_tree* out) {
    const auto index = static_cast<size_t>(reinterpret_cast<ToyReplica*>(replica)->args.replica);
    return guard([&] { *out = make_tree(Bytes{{num_drawn.at(index).load()}}).give(); });
  };
  model->table.set_generator_state = [](void*, stg_replica* replica, const uint8_t* state, uint64_t) -> stg_error* {
    num_drawn.at(static_cast<size_t>(reinterpret_cast<ToyReplica*>(replica)->args.replica)) = *state;
    return nullptr;
  };
  std::atomic<bool> fails{true};
  const auto step = model->on_step;
  model->on_step = [&fails, step](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
    ++num_drawn.at(static_cast<size_t>(context.replica));
    if (fails && context.replica == 1) throw std::runtime_error("after it has drawn");
    return step(replica, context, batch);
  };
  Instance instance("data_parallel", sgd_config(3));
  instance.setup(*model);
  const auto drawn = [&] {
    const Tree state = instance.export_state();
    const stg_value& generators = *find(state.root(), "generators");
    std::vector<int> all;
    for (uint32_t i = 0; i < generators.count; ++i) all.push_back(generators.as.items[i].as.bytes[0]);
    return all;
  };
  int expected = 0;
  for (const auto function : {instance.api.validation_step, instance.api.test_step, instance.api.predict_step}) {
    CHECK(error_of([&] { instance.evaluate(function, batch_of({1, 2, 3})); }).replica == 1);
    CHECK(drawn() == std::vector<int>(3, ++expected));
  }
  CHECK(error_of([&] { instance.train(batch_of({1, 2, 3})); }).replica == 1);
  CHECK(drawn() == std::vector<int>(3, expected));
  fails = false;
  instance.train(batch_of({1, 2, 3}));
  CHECK(drawn() == std::vector<int>(3, expected + 1));
}

TEST_CASE("after each step all replicas' parameters are bitwise equal, shared or not") {
  for (const bool has_bind : {true, false}) {
    std::mutex mutex;
    std::map<int32_t, double> seen;
    const auto model = linear_model(0.7);
    if (!has_bind) model->table.bind = nullptr;
    const auto step = model->on_step;
    model->on_step = [&, step](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
      const std::lock_guard lock(mutex);
      seen[context.replica] = replica.value(0, 0);
      return step(replica, context, batch);
    };
    Instance instance("data_parallel", R"({"devices": 3, "optimizer": {"name": "adamw"}})");
    instance.setup(*model);
    for (int i = 0; i < 4; ++i) {
      instance.train(batch_of({0.1, 0.2, 0.7, 1.3}), 0.1);
      CHECK(seen.size() == 3);
      for (const auto& [replica, value] : seen) CHECK(value == seen[0]);
    }
  }
}

TEST_CASE("a moved batch is released once, when its last reader is done") {
  struct Owner {
    int num_releases = 0;
  } owner;
  const auto model = linear_model();
  model->reads_batch_in_backward = true;
  Instance instance("data_parallel", sgd_config(2));
  instance.setup(*model);
  Tree inner = batch_of({1, 2, 3});
  stg_tree batch{inner.root(), [](stg_tree* self) { ++static_cast<Owner*>(self->owner)->num_releases; }, &owner};
  stg_step_args args = sized<stg_step_args>();
  args.batch = &batch;
  stg_step_result result = sized<stg_step_result>();
  check(instance.api.training_step(instance.self, nullptr, &args, &result));
  const Tree outputs{result.outputs};
  CHECK(batch.release == nullptr);
  CHECK(owner.num_releases == 0);
  instance.backward(true);
  instance.optimizer_step();
  CHECK(owner.num_releases == 1);
}

TEST_CASE("a borrowed batch may be overwritten between training_step and backward") {
  const auto model = linear_model();
  model->reads_batch_in_backward = true;
  Instance instance("data_parallel", sgd_config(2));
  instance.setup(*model);
  {
    Tree batch = batch_of({1, 2, 6});
    instance.training_step(Tree::view(batch.root()));
    *first_element<float>(find(batch.root(), "x")->as.tensor->view) = 1000;
  }
  instance.backward(true);
  instance.optimizer_step();
  CHECK(instance.value("weight") == -3);
}

TEST_CASE("the host's trace sees each phase begin and end, those in the model's code for each replica") {
  struct Trace {
    std::mutex mutex;
    std::map<std::string, int> open, done;
  } trace;
  stg_host host = sized<stg_host>();
  host.self = &trace;
  host.trace_begin = [](void* self, stg_string phase, int32_t replica) {
    auto& all = *static_cast<Trace*>(self);
    const std::lock_guard lock(all.mutex);
    ++all.open[concat(text_of(phase), " ", replica)];
  };
  host.trace_end = [](void* self, stg_string phase, int32_t replica) {
    auto& all = *static_cast<Trace*>(self);
    const std::lock_guard lock(all.mutex);
    const std::string key = concat(text_of(phase), " ", replica);
    --all.open[key];
    ++all.done[key];
  };
  const auto model = linear_model();
  Instance instance("data_parallel", sgd_config(2), &host);
  instance.setup(*model);
  instance.train(batch_of({1, 2}));
  std::map<std::string, int> once;
  for (const char* phase : {"forward", "backward"}) {
    for (const char* replica : {" 0", " 1"}) once[std::string(phase) + replica] = 1;
  }
  for (const char* phase : {"reduce 0", "update 0"}) once[phase] = 1;  // the calling thread's stand for all
  CHECK(trace.done == once);
  for (const auto& [phase, count] : trace.open) CHECK(count == 0);
}
