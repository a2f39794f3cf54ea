// SPDX-License-Identifier: Apache-2.0
//
// The example plugin of the documentation, loaded and run as a host does: loss = mean(w * x), so one step moves w by -lr * mean(x).
#include "base/dlpack.hpp"
#include "base/strategy.hpp"
#include "support/catch.hpp"
#include "support/plugin.hpp"

using namespace stratagem;

namespace {

// Linear(1, 1) without bias, as a table: what a host without LibTorch implements.
struct ToyModel {
  float weight = 0;
  stg_string name = to_abi("weight");
  TensorPtr tensor = make_tensor(nullptr, &weight, float32, {1});
  stg_parameter parameter = sized<stg_parameter>();
  const stg_parameter* parameters[1] = {&parameter};
  double mean = 0;
  uint64_t gradient_index = 0;  // what backward reports
  int64_t gradient_numel = 1;
  stg_model table = sized<stg_model>();

  ToyModel() {
    parameter.names = &name;
    parameter.num_names = 1;
    parameter.tensor = tensor.get();
    parameter.flags = STG_PARAMETER_REQUIRES_GRAD | STG_PARAMETER_PERSISTENT | STG_PARAMETER_PINNED;
    table.self = this;
    table.replicate = [](void* self, const stg_replicate_args*, stg_replica** out) -> stg_error* {
      *out = static_cast<stg_replica*>(self);
      return nullptr;
    };
    table.destroy_replica = [](void*, stg_replica*) {};
    table.describe = [](void* self, stg_replica*, stg_model_description* out) -> stg_error* {
      out->parameters = static_cast<ToyModel*>(self)->parameters;
      out->num_parameters = 1;
      return nullptr;
    };
    table.set_mode = [](void*, stg_replica*, uint32_t) -> stg_error* { return nullptr; };
    table.step = [](void* self, stg_replica*, const stg_step_context*, stg_tree* batch, stg_model_step_result* result) {
      return guard([&] { static_cast<ToyModel*>(self)->step(Tree::receive(batch), *result); });
    };
    table.backward = [](void* self, stg_replica*, stg_graph*, double scale, uint32_t, const stg_gradient_sink* sink) {
      return guard([&] {
        const ToyModel& model = *static_cast<ToyModel*>(self);
        TensorPtr gradient = allocate_tensor(float32, {model.gradient_numel});
        *first_element<float>(gradient->view) = static_cast<float>(model.mean * scale);
        check(sink->ready(sink->self, model.gradient_index, gradient.release(), nullptr));
      });
    };
    table.release_graph = [](void*, stg_replica*, stg_graph*) {};
  }

  void step(Tree batch, stg_model_step_result& result) {
    const stg_tensor_view& x = batch.root().as.tensor->view;
    mean = 0;
    for (int64_t i = 0; i < numel(x); ++i) mean += read_element(x, i) / static_cast<double>(numel(x));
    TensorPtr loss = allocate_tensor(float32, {});
    *first_element<float>(loss->view) = static_cast<float>(mean) * weight;
    result.outputs = make_tree(std::move(loss)).give();
    result.graph = reinterpret_cast<stg_graph*>(this);
  }
};

const stg_strategy_api& example() {
  static const stg_strategy_api& api = test::strategy_api(test::load_plugin(GRADIENT_DESCENT_PLUGIN), "gradient_descent");
  return api;
}

stg_strategy* create(const char* config = "") {
  stg_strategy* self = nullptr;
  stg_create_args args = sized<stg_create_args>();
  args.config_json = to_abi(std::string_view(config));
  check(example().create(&args, &self));
  return self;
}

void set_up(stg_strategy* self, const ToyModel& model, stg_tree* state = nullptr) {
  stg_setup_args args = sized<stg_setup_args>();
  args.model = &model.table;
  args.state = state;
  check(example().setup(self, nullptr, &args));
}

void train(stg_strategy* self, bool is_last = true, uint64_t clip = STG_CLIP_NONE, int64_t num_rows = 4) {
  static float numbers[] = {1, 2, 3, 6};
  stg_tree batch = make_tree(make_tensor(nullptr, numbers, float32, {num_rows})).give();
  stg_update_args update = sized<stg_update_args>();
  update.lr = 0.5;
  update.clip = clip;
  update.clip_limit = 1;
  stg_step_args args = sized<stg_step_args>();
  args.batch = &batch;
  if (is_last) args.flags = STG_BATCH_LAST_MICRO_BATCH;
  if (is_last) args.update = &update;
  stg_step_result result = sized<stg_step_result>();
  check(example().train_batch(self, nullptr, &args, &result, nullptr));
  CHECK(result.weights[0] == static_cast<double>(num_rows));
  result.outputs.release(&result.outputs);
}

// "<code> <message>" of what `body` throws.
template <class Body>
std::string refusal(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return code_name(error.code) + " " + error.message;
  }
  return "nothing was refused";
}

}  // namespace

TEST_CASE("The example strategy of the documentation trains") {
  const stg_strategy_api& api = example();
  ToyModel model;
  stg_strategy* self = create();
  set_up(self, model);

  float numbers[] = {1, 2, 3, 6};
  for (int i = 0; i < 2; ++i) {
    stg_tree batch = make_tree(make_tensor(nullptr, numbers, float32, {4})).give();
    stg_update_args update = sized<stg_update_args>();
    update.lr = 0.5;
    stg_step_args args = sized<stg_step_args>();
    args.batch = &batch;
    args.flags = STG_BATCH_LAST_MICRO_BATCH;
    args.update = &update;
    stg_step_result result = sized<stg_step_result>();
    stg_update_result updated = sized<stg_update_result>();
    check(api.train_batch(self, nullptr, &args, &result, &updated));
    CHECK(updated.outcome == STG_UPDATE_DONE);
    CHECK(read_element(result.outputs.root.as.tensor->view, 0) == Approx(-4.5 * i));
    result.outputs.release(&result.outputs);
  }
  CHECK(model.weight == -3.0f);

  stg_error* error = api.backward(self, nullptr, 0);
  REQUIRE(error != nullptr);
  CHECK(error->code == STG_FAILED_PRECONDITION);
  error->release(error);
  check(api.teardown(self, nullptr));
  api.destroy(self);
}

TEST_CASE("What the example strategy doesn't have it refuses in words, and changes no weight") {
  using Catch::Contains;
  for (const auto& [config, place] :
       {std::pair{R"({"devices": 2})", "/devices"}, std::pair{R"({"devices": "auto"})", "/devices"},
        std::pair{R"({"accelerator": "cuda"})", "/accelerator"}, std::pair{R"({"precision": "64-true"})", "/precision"},
        std::pair{R"({"optimizer": {"name": "adam", "lr": 1}})", "/optimizer"},
        std::pair{R"({"optimizer": {"name": "sgd", "momentum": 0.9}})", "/optimizer"},
        std::pair{R"({"optimizer": 3})", "/optimizer"}}) {
    CHECK_THAT(refusal([&] { create(config); }), Contains("UNIMPLEMENTED") && Contains(place));
  }
  ToyModel model;
  stg_strategy* self =
      create(R"({"devices": 1, "accelerator": "cpu", "precision": "32-true", "optimizer": {"name": "sgd", "lr": 1}, "seed": 3})");
  stg_tree state = make_tree(Dict{}).give();
  CHECK_THAT(refusal([&] { set_up(self, model, &state); }), Contains("UNIMPLEMENTED") && Contains("state"));
  set_up(self, model);
  CHECK_THAT(refusal([&] { train(self, true, STG_CLIP_NORM); }), Contains("UNIMPLEMENTED") && Contains("clip"));
  CHECK(model.weight == 0);
  example().teardown(self, nullptr);
  set_up(self, model);
  model.gradient_index = 7;
  CHECK_THAT(refusal([&] { train(self); }), Contains("INVALID_ARGUMENT") && Contains("gradient 7") && Contains("1 parameters"));
  model.gradient_index = 0;
  model.gradient_numel = 0;
  CHECK_THAT(refusal([&] { train(self); }), Contains("INVALID_ARGUMENT") && Contains("gradient 0 is (0)"));
  model.gradient_numel = 1;
  CHECK(model.weight == 0);
  train(self);
  CHECK(model.weight == -1.5f);
  example().destroy(self);

  model.parameter.flags = STG_PARAMETER_REQUIRES_GRAD;
  self = create();
  CHECK_THAT(refusal([&] { set_up(self, model); }), Contains("UNIMPLEMENTED") && Contains("parameter 0"));
  example().destroy(self);
}

TEST_CASE("The example strategy adds micro-batches up, each by its rows") {
  ToyModel model;
  stg_strategy* self = create();
  set_up(self, model);
  train(self, false, STG_CLIP_NONE, 1);  // mean 1
  train(self, true);                     // 4 rows, mean 3
  CHECK(model.weight == Approx(-0.5 * (1 * 1 + 4 * 3) / 5));
  example().destroy(self);
}
