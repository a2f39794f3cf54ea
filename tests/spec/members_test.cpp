// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "The interface": each member's row, for both plugins. Splitting, gathering, gradients, states and failures have
// files of their own.
#include <array>
#include <map>
#include <mutex>
#include <set>

#include "spec/instance.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

constexpr std::array strategies{"single_device", "data_parallel"};

std::string config_of(const std::string& strategy, const std::string& more = "") {
  return sgd_config(strategy == "single_device" ? 1 : 3, more);
}

Tree to_device(Instance& instance, Tree batch, stg_device device = no_device, int64_t dataloader_index = 0) {
  stg_transfer_args args = sized<stg_transfer_args>();
  args.batch = batch.argument();
  args.device = device;
  args.dataloader_index = dataloader_index;
  stg_tree out{};
  check(instance.api.batch_to_device(instance.self, nullptr, &args, &out));
  return Tree{out};
}

Tree mapped(Instance& instance, decltype(stg_strategy_api::all_gather) function, Tree object) {
  stg_tree out{};
  check(function(instance.self, nullptr, object.argument(), &out));
  return Tree{out};
}

Tree broadcast(Instance& instance, Tree object, int32_t src) {
  stg_tree out{};
  check(instance.api.broadcast(instance.self, nullptr, object.argument(), src, &out));
  return Tree{out};
}

const void* memory_of(const stg_value& tensor) { return tensor.as.tensor->view.data; }

// An opaque value that is never freed.
stg_opaque& a_thing() {
  static stg_opaque thing = [] {
    stg_opaque made = sized<stg_opaque>();
    made.type_name = to_abi("thing");
    made.retain = [](stg_opaque*) {};
    made.release = [](stg_opaque*) {};
    return made;
  }();
  return thing;
}

// One of each kind of leaf and container.
Tree a_bit_of_all(double first = 1) {
  Dict dict;
  dict.emplace_back("x", tensor_of({first, 2, 3}, {3}));
  dict.emplace_back("pair", Tuple{make_list(tensor_of({4, 5, 6, 7, 8, 9}, {3, 2}, int64), "text")});
  dict.emplace_back("list", make_list(2.5, int64_t{7}, true, Value{}, Bytes{{1, 2}}));
  dict.emplace_back("thing", OpaquePtr{&a_thing()});
  dict.emplace_back("scalar", scalar(0.5));
  return make_tree(std::move(dict));
}

// Structure, order, types and values of a_bit_of_all.
void check_bit_of_all(const Tree& tree) {
  const stg_value& root = tree.root();
  REQUIRE(root.type == STG_DICT);
  REQUIRE(root.count == 5);
  const std::array keys{"x", "pair", "list", "thing", "scalar"};
  for (size_t i = 0; i < keys.size(); ++i) CHECK(text_of(root.as.entries[i].key) == keys[i]);
  CHECK(numbers(*find(root, "x")) == std::vector<double>{1, 2, 3});
  const stg_value& pair = *find(root, "pair");
  REQUIRE(pair.type == STG_TUPLE);
  CHECK(same_dtype(pair.as.items[0].as.tensor->view.dtype, int64));
  CHECK(shape(pair.as.items[0]) == std::vector<int64_t>{3, 2});
  CHECK(numbers(pair.as.items[0]) == std::vector<double>{4, 5, 6, 7, 8, 9});
  CHECK(text_of(pair.as.items[1]) == "text");
  const stg_value& list = *find(root, "list");
  REQUIRE(list.type == STG_LIST);
  REQUIRE(list.count == 5);
  CHECK(list.as.items[0].as.f64 == 2.5);
  CHECK(list.as.items[1].as.i64 == 7);
  CHECK(list.as.items[2].type == STG_BOOL);
  CHECK(list.as.items[3].type == STG_NONE);
  CHECK(list.as.items[4].count == 2);
  CHECK(find(root, "thing")->as.opaque == &a_thing());
  CHECK(shape(*find(root, "scalar")).empty());
}

std::vector<std::string> keys_of(const stg_value& dict) {
  std::vector<std::string> keys;
  for (uint32_t i = 0; i < dict.count; ++i) keys.emplace_back(text_of(dict.as.entries[i].key));
  return keys;
}

// What a transfer hook was told, by replica.
struct Transfers {
  std::mutex mutex;
  std::map<int32_t, std::vector<int64_t>> dataloaders;
};
Transfers* the_transfers;

stg_error* noting_transfer(void*, stg_replica* replica, stg_tree* batch, int64_t dataloader_index, stg_tree* out) {
  Tree owned = Tree::receive(batch);
  return guard([&] {
    if (dataloader_index < 0) throw invalid_argument("no dataloader ", dataloader_index);
    const std::lock_guard lock(the_transfers->mutex);
    the_transfers->dataloaders[reinterpret_cast<ToyReplica*>(replica)->args.replica].push_back(dataloader_index);
    *out = owned.give();
  });
}

}  // namespace

TEST_CASE("batch_to_device keeps structure, other leaves and identity, and copies a borrowed batch") {
  const auto model = linear_model();
  for (const std::string strategy : strategies) {
    Instance instance(strategy, config_of(strategy));
    for (const bool is_set_up : {false, true}) {
      if (is_set_up) instance.setup(*model);
      Tree batch = a_bit_of_all();
      const void* memory = memory_of(*find(batch.root(), "x"));
      const Tree copied = to_device(instance, Tree::view(batch.root()));
      check_bit_of_all(copied);
      CHECK(memory_of(*find(copied.root(), "x")) != memory);
      const Tree moved = to_device(instance, std::move(batch), {STG_DEVICE_CPU, 0});
      check_bit_of_all(moved);
      CHECK(memory_of(*find(moved.root(), "x")) == memory);
      const Error error = error_of([&] { to_device(instance, batch_of({1}), {STG_DEVICE_CPU, 7}); });
      CHECK(error.code == STG_INVALID_ARGUMENT);
      CHECK_THAT(error.message, Catch::Contains("cpu:7") && Catch::Contains("cpu:0"));
      CHECK(error_of([&] { to_device(instance, batch_of({1}), {STG_DEVICE_CUDA, 0}); }).code == STG_INVALID_ARGUMENT);
    }
  }
}

TEST_CASE("batch_to_device moves by the model's transfer, under data_parallel only to a device that is named") {
  Transfers transfers;
  the_transfers = &transfers;
  const auto model = linear_model();
  model->table.transfer = noting_transfer;
  using Told = std::map<int32_t, std::vector<int64_t>>;
  for (const std::string strategy : strategies) {
    Instance instance(strategy, config_of(strategy));
    instance.setup(*model);
    transfers.dataloaders.clear();
    to_device(instance, batch_of({1, 2}), no_device, 5);
    CHECK(transfers.dataloaders == (strategy == "single_device" ? Told{{0, {5}}} : Told{}));
    transfers.dataloaders.clear();
    to_device(instance, batch_of({1, 2}), {STG_DEVICE_CPU, strategy == "single_device" ? 0 : 2}, 6);
    CHECK(transfers.dataloaders == (strategy == "single_device" ? Told{{0, {6}}} : Told{{2, {6}}}));
    const Error error = error_of([&] { to_device(instance, batch_of({1}), {STG_DEVICE_CPU, 0}, -1); });
    CHECK(error.replica == 0);
    CHECK_THAT(error.message, Catch::Contains("batch_to_device") && Catch::Contains("no dataloader -1"));
    // In a step each replica's share goes through it.
    transfers.dataloaders.clear();
    instance.train(batch_of({1, 2, 3}));
    CHECK(transfers.dataloaders == (strategy == "single_device" ? Told{{0, {0}}} : Told{{0, {0}}, {1, {0}}, {2, {0}}}));
  }
}

TEST_CASE("broadcast, all_gather and to_host give back the same object, broadcast from rank 0 only") {
  const auto model = linear_model();
  for (const std::string strategy : strategies) {
    Instance instance(strategy, config_of(strategy));
    instance.setup(*model);
    const std::vector<std::function<Tree(Tree)>> members{
        [&](Tree object) { return broadcast(instance, std::move(object), 0); },
        [&](Tree object) { return mapped(instance, instance.api.all_gather, std::move(object)); },
        [&](Tree object) { return mapped(instance, instance.api.to_host, std::move(object)); }};
    for (const auto& member : members) {
      Tree object = a_bit_of_all();
      const void* memory = memory_of(*find(object.root(), "x"));
      const Tree copied = member(Tree::view(object.root()));
      check_bit_of_all(copied);
      CHECK(memory_of(*find(copied.root(), "x")) != memory);
      const Tree same = member(std::move(object));
      check_bit_of_all(same);
      CHECK(memory_of(*find(same.root(), "x")) == memory);
    }
    for (const int32_t src : {1, -1, 7}) {
      const Error error = error_of([&] { broadcast(instance, a_bit_of_all(), src); });
      CHECK(error.code == STG_INVALID_ARGUMENT);
      CHECK_THAT(error.message, Catch::Contains(concat("rank ", src, ":")) && Catch::Contains("0"));
    }
  }
}

TEST_CASE("reduce_boolean_decision gives back its input, for all and any, and other decisions and modes are refused") {
  for (const std::string strategy : strategies) {
    Instance instance(strategy, config_of(strategy));
    const auto decide = [&](uint32_t decision, uint32_t mode) {
      uint32_t out = 77;
      check(instance.api.reduce_boolean_decision(instance.self, nullptr, decision, mode, &out));
      return out;
    };
    for (const uint32_t mode : {STG_DECIDE_ALL, STG_DECIDE_ANY}) {
      CHECK(decide(0, mode) == 0);
      CHECK(decide(1, mode) == 1);
    }
    CHECK_THAT(error_of([&] { decide(2, STG_DECIDE_ALL); }).message, Catch::Contains("decision is 2"));
    CHECK_THAT(error_of([&] { decide(1, 2); }).message, Catch::Contains("mode is 2"));
  }
}

TEST_CASE("barrier returns when every device's work is done") {
  static std::set<int32_t> waited_for;
  static bool fails;
  const auto model = linear_model();
  model->table.synchronize = [](void*, stg_replica* replica) {
    return guard([&] {
      const int32_t index = reinterpret_cast<ToyReplica*>(replica)->args.replica;
      waited_for.insert(index);
      if (fails && index != 0) throw Error{STG_UNAVAILABLE, "the device is gone"};
    });
  };
  for (const std::string strategy : strategies) {
    waited_for.clear();
    fails = false;
    Instance instance(strategy, config_of(strategy));
    instance.setup(*model);
    check(instance.api.barrier(instance.self, nullptr, to_abi("epoch")));
    CHECK(waited_for == (strategy == "single_device" ? std::set<int32_t>{0} : std::set<int32_t>{0, 1, 2}));
    if (strategy == "single_device") continue;
    fails = true;
    const Error error = error_of([&] { check(instance.api.barrier(instance.self, nullptr, to_abi("epoch"))); });
    CHECK(error.code == STG_UNAVAILABLE);
    CHECK(error.replica == 1);
    CHECK_THAT(error.message, Catch::Contains("replica 1 on cpu:1, in barrier") && Catch::Contains("the device is gone"));
  }
}

TEST_CASE("setup has an optimizer only for the fit stage") {
  const auto model = linear_model();
  for (const std::string strategy : strategies) {
    Tree state;
    {
      Instance fit(strategy, config_of(strategy, R"(, "seed": 3)"));
      fit.setup(*model);
      fit.train(batch_of({1, 1, 1}));
      state = fit.export_state();
      CHECK(find(state.root(), "optimizer")->type == STG_DICT);
    }
    for (const uint64_t stage : {STG_STAGE_VALIDATE, STG_STAGE_TEST, STG_STAGE_PREDICT}) {
      Instance instance(strategy, config_of(strategy));
      instance.setup(&model->table, stage, Tree::view(state.root()));
      CHECK(instance.status().state == STG_STATE_EVALUATE);
      CHECK(instance.status().stage == stage);
      CHECK(instance.value("weight") == -1);
      CHECK(find(instance.export_state().root(), "optimizer")->type == STG_NONE);
      CHECK(numbers(*find(instance.validate(batch_of({2})).outputs.root(), "loss")).at(0) == -2);
    }
  }
}

TEST_CASE("existing optimizer state goes to the device: the second step of momentum 0.9 is at -2.9 wherever it was saved") {
  const auto model = linear_model();
  const std::string optimizer = R"(, "optimizer": {"name": "sgd", "momentum": 0.9}})";
  Instance saving("data_parallel", R"({"devices": [1])" + optimizer);
  saving.setup(*model);
  saving.train(batch_of({1}));
  for (const std::string strategy : strategies) {
    for (const std::string devices : {"[2, 0]", "1"}) {
      Instance instance(strategy, R"({"devices": )" + devices + optimizer);
      const Tree given = saving.export_state(0);
      const std::string before = optimizer_bytes(given);
      instance.setup(&model->table, STG_STAGE_FIT, Tree::view(given.root()));
      CHECK(instance.status().num_updates == 1);
      instance.train(batch_of({1}));
      CHECK(instance.value("weight") == Approx(-2.9));
      // The slot is the instance's own, where its parameter is, and what was given is left alone.
      const Tree state = instance.export_state(0);
      const stg_value& slots = *find(*find(*find(state.root(), "optimizer"), "per_parameter"), "weight");
      const stg_value& momentum = *find(slots, "momentum_buffer");
      CHECK(numbers(momentum)[0] == Approx(1.9));
      const stg_device own = find(*find(state.root(), "model"), "weight")->as.tensor->view.device;
      CHECK(momentum.as.tensor->view.device.kind == own.kind);
      CHECK(momentum.as.tensor->view.device.index == own.index);
      CHECK(optimizer_bytes(given) == before);
    }
  }
}

TEST_CASE("model_to_device refreshes every replica from the root") {
  for (const bool has_bind : {true, false}) {
    const auto model = linear_model(1);
    if (!has_bind) model->table.bind = nullptr;
    model->buffers.push_back({{"offset"}, {1}, {0}, STG_PARAMETER_PERSISTENT | STG_PARAMETER_PINNED});
    const auto step = model->on_step;
    model->on_step = [step](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
      ToyStep made = step(replica, context, batch);
      made.outputs = scalar(replica.value(0, 0) + read_element(replica.buffers[0]->view, 0));
      return made;
    };
    for (const std::string strategy : strategies) {
      Instance instance(strategy, config_of(strategy));
      instance.setup(*model);
      instance.accumulate(batch_of({1, 1, 1}));
      stg_model_description description = sized<stg_model_description>();
      check(instance.api.describe_parameters(instance.self, &description));
      *first_element<float>(description.parameters[0]->tensor->view) = 5;
      *first_element<float>(description.buffers[0]->tensor->view) = 0.25f;
      check(instance.api.model_to_device(instance.self, nullptr));
      const size_t num_replicas = strategy == "single_device" ? 1 : 3;
      CHECK(numbers(instance.validate(batch_of({1, 1, 1})).outputs.root()) == std::vector<double>(num_replicas, 5.25));
      CHECK(instance.status().num_micro_batches == 1);  // the window goes on
    }
  }
}

TEST_CASE("each step tells the model its stage, mode, place, replica and device") {
  struct Seen {
    uint32_t stage;
    bool is_training;
    bool has_gradient;
    int32_t device;
    int32_t num_replicas;
    std::array<int64_t, 3> place;
    bool operator==(const Seen&) const = default;
  };
  std::mutex mutex;
  std::map<int32_t, Seen> seen;
  const auto model = linear_model();
  const auto original = model->on_step;
  model->on_step = [&, original](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
    const std::lock_guard lock(mutex);
    seen[context.replica] = {
        context.stage,        replica.is_training,  (context.flags & STG_STEP_GRADIENT) != 0,
        context.device.index, context.num_replicas, {context.batch_index, context.dataloader_index, context.global_step}};
    return original(replica, context, batch);
  };
  for (const std::string strategy : strategies) {
    Instance instance(strategy, R"({"devices": [4, 1], "optimizer": {"name": "sgd"}})");
    instance.setup(*model);
    const auto& api = instance.api;
    int64_t number = 10;
    for (const auto& [function, stage] : {std::pair{api.training_step, STG_STAGE_FIT},
                                          {api.validation_step, STG_STAGE_VALIDATE},
                                          {api.test_step, STG_STAGE_TEST},
                                          {api.predict_step, STG_STAGE_PREDICT}}) {
      seen.clear();
      Tree batch = batch_of({1, 2});
      stg_step_args args = sized<stg_step_args>();
      args.batch = batch.argument();
      args.batch_index = ++number;
      args.dataloader_index = ++number;
      args.global_step = ++number;
      stg_step_result result = sized<stg_step_result>();
      check(function(instance.self, nullptr, &args, &result));
      const Tree outputs{result.outputs};
      const bool is_fit = stage == STG_STAGE_FIT;
      const bool is_single = strategy == "single_device";
      Seen expected{stage, is_fit, is_fit, 4, is_single ? 1 : 2, {number - 2, number - 1, number}};
      CHECK(seen.at(0) == expected);
      CHECK(seen.size() == (is_single ? 1 : 2));
      expected.device = 1;
      if (!is_single) CHECK(seen.at(1) == expected);
    }
  }
}

TEST_CASE("zero_grad drops what the window has gathered, and the graph that waits") {
  const auto model = linear_model();
  for (const std::string strategy : strategies) {
    Instance instance(strategy, config_of(strategy));
    instance.setup(*model);
    instance.accumulate(batch_of({100, 200, 300}));
    instance.training_step(batch_of({7, 7, 7}));
    CHECK(instance.status().has_graph == 1);
    check(instance.api.zero_grad(instance.self, nullptr));
    CHECK(instance.status().has_graph == 0);
    CHECK(instance.status().num_micro_batches == 0);
    CHECK(model->num_graphs == 0);
    CHECK(error_of([&] { instance.backward(true); }).code == STG_FAILED_PRECONDITION);
    CHECK(error_of([&] { instance.optimizer_step(); }).code == STG_FAILED_PRECONDITION);
    instance.train(batch_of({1, 2, 3}));
    CHECK(instance.value("weight") == -2);
  }
}

TEST_CASE("parameters_changed drops the gradients, and gradients are none without a backward") {
  const auto model = linear_model();
  for (const std::string strategy : strategies) {
    Instance instance(strategy, strategy == std::string("single_device") ? "{}" : R"({"devices": 3})");
    instance.setup(*model);
    CHECK_THAT(error_of([&] { instance.gradients(); }).message, Catch::Contains("backward"));
    instance.accumulate(batch_of({1, 2, 6}));
    CHECK(numbers(*find(instance.gradients().root(), "weight")) == std::vector<double>{3});
    check(instance.api.parameters_changed(instance.self, nullptr));
    CHECK(instance.status().num_micro_batches == 0);
    CHECK(error_of([&] { instance.gradients(); }).code == STG_FAILED_PRECONDITION);
  }
}

TEST_CASE("state dict keys before and after wrapping are equal") {
  std::vector<ToyParameter> parameters{{{"embed.weight", "head.weight"}, {1}, {1}}, {{"module.bias"}, {1}, {2}}};
  parameters.push_back({{"frozen"}, {1}, {3}, STG_PARAMETER_PERSISTENT | STG_PARAMETER_PINNED});
  ToyModel model(parameters, linear_model()->on_step);
  model.buffers.push_back({{"norm.running_mean"}, {1}, {0}, STG_PARAMETER_PERSISTENT | STG_PARAMETER_PINNED});
  model.buffers.push_back({{"norm.scratch"}, {1}, {0}, STG_PARAMETER_PINNED});
  for (const std::string strategy : strategies) {
    for (const uint64_t flags : {uint64_t{0}, uint64_t{STG_EXPORT_COPY}}) {
      Instance instance(strategy, config_of(strategy));
      instance.setup(model);
      const Tree state = instance.export_state(flags);
      CHECK(keys_of(*find(state.root(), "model")) ==
            std::vector<std::string>{"embed.weight", "module.bias", "frozen", "norm.running_mean"});
      CHECK(keys_of(*find(state.root(), "aliases")) == std::vector<std::string>{"head.weight"});
      for (uint32_t i = 0; i < 3; ++i) {
        const stg_tensor_view& view = find(state.root(), "model")->as.entries[i].value.as.tensor->view;
        CHECK(view.device.kind == STG_DEVICE_CPU);
        CHECK(read_element(view, 0) == i + 1);
      }
    }
  }
}

TEST_CASE("teardown lets the model and the optimizer's state go, and setup may follow again and again") {
  const auto model = linear_model();
  for (const std::string strategy : strategies) {
    Instance instance(strategy, R"({"devices": 2, "optimizer": {"name": "sgd", "momentum": 0.9}})");
    instance.teardown();  // does nothing before setup
    for (int round = 0; round < 3; ++round) {
      instance.setup(*model, round == 1 ? STG_STAGE_VALIDATE : STG_STAGE_FIT);
      if (round != 1) {
        instance.train(batch_of({1, 1}));
        instance.train(batch_of({1, 1}));
        CHECK(instance.value("weight") == Approx(-2.9));  // neither weights nor momentum of the round before
      }
      instance.teardown();
      const stg_status status = instance.status();
      CHECK(status.state == STG_STATE_CREATED);
      CHECK(status.stage == STG_STAGE_FIT);
      CHECK(status.num_updates == 0);
      CHECK(model->num_references == 0);
      CHECK(model->num_replicas == 0);
    }
    stg_setup_args args = sized<stg_setup_args>();
    check(instance.api.setup(instance.self, nullptr, &args));
    CHECK(instance.status().state == STG_STATE_MODELLESS);
    instance.teardown();
  }
}
