// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Gathering outputs".
#include "spec/instance.hpp"
#include "spec/outputs.hpp"
#include "spec/trees.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

using Numbers = std::vector<double>;

Tree gathered(const Outputs& outputs, const std::string& config = R"({"devices": 2})") {
  const auto model = model_with(outputs);
  Instance instance("data_parallel", config);
  instance.setup(*model, STG_STAGE_PREDICT);
  return std::move(instance.predict(batch_of({0, 0})).outputs);
}

Error refused(const Outputs& outputs) {
  const Error error = error_of([&] { gathered(outputs); });
  CHECK(error.code == STG_INVALID_ARGUMENT);
  return error;
}

std::string dtype_of(const stg_value& value) { return dtype_name(value.as.tensor->view.dtype); }

}  // namespace

TEST_CASE("tensors are joined along dimension 0 in replica order, dtype kept") {
  const Tree out = gathered([](int32_t i) -> Value { return tensor_of({i + 0.0, i + 0.5}, {1, 2}, {STG_DTYPE_BFLOAT, 16, 1}); });
  CHECK(shape(out.root()) == std::vector<int64_t>{2, 2});
  CHECK(numbers(out.root()) == Numbers{0, 0.5, 1, 1.5});
  CHECK(dtype_of(out.root()) == "bfloat16");
}

TEST_CASE("0-dim outputs become 1-dim with one entry per replica") {
  const auto model = model_with([](int32_t i) -> Value {
    return dict_of(entry("a", scalar(i, {STG_DTYPE_INT, 32, 1})), entry("loss", scalar(i)));
  });
  Instance instance("data_parallel", R"({"devices": 2})");
  instance.setup(*model, STG_STAGE_PREDICT);
  // The loss of an evaluation isn't reduced, either.
  for (const auto function : {instance.api.validation_step, instance.api.test_step, instance.api.predict_step}) {
    const Tree out = std::move(instance.evaluate(function, batch_of({0, 0, 0})).outputs);
    for (const char* key : {"a", "loss"}) {
      CHECK(numbers(*find(out.root(), key)) == Numbers{0, 1});
      CHECK(shape(*find(out.root(), key)) == std::vector<int64_t>{2});
    }
    CHECK(dtype_of(*find(out.root(), "a")) == "int32");
    CHECK(dtype_of(*find(out.root(), "loss")) == "float32");
  }
}

TEST_CASE("a single device's outputs are the model's own") {
  const auto model = model_with([](int32_t) -> Value { return dict_of(entry("a", scalar(3)), entry("n", 2.0)); });
  Instance instance("single_device", "{}");
  instance.setup(*model, STG_STAGE_PREDICT);
  const StepOutcome outcome = instance.predict(batch_of({0}));
  CHECK(shape(*find(outcome.outputs.root(), "a")).empty());
  CHECK(find(outcome.outputs.root(), "n")->type == STG_DOUBLE);
}

TEST_CASE("plain numbers become tensors of int64, float64 and bool") {
  const Outputs outputs = [](int32_t) -> Value { return dict_of(entry("i", int64_t{1}), entry("d", 2.0), entry("b", true)); };
  const Tree out = gathered(outputs);
  CHECK(numbers(*find(out.root(), "i")) == Numbers{1, 1});
  CHECK(dtype_of(*find(out.root(), "i")) == "int64");
  CHECK(numbers(*find(out.root(), "d")) == Numbers{2, 2});
  CHECK(dtype_of(*find(out.root(), "d")) == "float64");
  CHECK(numbers(*find(out.root(), "b")) == Numbers{1, 1});
  CHECK(dtype_of(*find(out.root(), "b")) == "bool");
  const Tree lightning = gathered(outputs, R"({"devices": 2, "options": {"compat": "lightning"}})");
  CHECK(dtype_of(*find(lightning.root(), "d")) == "float32");
}

TEST_CASE("a nested output keeps its structure and the order of its keys") {
  const Tree out = gathered([](int32_t i) -> Value {
    Tuple tuple;
    tuple.items.emplace_back(scalar(i));
    tuple.items.emplace_back(Value{});
    List list;
    list.emplace_back(std::move(tuple));
    // The second replica's keys come in another order.
    if (i == 1) return dict_of(entry("a", scalar(1)), entry("z", std::move(list)));
    return dict_of(entry("z", std::move(list)), entry("a", scalar(0)));
  });
  REQUIRE(out.root().type == STG_DICT);
  CHECK(text_of(out.root().as.entries[0].key) == "z");
  const stg_value& list = out.root().as.entries[0].value;
  REQUIRE(list.type == STG_LIST);
  REQUIRE(list.as.items[0].type == STG_TUPLE);
  CHECK(numbers(list.as.items[0].as.items[0]) == Numbers{0, 1});
  CHECK(list.as.items[0].as.items[1].type == STG_NONE);
}

TEST_CASE("lists of strings are concatenated, lone strings and bytes are listed") {
  const Tree out = gathered([](int32_t i) -> Value {
    List names;
    names.emplace_back(concat("name ", i));
    if (i == 1) names.emplace_back("more");
    return dict_of(entry("names", std::move(names)), entry("lone", concat("s", i)),
                   entry("raw", Bytes{{static_cast<uint8_t>(i)}}));
  });
  const stg_value& names = *find(out.root(), "names");
  REQUIRE(names.count == 3);
  CHECK(text_of(names.as.items[2]) == "more");
  const stg_value& lone = *find(out.root(), "lone");
  REQUIRE(lone.type == STG_LIST);
  CHECK(text_of(lone.as.items[1]) == "s1");
  REQUIRE(find(out.root(), "raw")->count == 2);
  CHECK(find(out.root(), "raw")->as.items[1].as.bytes[0] == 1);
}

TEST_CASE("outputs that differ between replicas are an error that names key path and replica") {
  const auto message = [](const Outputs& outputs) { return refused(outputs).message; };
  CHECK_THAT(message([](int32_t i) -> Value { return dict_of(entry(i == 0 ? "a" : "b", scalar(0))); }),
             Catch::Contains("[\"a\"]") && Catch::Contains("replica 1"));
  CHECK_THAT(message([](int32_t i) -> Value {
               if (i == 0) return dict_of(entry("a", scalar(0)));
               return dict_of(entry("a", scalar(0)), entry("b", scalar(0)));
             }),
             Catch::Contains("[\"b\"]") && Catch::Contains("replica 1"));
  CHECK_THAT(message([](int32_t i) -> Value { return dict_of(entry("a", scalar(0, i == 0 ? float32 : float64))); }),
             Catch::Contains("float64") && Catch::Contains("float32"));
  CHECK_THAT(message([](int32_t i) -> Value {
               return tensor_of({1, 2}, i == 0 ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{2, 1});
             }),
             Catch::Contains("(root)") && Catch::Contains("(2, 1)"));
  CHECK_THAT(message([](int32_t i) -> Value { return i == 0 ? Value{} : Value{scalar(0)}; }), Catch::Contains("none"));
  CHECK_THAT(message([](int32_t i) -> Value {
               List list;
               for (int32_t k = 0; k <= i; ++k) list.emplace_back(scalar(0));
               return list;
             }),
             Catch::Contains("2 items"));
  CHECK(refused([](int32_t i) -> Value { return i == 0 ? Value{} : Value{scalar(0)}; }).replica == 1);
}

TEST_CASE("a training step's loss is 0-dim and weighted, its other outputs stay per replica") {
  const auto model =
      model_with([](int32_t i) -> Value { return dict_of(entry("extra", scalar(i)), entry("loss", scalar(i == 0 ? 1 : 4))); });
  Instance instance("data_parallel", R"({"devices": 2, "optimizer": {"name": "sgd"}})");
  instance.setup(*model);
  const StepOutcome outcome = instance.train(batch_of({0, 0, 0}));
  CHECK(shape(*find(outcome.outputs.root(), "loss")).empty());
  CHECK(outcome.loss() == 2.0);  // (2*1 + 1*4) / 3
  CHECK(numbers(*find(outcome.outputs.root(), "extra")) == Numbers{0, 1});
}

TEST_CASE("a bare tensor is the loss of a training step") {
  const auto model = model_with([](int32_t i) -> Value { return scalar(i); });
  Instance instance("data_parallel", R"({"devices": 2, "optimizer": {"name": "sgd"}})");
  instance.setup(*model);
  const StepOutcome outcome = instance.train(batch_of({0, 0}));
  CHECK(shape(outcome.outputs.root()).empty());
  CHECK(outcome.loss() == 0.5);
}

TEST_CASE("a training loss that isn't a 0-dim floating tensor is an error") {
  const std::vector<std::pair<Outputs, std::string>> cases{
      {[](int32_t) -> Value { return tensor_of({1}, {1}); }, "0-dim"},
      {[](int32_t) -> Value { return dict_of(entry("lost", scalar(1))); }, "\"loss\""},
      {[](int32_t) -> Value { return dict_of(entry("loss", 1.0)); }, "double"},
      {[](int32_t) -> Value { return scalar(1, int64); }, "int64"}};
  for (const auto& [outputs, text] : cases) {
    const auto model = model_with(outputs);
    Instance instance("data_parallel", R"({"devices": 2, "optimizer": {"name": "sgd"}})");
    instance.setup(*model);
    const Error error = error_of([&] { instance.train(batch_of({0, 0})); });
    CHECK_THAT(error.message, Catch::Contains(text));
    CHECK(instance.value("weight") == 0);
    CHECK(model->num_graphs == 0);
  }
}

TEST_CASE("an output that would alias a borrowed batch is copied") {
  std::vector<ToyParameter> parameters{{{"weight"}, {1}, {0}}};
  ToyModel model(parameters, [](ToyReplica&, const stg_step_context&, const stg_value& batch) {
    stg_value& x = *find(const_cast<stg_value&>(batch), "x");  // the step's own
    ToyStep step;
    step.outputs = TensorPtr{std::exchange(x, {}).as.tensor};
    return step;
  });
  Instance instance("single_device", "{}");
  instance.setup(model, STG_STAGE_PREDICT);
  const Tree batch = batch_of({7, 8});
  const StepOutcome outcome = instance.predict(Tree::view(batch.root()));
  const stg_tensor_view& x = find(batch.root(), "x")->as.tensor->view;
  CHECK(first_element<>(outcome.outputs.root().as.tensor->view) != first_element<>(x));
  CHECK(numbers(outcome.outputs.root()) == Numbers{7, 8});
}
