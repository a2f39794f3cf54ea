// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Gathering outputs": what differs between replicas by its parts, strings, dtypes, and objects of the host's.
#include "spec/outputs.hpp"

#include <atomic>
#include <thread>

#include "spec/instance.hpp"
#include "spec/trees.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

using Numbers = std::vector<double>;
using Sizes = std::vector<int64_t>;

Tree gathered(const Outputs& outputs, size_t num_devices = 3) {
  const auto model = model_with(outputs);
  Instance instance("data_parallel", concat("{\"devices\": ", num_devices, "}"));
  instance.setup(*model, STG_STAGE_PREDICT);
  return std::move(instance.predict(batch_of(Numbers(num_devices))).outputs);
}

}  // namespace

TEST_CASE("outputs that differ are an error with key path, replica and both sides, whichever replica it is") {
  struct Case {
    Outputs outputs;
    std::string place, here, there;
  };
  // Replica 2 of 0, 1, 2 is the odd one.
  const auto odd = [](const std::function<Value(bool is_odd)>& at) {
    return [at](int32_t i) -> Value { return dict_of(entry("k", make_list(scalar(0), at(i == 2)))); };
  };
  const std::string place = "[\"k\"][1]";
  const std::vector<Case> cases{
      {odd([](bool is_odd) -> Value { return is_odd ? Value{} : Value{scalar(0)}; }), place, "a none", "a tensor"},
      {odd([](bool is_odd) -> Value { return is_odd ? Value{scalar(0)} : Value{}; }), place, "a tensor", "a none"},
      {odd([](bool is_odd) -> Value { return is_odd ? Value{1.5} : Value{int64_t{1}}; }), place, "a double", "a int64"},
      {odd([](bool is_odd) -> Value { return is_odd ? Value{true} : Value{int64_t{1}}; }), place, "a bool", "a int64"},
      {odd([](bool is_odd) -> Value { return is_odd ? Value{"text"} : Value{Bytes{{1}}}; }), place, "a string", "a bytes"},
      {odd([](bool is_odd) -> Value { return is_odd ? Value{List{}} : Value{Tuple{}}; }), place, "a list", "a tuple"},
      {odd([](bool is_odd) -> Value { return is_odd ? Value{rows(1, 1, float64)} : Value{rows(1)}; }), place,
       "a float64 tensor (1, 1)", "a float32 tensor (1, 1)"},
      {odd([](bool is_odd) -> Value { return is_odd ? Value{rows(1, 3)} : Value{rows(4, 2)}; }), place, "a float32 tensor (1, 3)",
       "a float32 tensor (4, 2)"},
      {odd([](bool is_odd) -> Value { return is_odd ? Value{tensor_of({1}, {1})} : Value{rows(1)}; }), place,
       "a float32 tensor (1)", "a float32 tensor (1, 1)"},
      {odd([](bool is_odd) -> Value { return is_odd ? Value{tensor_of({1}, {1})} : Value{scalar(0)}; }), place,
       "a float32 tensor (1)", "a float32 tensor ()"},
      {odd([](bool is_odd) -> Value { return is_odd ? Value{scalar(0)} : Value{tensor_of({1}, {1})}; }), place,
       "a float32 tensor ()", "a float32 tensor (1)"},
      {odd([](bool is_odd) -> Value { return is_odd ? make_list(scalar(0)) : make_list(scalar(0), scalar(1)); }), place,
       "1 items", "2 items"},
      {odd([](bool is_odd) -> Value { return is_odd ? tuple_of(scalar(0), scalar(1)) : tuple_of(scalar(0)); }), place, "2 items",
       "1 items"},
      {odd([](bool is_odd) -> Value { return is_odd ? dict_of(entry("b", 1.0)) : dict_of(entry("a", 1.0)); }), place + "[\"a\"]",
       "no such key", "one"},
      {odd([](bool is_odd) -> Value { return is_odd ? dict_of(entry("a", 1.0), entry("b", 1.0)) : dict_of(entry("a", 1.0)); }),
       place + "[\"b\"]", "this key", "none"},
  };
  for (const Case& c : cases) {
    const Error error = error_of([&] { gathered(c.outputs); });
    INFO(error.message);
    CHECK(error.code == STG_INVALID_ARGUMENT);
    CHECK(error.replica == 2);
    CHECK_THAT(error.message, Catch::Contains(c.place + ":") && Catch::Contains("replica 2 has " + c.here + ",") &&
                                  Catch::Contains("replica 0 has " + c.there));
  }
}

TEST_CASE("a training step whose outputs can't be joined changes no weight and no buffer, and the next one works") {
  std::atomic<bool> differ{false};
  const auto model = model_with([&](int32_t i) -> Value {
    Dict outputs = dict_of(entry("loss", scalar(1)), entry("seen", rows(1, i == 1 && differ ? 2 : 1)));
    return outputs;
  });
  for (const bool in_one : {true, false}) {
    Instance instance("data_parallel", sgd_config(2));
    instance.setup(*model);
    instance.accumulate(batch_of({1, 2}));
    differ = true;
    const Error error = error_of([&] {
      if (in_one) instance.train(batch_of({1, 2}));
      instance.training_step(batch_of({1, 2}));
    });
    differ = false;
    CHECK(error.replica == 1);
    CHECK_THAT(error.message, Catch::Contains("[\"seen\"]") && Catch::Contains("(1, 2)") && Catch::Contains("(1, 1)"));
    CHECK(instance.value("weight") == 0);
    CHECK(instance.status().num_micro_batches == 0);
    CHECK(model->num_graphs == 0);
    instance.train(batch_of({1, 2}));
    CHECK(instance.value("weight") == -1);
  }
}

TEST_CASE("lists whose leaves are all strings are concatenated, whatever they are made of, others are walked") {
  const Tree out = gathered([](int32_t i) -> Value {
    List pairs;
    for (int32_t k = 0; k <= i; ++k) pairs.emplace_back(tuple_of(Value{concat(i)}, Value{"b"}));
    return dict_of(entry("pairs", std::move(pairs)), entry("lists", make_list(make_list(Value{concat(i)}))),
                   entry("empty", List{}), entry("dicts", make_list(dict_of(entry("id", Value{concat(i)})))),
                   entry("mixed", make_list(Value{"m"}, Value{1.0})));
  });
  const stg_value& pairs = *find(out.root(), "pairs");
  REQUIRE(pairs.count == 6);
  CHECK(pairs.as.items[5].type == STG_TUPLE);
  CHECK(text_of(pairs.as.items[5].as.items[0]) == "2");
  const stg_value& lists = *find(out.root(), "lists");
  REQUIRE(lists.count == 3);
  CHECK(text_of(lists.as.items[2].as.items[0]) == "2");
  CHECK(find(out.root(), "empty")->count == 0);
  const stg_value& dicts = *find(out.root(), "dicts");
  REQUIRE(dicts.count == 3);
  CHECK(text_of(*find(dicts.as.items[1], "id")) == "1");
  const stg_value& mixed = *find(out.root(), "mixed");
  REQUIRE(mixed.count == 2);
  CHECK(mixed.as.items[0].type == STG_LIST);
  CHECK(numbers(mixed.as.items[1]) == Numbers{1, 1, 1});
}

TEST_CASE("complex, 16-bit and integer outputs keep their dtype, 0-dim ones too") {
  const std::vector<stg_dtype> dtypes{{STG_DTYPE_COMPLEX, 64, 1}, {STG_DTYPE_COMPLEX, 128, 1}, {STG_DTYPE_FLOAT, 16, 1},
                                      {STG_DTYPE_BFLOAT, 16, 1},  {STG_DTYPE_UINT, 16, 1},     {STG_DTYPE_INT, 8, 1}};
  for (const stg_dtype dtype : dtypes) {
    const auto made = [&](int32_t i, std::vector<int64_t> shape) {
      TensorPtr tensor = allocate_tensor(dtype, std::move(shape));
      std::memset(tensor->view.data, i + 1, static_cast<size_t>(numel(tensor->view)) * element_size_bytes(dtype));
      return tensor;
    };
    const Tree out = gathered([&](int32_t i) -> Value { return make_list(made(i, {}), made(i, {2, 2})); });
    for (uint32_t item = 0; item < 2; ++item) {
      const stg_tensor_view& view = out.root().as.items[item].as.tensor->view;
      CHECK(same_dtype(view.dtype, dtype));
      CHECK(shape(out.root().as.items[item]) == (item == 0 ? Sizes{3} : Sizes{6, 2}));
      const size_t bytes_per_replica = static_cast<size_t>(numel(view) / 3) * element_size_bytes(dtype);
      for (size_t b = 0; b < 3 * bytes_per_replica; ++b) {
        REQUIRE(first_element<unsigned char>(view)[b] == b / bytes_per_replica + 1);
      }
    }
  }
}

namespace {

// An object of the host's: counts its references, and merges by adding up, where it may.
struct Counter {
  explicit Counter(int amount, bool merges) : value(amount) {
    table.type_name = to_abi("counter");
    table.retain = [](stg_opaque* self) { ++reinterpret_cast<Counter*>(self)->num_references; };
    table.release = [](stg_opaque* self) { --reinterpret_cast<Counter*>(self)->num_references; };
    if (merges) table.reduce = &add;
  }
  static stg_error* add(stg_opaque* const* objects, uint64_t count, stg_opaque** out) {
    if (fails) return to_abi(Error{STG_UNAVAILABLE, "the metric's store is closed"});
    num_on_other_threads += std::this_thread::get_id() != home;
    for (uint64_t i = 1; i < count; ++i) {
      reinterpret_cast<Counter*>(objects[0])->value += reinterpret_cast<Counter*>(objects[i])->value;
    }
    objects[0]->retain(objects[0]);
    *out = objects[0];
    return nullptr;
  }
  stg_opaque table = sized<stg_opaque>();
  int value;
  std::atomic<int> num_references{0};
  static inline bool fails = false;
  static inline int num_on_other_threads = 0;
  static inline std::thread::id home;
};

OpaquePtr handle_of(Counter& counter) {
  counter.table.retain(&counter.table);
  return OpaquePtr{&counter.table};
}

}  // namespace

TEST_CASE("opaque outputs are merged by their own reduce, on the calling thread, and listed where they have none") {
  Counter::home = std::this_thread::get_id();
  Counter::num_on_other_threads = 0;
  Counter counters[] = {Counter(1, true), Counter(2, true), Counter(4, true)};
  Counter plain[] = {Counter(1, false), Counter(2, false), Counter(4, false)};
  {
    const Tree out = gathered([&](int32_t i) -> Value {
      return dict_of(entry("merged", handle_of(counters[i])), entry("listed", handle_of(plain[i])));
    });
    CHECK(find(out.root(), "merged")->as.opaque == &counters[0].table);
    CHECK(counters[0].value == 7);
    const stg_value& listed = *find(out.root(), "listed");
    REQUIRE(listed.count == 3);
    for (uint32_t i = 0; i < 3; ++i) CHECK(listed.as.items[i].as.opaque == &plain[i].table);
  }
  CHECK(Counter::num_on_other_threads == 0);
  for (const auto& counter : counters) CHECK(counter.num_references == 0);
  for (const auto& counter : plain) CHECK(counter.num_references == 0);
}

TEST_CASE("an opaque leaf of a batch is handed to every replica by retain, and let go when the step is over") {
  Counter counter(1, false);
  std::atomic<int> num_seen{0};
  std::vector<ToyParameter> parameters{{{"weight"}, {1}, {0}}};
  ToyModel model(parameters, [&](ToyReplica&, const stg_step_context&, const stg_value& batch) {
    num_seen += find(batch, "object")->as.opaque == &counter.table;
    return ToyStep{};
  });
  Instance instance("data_parallel", R"({"devices": 3})");
  instance.setup(model, STG_STAGE_PREDICT);
  instance.predict(make_tree(dict_of(entry("x", rows(3)), entry("object", handle_of(counter)))));
  CHECK(num_seen == 3);
  CHECK(counter.num_references == 0);
}

TEST_CASE("a metric whose reduce fails is an error with its key path and cause, nothing is changed and the next step works") {
  Counter counters[] = {Counter(1, true), Counter(2, true)};
  const auto model = model_with(
      [&](int32_t i) -> Value { return dict_of(entry("loss", scalar(1)), entry("metrics", make_list(handle_of(counters[i])))); });
  Instance instance("data_parallel", sgd_config(2));
  instance.setup(*model);
  for (const bool in_training : {true, false}) {
    Counter::fails = true;
    const Error error = error_of([&] {
      if (in_training) instance.train(batch_of({1, 2}));
      instance.validate(batch_of({1, 2}));
    });
    Counter::fails = false;
    CHECK(error.code == STG_UNAVAILABLE);
    CHECK((error.flags & STG_ERROR_INSTANCE_USABLE) != 0);
    CHECK_THAT(error.message, Catch::Contains("[\"metrics\"][0]") && Catch::Contains("counter") &&
                                  Catch::Contains("the metric's store is closed"));
    REQUIRE(error.cause != nullptr);
    CHECK(text_of(error.cause->message) == "the metric's store is closed");
    CHECK(instance.value("weight") == 0);
    CHECK(model->num_graphs == 0);
    for (const auto& counter : counters) CHECK(counter.num_references == 0);
  }
  instance.train(batch_of({1, 2}));
  CHECK(instance.value("weight") == -1);
}
