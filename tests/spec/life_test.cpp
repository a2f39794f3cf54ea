// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Construction" and "The interface": configs, devices, setup and teardown.
#include <map>
#include <mutex>
#include <thread>

#include "spec/watch.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

std::string refusal(const std::string& strategy, const std::string& config, uint32_t code = STG_INVALID_ARGUMENT) {
  const Error error = error_of([&] { Instance(strategy, config); });
  CHECK(error.code == code);
  return error.message;
}

std::vector<int32_t> device_indices(Instance& instance) {
  const stg_device* devices = nullptr;
  uint64_t num_devices = 0;
  check(instance.api.devices(instance.self, &devices, &num_devices));
  std::vector<int32_t> indices;
  for (uint64_t i = 0; i < num_devices; ++i) {
    CHECK(devices[i].kind == STG_DEVICE_CPU);
    indices.push_back(devices[i].index);
  }
  return indices;
}

}  // namespace

TEST_CASE("device list [2,0,1]: root is the first entry, device 2, ranks 0, world size 1") {
  std::mutex mutex;
  std::map<int32_t, int32_t> device_of_replica;
  const auto model = linear_model();
  const auto step = model->on_step;
  model->on_step = [&, step](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
    const std::lock_guard lock(mutex);
    device_of_replica[context.replica] = context.device.index;
    if (replica.args.device.index != context.device.index) throw internal("a replica's device changed");
    return step(replica, context, batch);
  };
  for (const std::string strategy : {"single_device", "data_parallel"}) {
    device_of_replica.clear();
    Instance instance(strategy, R"({"devices": [2, 0, 1], "optimizer": {"name": "sgd"}})");
    const bool is_single = strategy == "single_device";
    CHECK(device_indices(instance) == (is_single ? std::vector<int32_t>{2} : std::vector<int32_t>{2, 0, 1}));
    for (const bool is_set_up : {false, true}) {
      if (is_set_up) instance.setup(*model);
      stg_ranks ranks = sized<stg_ranks>();
      ranks.global_rank = ranks.local_rank = ranks.node_rank = ranks.world_size = 9;
      check(instance.api.ranks(instance.self, &ranks));
      CHECK(ranks.global_rank == 0);
      CHECK(ranks.local_rank == 0);
      CHECK(ranks.node_rank == 0);
      CHECK(ranks.world_size == 1);
    }
    instance.train(batch_of({1, 1, 1}));
    CHECK(device_of_replica.at(0) == 2);
    CHECK(device_of_replica.size() == (is_single ? 1 : 3));
    if (!is_single) CHECK(device_of_replica == std::map<int32_t, int32_t>{{0, 2}, {1, 0}, {2, 1}});
  }
}

TEST_CASE("devices may be a count or auto") {
  Instance three("data_parallel", R"({"devices": 3})");
  CHECK(device_indices(three) == std::vector<int32_t>{0, 1, 2});
  Instance one("single_device", R"({"devices": "auto"})");
  CHECK(device_indices(one) == std::vector<int32_t>{0});
  Instance listed("single_device", R"({"accelerator": "cpu", "devices": [3]})");
  CHECK(device_indices(listed) == std::vector<int32_t>{3});
  Instance all("data_parallel", "{}");
  CHECK(device_indices(all).size() == std::max(1u, std::thread::hardware_concurrency()));
}

TEST_CASE("single_device given several devices runs on the first, and says so once") {
  const auto model = linear_model();
  for (const auto& [devices, root] : std::map<std::string, int32_t>{{"2", 0}, {"[3, 1]", 3}, {"[2]", 2}, {"1", 0}}) {
    LoggingHost host;
    Instance instance("single_device", R"({"optimizer": {"name": "sgd"}, "devices": )" + devices + "}", &host.table);
    CHECK(device_indices(instance) == std::vector<int32_t>{root});
    instance.setup(*model);
    CHECK(instance.train(batch_of({1, 3})).weights == std::vector<double>{2});
    CHECK(model->num_replicas == 1);
    if (devices == "1" || devices == "[2]") {
      CHECK(host.messages.empty());
    } else {
      REQUIRE(host.messages.size() == 1);
      CHECK_THAT(host.messages[0], Catch::Contains("2 given") && Catch::Contains(concat("cpu:", root)));
    }
  }
}

TEST_CASE("every bad value of a config is an error that names its JSON pointer and what would be right") {
  using Catch::Contains;
  CHECK_THAT(refusal("data_parallel", R"({"devices": 0})"), Contains("/devices is 0"));
  CHECK_THAT(refusal("data_parallel", R"({"devices": "all"})"), Contains("/devices") && Contains("auto"));
  CHECK_THAT(refusal("data_parallel", R"({"devices": []})"), Contains("/devices") && Contains("root"));
  CHECK_THAT(refusal("data_parallel", R"({"devices": [0, 1, 0]})"), Contains("/devices/2") && Contains("twice"));
  CHECK_THAT(refusal("data_parallel", R"({"devices": [-1]})"), Contains("/devices/0"));
  CHECK_THAT(refusal("data_parallel", R"({"devices": 2.5})"), Contains("/devices"));
  CHECK_THAT(refusal("single_device", R"({"devices": [1, 1]})"), Contains("/devices/1") && Contains("twice"));
  CHECK_THAT(refusal("single_device", R"({"accelerator": "tpu"})"), Contains("/accelerator") && Contains("cpu"));
  CHECK_THAT(refusal("single_device", R"({"accelerator": "cuda"})", STG_FAILED_PRECONDITION), Contains("/accelerator"));
  CHECK_THAT(refusal("single_device", R"({"precision": "32"})"), Contains("/precision") && Contains("32-true"));
  CHECK_THAT(refusal("single_device", R"({"threads": 0})"), Contains("/threads"));
  CHECK_THAT(refusal("data_parallel", R"({"threads": 65536})"), Contains("/threads is 65536") && Contains("1 to 1024"));
  CHECK_THAT(refusal("single_device", std::string("{\"devices\": 1}\0garbage}}", 24)), Contains("zero byte"));
  CHECK_THAT(refusal("single_device", R"({"seed": -1})"), Contains("/seed"));
  CHECK_THAT(refusal("single_device", R"({"deterministic": 1})"), Contains("/deterministic"));
  CHECK_THAT(refusal("single_device", R"({"presicion": "32-true"})"), Contains("/presicion") && Contains("precision"));
  CHECK_THAT(refusal("data_parallel", R"({"options": {"splitt": "chunk"}})"), Contains("/options/splitt") && Contains("split"));
  CHECK_THAT(refusal("data_parallel", R"({"options": {"split": "even"}})"), Contains("/options/split") && Contains("balanced"));
  CHECK_THAT(refusal("single_device", R"({"options": {"split": "chunk"}})"), Contains("/options/split"));
  CHECK_THAT(refusal("single_device", "[]"), Contains("object"));
  CHECK_THAT(refusal("single_device", "{"), Contains("JSON"));
}

TEST_CASE("optimizers' keys and values are checked, and a typo is told its nearest") {
  using Catch::Contains;
  const auto optimizer = [](const std::string& text) { return refusal("single_device", "{\"optimizer\": " + text + "}"); };
  CHECK_THAT(optimizer(R"("sgd")"), Contains("/optimizer"));
  CHECK_THAT(optimizer("{}"), Contains("/optimizer") && Contains("name"));
  CHECK_THAT(optimizer(R"({"name": "adamm"})"), Contains("/optimizer/name") && Contains("\"adam\""));
  CHECK_THAT(optimizer(R"({"name": "sgd", "momentun": 0.9})"), Contains("/optimizer/momentun") && Contains("\"momentum\""));
  CHECK_THAT(optimizer(R"({"name": "adamw", "momentum": 0.9})"), Contains("/optimizer/momentum"));
  CHECK_THAT(optimizer(R"({"name": "sgd", "lr": "1e-3"})"), Contains("/optimizer/lr") && Contains("number"));
  CHECK_THAT(optimizer(R"({"name": "sgd", "weight_decay": -1})"), Contains("/optimizer/weight_decay"));
  CHECK_THAT(optimizer(R"({"name": "adam", "betas": [0.9]})"), Contains("/optimizer/betas"));
  CHECK_THAT(optimizer(R"({"name": "adam", "betas": [0.9, 1.0]})"), Contains("/optimizer/betas/1"));
  CHECK_THAT(optimizer(R"({"name": "sgd", "nesterov": true})"), Contains("/optimizer/nesterov"));
  CHECK_THAT(optimizer(R"({"name": "adam", "amsgrad": "yes"})"), Contains("/optimizer/amsgrad"));
}

TEST_CASE("threads start in setup and end in teardown, and setup may follow again") {
  const auto model = linear_model();
  Instance instance("data_parallel", R"({"devices": 4, "optimizer": {"name": "sgd"}})");
  instance.setup(*model);
  instance.train(batch_of({1, 1, 1, 1}));
  instance.teardown();
  const size_t before = num_threads();
  for (int round = 0; round < 3; ++round) {
    CHECK(model->num_references == 0);
    CHECK(model->num_replicas == 0);
    instance.setup(*model);
    CHECK(num_threads_becomes(before + 3));
    CHECK(model->num_replicas == 4);
    instance.training_step(batch_of({1, 1, 1, 1}));
    instance.teardown();
    CHECK(num_threads_becomes(before));
    CHECK(model->num_graphs == 0);
    CHECK(instance.status().has_graph == 0);
  }
}

TEST_CASE("destroying a live instance ends its threads and lets the model go") {
  const auto model = linear_model();
  const size_t before = num_threads();
  {
    Instance instance("data_parallel", R"({"devices": 3, "optimizer": {"name": "sgd"}})");
    instance.setup(*model);
    instance.training_step(batch_of({1, 1, 1}));
  }
  CHECK(num_threads_becomes(before));
  CHECK(model->num_references == 0);
  CHECK(model->num_replicas == 0);
  CHECK(model->num_graphs == 0);
}

TEST_CASE("replicas whose values are written over are asked for without initial ones: all but a root that begins a run") {
  const auto model = linear_model(3);
  Instance first("data_parallel", R"({"devices": 3, "optimizer": {"name": "sgd"}})");
  first.setup(*model);
  CHECK(model->num_skipped_inits == 2);
  CHECK(first.value("weight") == 3);
  first.train(batch_of({1, 1, 1}));
  Instance second("single_device", R"({"optimizer": {"name": "sgd"}})");
  second.setup(&model->table, STG_STAGE_FIT, first.export_state());
  CHECK(model->num_skipped_inits == 3);
  CHECK(second.value("weight") == 2);
}

TEST_CASE("a failed setup leaves the instance as before") {
  const auto good = linear_model();
  const auto model = linear_model();
  model->table.describe = [](void*, stg_replica* replica, stg_model_description*) -> stg_error* {
    const bool is_root = reinterpret_cast<ToyReplica*>(replica)->args.replica == 0;
    return to_abi(invalid_argument("parameter head.weight has no shape yet", is_root ? "" : " (and not on the root)"));
  };
  Instance instance("data_parallel", R"({"devices": 2, "optimizer": {"name": "sgd"}})");
  const Error error = error_of([&] { instance.setup(*model); });
  CHECK_THAT(error.message, Catch::Contains("head.weight"));
  CHECK(error.replica == 0);
  CHECK(instance.status().state == STG_STATE_CREATED);
  CHECK(model->num_references == 0);
  CHECK(model->num_replicas == 0);
  instance.setup(*good);
  instance.train(batch_of({1, 1}));
  CHECK(instance.value("weight") == -1);
}

TEST_CASE("models that can't be trained here are refused at setup, naming the parameter") {
  using Catch::Contains;
  const auto refused = [](ToyModel& model, const std::string& config) {
    Instance instance("data_parallel", config);
    return error_of([&] { instance.setup(model); }).message;
  };
  const std::string sgd = R"({"devices": 2, "optimizer": {"name": "sgd"}})";

  auto floating = linear_model();
  floating->parameters[0].flags = STG_PARAMETER_REQUIRES_GRAD;
  CHECK_THAT(refused(*floating, sgd), Contains("weight") && Contains("in place"));

  auto different = linear_model();
  different->parameters.push_back({{"extra"}, {2}, {0, 0}});
  different->table.replicate = [](void* self, const stg_replicate_args* args, stg_replica** out) -> stg_error* {
    auto& model = *static_cast<ToyModel*>(self);
    static const auto original = linear_model()->table.replicate;
    if (args->replica == 1) model.parameters[1].shape = {1};
    return original(self, args, out);
  };
  CHECK_THAT(refused(*different, sgd), Contains("extra") && Contains("replica 1"));

  auto integer = linear_model();
  integer->parameters[0].dtype = int64;
  CHECK_THAT(refused(*integer, sgd), Contains("weight") && Contains("int64"));

  auto twice = linear_model();
  twice->parameters.push_back({{"weight"}, {1}, {0}});
  CHECK_THAT(refused(*twice, sgd), Contains("weight") && Contains("twice"));

  auto unable = linear_model();
  unable->table.bind = nullptr;
  unable->parameters[0].flags = STG_PARAMETER_REQUIRES_GRAD;
  CHECK_THAT(refused(*unable, R"({"devices": 2})"), Contains("weight") && Contains("bind"));

  auto single = linear_model();
  single->table.replicate = [](void* self, const stg_replicate_args* args, stg_replica** out) -> stg_error* {
    static const auto original = linear_model()->table.replicate;
    stg_replicate_args ignoring = *args;
    ignoring.floating_dtype = {};
    return original(self, &ignoring, out);
  };
  CHECK_THAT(refused(*single, R"({"devices": 1, "precision": "64-true"})"), Contains("weight") && Contains("float64"));
}
