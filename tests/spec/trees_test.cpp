// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Splitting a batch": trees of any form, any number of devices in any order, splitters of the model's own.
#include "spec/trees.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "spec/instance.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

using Numbers = std::vector<double>;
using Sizes = std::vector<int64_t>;

// Gives its share back; tells which device saw which share of how many rows.
struct Identity {
  std::mutex mutex;
  std::map<int32_t, int32_t> devices;
  std::map<int32_t, int64_t> sizes;
  ToyModel model{{{{"weight"}, {1}, {0}}}, [this](ToyReplica&, const stg_step_context& context, const stg_value& batch) {
                   const std::lock_guard lock(mutex);
                   devices[context.replica] = context.device.index;
                   int64_t size = -1;
                   for_each_leaf(batch, [&](const KeyPath&, const stg_value& leaf) {
                     if (leaf.type == STG_TENSOR && leaf.as.tensor->view.num_dims > 0) size = leaf.as.tensor->view.shape[0];
                   });
                   sizes[context.replica] = size;
                   ToyStep step;
                   step.outputs = context.stage == STG_STAGE_FIT ? Value{scalar(1)} : take(copy_tree(batch));
                   step.gradients = {{1}};
                   return step;
                 }};

  Sizes seen() {
    Sizes list;
    for (const auto& [replica, size] : sizes) list.push_back(size);
    sizes.clear();
    return list;
  }
};

}  // namespace

TEST_CASE("any number of rows over 1 to 16 devices: sizes by the rule, rows in order, no replica idle while another has two") {
  for (size_t num_devices = 1; num_devices <= 16; ++num_devices) {
    for (const bool in_chunks : {false, true}) {
      Identity identity;
      Instance instance("data_parallel", concat("{\"devices\": ", num_devices, ", \"threads\": 1, \"options\": {\"split\": \"",
                                                in_chunks ? "chunk" : "balanced", "\"}}"));
      instance.setup(identity.model, STG_STAGE_PREDICT);
      for (int64_t num_rows = 1; num_rows <= 35; ++num_rows) {
        const StepOutcome outcome = instance.predict(make_tree(rows(num_rows)));
        const Sizes sizes = identity.seen();
        INFO(num_rows << " rows over " << num_devices << " devices" << (in_chunks ? ", in chunks" : ""));
        CHECK(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == num_rows);
        const auto n = static_cast<int64_t>(num_devices);
        const int64_t largest = (num_rows + n - 1) / n;
        CHECK(sizes.front() == largest);
        if (in_chunks) {
          CHECK(static_cast<int64_t>(sizes.size()) == (num_rows + largest - 1) / largest);
          CHECK(std::all_of(sizes.begin(), sizes.end() - 1, [&](int64_t size) { return size == largest; }));
        } else {
          CHECK(static_cast<int64_t>(sizes.size()) == std::min(num_rows, n));
          CHECK(std::is_sorted(sizes.rbegin(), sizes.rend()));
          CHECK(sizes.front() - sizes.back() <= 1);
        }
        CHECK(outcome.weights == Numbers(sizes.begin(), sizes.end()));
        Numbers expected(static_cast<size_t>(num_rows));
        std::iota(expected.begin(), expected.end(), 0.0);
        CHECK(numbers(outcome.outputs.root()) == expected);
      }
    }
  }
}

TEST_CASE("whatever the order of the device list, replica i is its i-th device and outputs come in that order") {
  std::mt19937 random(5);
  std::vector<int> order(16);
  std::iota(order.begin(), order.end(), 0);
  for (int round = 0; round < 8; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    order.resize(static_cast<size_t>(16 - 2 * round));
    std::vector<std::string> words;
    for (const int index : order) words.push_back(std::to_string(index));
    Identity identity;
    Instance instance("data_parallel", concat("{\"devices\": [", join(words), "]}"));
    instance.setup(identity.model, STG_STAGE_PREDICT);
    const auto num_rows = static_cast<int64_t>(order.size());
    const StepOutcome outcome = instance.predict(make_tree(rows(num_rows)));
    for (size_t i = 0; i < order.size(); ++i) CHECK(identity.devices[static_cast<int32_t>(i)] == order[i]);
    CHECK(identity.devices.size() == order.size());
    Numbers expected(order.size());
    std::iota(expected.begin(), expected.end(), 0.0);
    CHECK(numbers(outcome.outputs.root()) == expected);
    const stg_device* devices = nullptr;
    uint64_t num_devices = 0;
    check(instance.api.devices(instance.self, &devices, &num_devices));
    CHECK(devices[0].index == order[0]);
    stg_ranks ranks = sized<stg_ranks>();
    check(instance.api.ranks(instance.self, &ranks));
    CHECK(ranks.world_size == 1);
    CHECK(ranks.global_rank == 0);
  }
}

TEST_CASE("nested tuples, lists and dicts are split leaf by leaf, and come back as they were") {
  for (const size_t num_devices : {1, 2, 3, 16}) {
    Identity identity;
    Instance instance("data_parallel", concat("{\"devices\": ", num_devices, "}"));
    instance.setup(identity.model, STG_STAGE_PREDICT);
    Tree batch = make_tree(dict_of(
        entry("z", make_list(tuple_of(rows(5, 2), dict_of(entry("deep", rows(5, 3, int64)))), rows(5, 1, boolean))),
        entry("a", tuple_of(tuple_of(Tuple{}, List{}), Dict{}, rows(5, 0))), entry("none", Value{}), entry("last", rows(5))));
    const Tree expected = copy_tree(batch.root());
    const StepOutcome outcome = instance.predict(std::move(batch));
    const stg_value& root = outcome.outputs.root();
    REQUIRE(root.type == STG_DICT);
    REQUIRE(root.count == 4);
    for (uint32_t e = 0; e < 4; ++e) CHECK(text_of(root.as.entries[e].key) == text_of(expected.root().as.entries[e].key));
    const stg_value& z = root.as.entries[0].value;
    const stg_value& z_expected = expected.root().as.entries[0].value;
    REQUIRE(z.type == STG_LIST);
    REQUIRE(z.as.items[0].type == STG_TUPLE);
    CHECK(numbers(z.as.items[0].as.items[0]) == numbers(z_expected.as.items[0].as.items[0]));
    CHECK(shape(z.as.items[0].as.items[0]) == Sizes{5, 2});
    const stg_value& deep = *find(z.as.items[0].as.items[1], "deep");
    CHECK(numbers(deep) == numbers(*find(z_expected.as.items[0].as.items[1], "deep")));
    CHECK(dtype_name(deep.as.tensor->view.dtype) == "int64");
    CHECK(dtype_name(z.as.items[1].as.tensor->view.dtype) == "bool");
    const stg_value& a = root.as.entries[1].value;
    REQUIRE(a.type == STG_TUPLE);
    CHECK(a.as.items[0].as.items[0].type == STG_TUPLE);
    CHECK(a.as.items[0].as.items[1].type == STG_LIST);
    CHECK(a.as.items[1].type == STG_DICT);
    CHECK(shape(a.as.items[2]) == Sizes{5, 0});
    CHECK(root.as.entries[2].value.type == STG_NONE);
    CHECK(numbers(root.as.entries[3].value) == Numbers{0, 1, 2, 3, 4});
  }
}

TEST_CASE("leaves that share memory are split each for itself, moved or borrowed") {
  for (const bool is_moved : {true, false}) {
    Identity identity;
    Instance instance("data_parallel", R"({"devices": 2})");
    instance.setup(identity.model, STG_STAGE_PREDICT);
    const std::shared_ptr<stg_tensor> whole{rows(3, 2).release(), TensorRelease{}};
    // The tensor, the tensor again, and its second column.
    const auto handle = [&](int64_t column, int64_t num_columns) {
      TensorPtr tensor = make_strided_tensor(whole, whole->view.data, float32, {3, num_columns}, {2, 1}, 0, whole->view.device);
      tensor->view.byte_offset = static_cast<uint64_t>(column) * sizeof(float);
      return tensor;
    };
    Tree batch = make_tree(make_list(handle(0, 2), handle(0, 2), handle(1, 1)));
    const StepOutcome outcome = instance.predict(is_moved ? std::move(batch) : Tree::view(batch.root()));
    const stg_value& root = outcome.outputs.root();
    CHECK(numbers(root.as.items[0]) == Numbers{0, 100, 1, 101, 2, 102});
    CHECK(numbers(root.as.items[1]) == Numbers{0, 100, 1, 101, 2, 102});
    CHECK(numbers(root.as.items[2]) == Numbers{100, 101, 102});
  }
}

TEST_CASE("leaves that disagree about the rows anywhere in a tree are an error with both key paths, in every stage") {
  for (const std::string strategy : {"single_device", "data_parallel"}) {
    Identity identity;
    Instance instance(strategy, R"({"devices": 1, "optimizer": {"name": "sgd"}})");
    instance.setup(identity.model);
    const auto batch = [] {
      return make_tree(
          dict_of(entry("scale", scalar(2)), entry("a", make_list(rows(8), dict_of(entry("b", tuple_of(rows(6))))))));
    };
    const std::vector<std::function<void()>> calls{[&] { instance.train(batch()); }, [&] { instance.training_step(batch()); },
                                                   [&] { instance.validate(batch()); }, [&] { instance.predict(batch()); },
                                                   [&] { instance.evaluate(instance.api.test_step, batch()); }};
    for (const auto& call : calls) {
      const Error error = error_of(call);
      CHECK(error.code == STG_INVALID_ARGUMENT);
      CHECK((error.flags & STG_ERROR_INSTANCE_USABLE) != 0);
      CHECK_THAT(error.message, Catch::Contains("[\"a\"][0] has 8") && Catch::Contains("[\"a\"][1][\"b\"][0] has 6"));
    }
    CHECK(identity.sizes.empty());  // no replica saw it
    instance.train(make_tree(rows(2)));
  }
}

TEST_CASE("an empty batch runs on the root alone in every evaluation, its empty outputs with it, and is an error in training") {
  for (const std::string strategy : {"single_device", "data_parallel"}) {
    Identity identity;
    Instance instance(strategy,
                      concat("{\"devices\": ", strategy == "data_parallel" ? 3 : 1, R"(, "optimizer": {"name": "sgd"}})"));
    instance.setup(identity.model);
    const auto batch = [] { return make_tree(tuple_of(rows(0, 4), dict_of(entry("y", rows(0, 1, int64))), scalar(3))); };
    for (const auto function : {instance.api.validation_step, instance.api.test_step, instance.api.predict_step}) {
      const StepOutcome outcome = instance.evaluate(function, batch());
      CHECK(identity.seen() == Sizes{0});
      CHECK(outcome.weights == Numbers{0});
      CHECK(shape(outcome.outputs.root().as.items[0]) == Sizes{0, 4});
      CHECK(shape(*find(outcome.outputs.root().as.items[1], "y")) == Sizes{0, 1});
    }
    for (const bool in_one : {true, false}) {
      const Error error = error_of([&] {
        if (in_one) instance.train(batch());
        instance.training_step(batch());
      });
      CHECK(error.code == STG_INVALID_ARGUMENT);
      CHECK_THAT(error.message, Catch::Contains("no rows") && Catch::Contains("at least one"));
    }
    CHECK(identity.seen().empty());
    instance.train(make_tree(rows(1)));
    CHECK(instance.value("weight") == -1);
  }
}

namespace {

// A splitter that does what a test says.
std::function<stg_error*(const stg_tree*, uint64_t, stg_tree*, uint64_t*)> splitter;

void use_splitter(ToyModel& model) {
  model.table.split = [](void*, stg_replica*, const stg_tree* batch, uint64_t num_shares, stg_tree* shares,
                         uint64_t* num_filled) { return guard([&] { check(splitter(batch, num_shares, shares, num_filled)); }); };
}

}  // namespace

TEST_CASE("a model's own splitter is called on the calling thread, for one device too, and its shares run one per replica") {
  for (const size_t num_devices : {1, 2, 3}) {
    Identity identity;
    use_splitter(identity.model);
    std::thread::id thread;
    // Strings too, one by one: {"texts": [...]} split like the rows.
    splitter = [&](const stg_tree* batch, uint64_t num_shares, stg_tree* shares, uint64_t* num_filled) -> stg_error* {
      thread = std::this_thread::get_id();
      const stg_value& texts = *find(batch->root, "texts");
      for (uint64_t i = 0; i < num_shares && i < texts.count; ++i) {
        List own;
        for (uint64_t t = i; t < texts.count; t += num_shares) own.emplace_back(std::string(text_of(texts.as.items[t])));
        const auto num_rows = static_cast<int64_t>(own.size());
        shares[i] = make_tree(dict_of(entry("x", rows(num_rows)), entry("texts", std::move(own)))).give();
        *num_filled = i + 1;
      }
      return nullptr;
    };
    Instance instance("data_parallel", concat("{\"devices\": ", num_devices, "}"));
    instance.setup(identity.model, STG_STAGE_PREDICT);
    const StepOutcome outcome =
        instance.predict(make_tree(dict_of(entry("texts", make_list(Value{"a"}, Value{"b"}, Value{"c"}, Value{"d"})))));
    CHECK(thread == std::this_thread::get_id());
    CHECK(identity.seen() == (num_devices == 1 ? Sizes{4} : num_devices == 2 ? Sizes{2, 2} : Sizes{2, 1, 1}));
    std::string joined;
    const stg_value& texts = *find(outcome.outputs.root(), "texts");
    for (uint32_t i = 0; i < texts.count; ++i) joined += text_of(texts.as.items[i]);
    CHECK(joined == (num_devices == 1 ? "abcd" : num_devices == 2 ? "acbd" : "adbc"));
  }
}

TEST_CASE("what a model's own splitter gets wrong is told as replica 0's error in split, and the next batch works") {
  Identity identity;
  use_splitter(identity.model);
  Instance instance("data_parallel", R"({"devices": [3, 1], "optimizer": {"name": "sgd"}})");
  instance.setup(identity.model);
  const auto told = [&] {
    const Error error = error_of([&] { instance.train(batch_of({1, 2})); });
    CHECK((error.flags & STG_ERROR_INSTANCE_USABLE) != 0);
    CHECK(error.replica == 0);
    CHECK(error.device.index == 3);
    CHECK_THAT(error.message, Catch::Contains("replica 0 on cpu:3, in split"));
    CHECK(instance.value("weight") == 0);
    return error;
  };
  splitter = [](const stg_tree*, uint64_t, stg_tree*, uint64_t*) {
    return to_abi(Error{STG_OUT_OF_RANGE, "the lengths add up to 7, there are 6 rows"});
  };
  Error error = told();
  CHECK(error.code == STG_OUT_OF_RANGE);
  REQUIRE(error.cause != nullptr);
  CHECK(text_of(error.cause->message) == "the lengths add up to 7, there are 6 rows");
  splitter = [](const stg_tree*, uint64_t, stg_tree*, uint64_t*) -> stg_error* { throw std::bad_alloc(); };
  CHECK(told().code == STG_RESOURCE_EXHAUSTED);
  for (const uint64_t num_filled : {0, 3}) {
    splitter = [num_filled](const stg_tree*, uint64_t, stg_tree* shares, uint64_t* filled) -> stg_error* {
      shares[0] = batch_of({1}).give();  // owned and released all the same
      *filled = num_filled;
      return nullptr;
    };
    CHECK_THAT(told().message, Catch::Contains(concat("filled ", num_filled, " shares")) && Catch::Contains("1 to 2"));
  }
  splitter = [](const stg_tree*, uint64_t, stg_tree* shares, uint64_t* filled) -> stg_error* {
    shares[0] = batch_of({1}).give();
    TensorPtr bad = rows(1);
    bad->view.shape[0] = -1;
    shares[1] = make_tree(dict_of(entry("x", std::move(bad)))).give();
    *filled = 2;
    return nullptr;
  };
  CHECK_THAT(told().message, Catch::Contains("share 1") && Catch::Contains("[\"x\"]") && Catch::Contains("-1"));
  splitter = [](const stg_tree*, uint64_t, stg_tree* shares, uint64_t* filled) -> stg_error* {
    shares[0] = batch_of({1}).give();
    *filled = 1;
    return nullptr;
  };
  instance.train(batch_of({1, 2}));
  CHECK(instance.value("weight") == -1);
}
