// SPDX-License-Identifier: Apache-2.0
//
// Which batches a strategy is given by ticket, on plugins that are nothing but a table.
#include "libstratagem/loop/feed.hpp"

#include <functional>
#include <map>

#include "base/dlpack.hpp"
#include "base/structs.hpp"
#include "support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

/// What one strategy has been told.
struct Told {
  uint32_t device_kind = STG_DEVICE_CUDA;
  bool is_unimplemented = false;
  uint64_t last_ticket = 0;
  int num_announced = 0;
  std::map<uint64_t, float> waiting;  // by ticket, the first number of an announced batch
};
Told told;

float number_in(const stg_value& batch) { return *first_element<float>(find(batch, "inputs")->as.tensor->view); }

const stg_strategy_api& table() {
  static stg_strategy_api api = [] {
    auto made = sized<stg_strategy_api>();
    made.create = [](const stg_create_args*, stg_strategy** out) -> stg_error* {
      *out = reinterpret_cast<stg_strategy*>(&told);
      return nullptr;
    };
    made.destroy = [](stg_strategy*) {};
    made.devices = [](stg_strategy*, const stg_device** devices, uint64_t* num_devices) -> stg_error* {
      static stg_device device;
      device = {told.device_kind, 0};
      *devices = &device;
      *num_devices = 1;
      return nullptr;
    };
    made.announce_batch = [](stg_strategy*, const stg_call*, const stg_transfer_args* args, uint32_t stage,
                             uint64_t* ticket) -> stg_error* {
      const Tree batch = Tree::receive(args->batch);
      ++told.num_announced;
      if (told.is_unimplemented) return to_abi(unimplemented("announce_batch"));
      CHECK(stage == STG_STAGE_VALIDATE);
      CHECK(args->device.kind == STG_DEVICE_NONE);
      *ticket = ++told.last_ticket;
      told.waiting[*ticket] = number_in(batch.root());
      return nullptr;
    };
    return made;
  }();
  return api;
}

struct Fed {
  Fed()
      : data([&] {
          write_samples(folder / "x.npy", {0, 1, 2, 3, 4, 5, 6, 7});
          DatasetConfig config;
          config.format = "npy";
          config.inputs.path = folder / "x.npy";
          return Dataset(config);
        }()) {
    factory.name = to_abi("table");
    factory.api = &table();
    told = {};
  }
  /// The batches of one pass; `between` is called before each.
  std::vector<float> pass(const std::function<void(BatchFeed&)>& between = [](BatchFeed&) {}) {
    StrategyInstance strategy(factory, Json::object(), nullptr);
    BatchFeed feed(strategy, STG_STAGE_VALIDATE, data, std::vector<int64_t>{7, 6, 5, 4, 3, 2, 1, 0}, 1, 1, 7);
    std::vector<float> given;
    for (;;) {
      between(feed);
      const auto batch = feed.next();
      if (!batch) return given;
      if (batch->announced == 0) {
        given.push_back(number_in(batch->batch.root()));
      } else {
        ++num_by_ticket;
        given.push_back(told.waiting.at(batch->announced));
        told.waiting.erase(batch->announced);
      }
    }
  }
  TemporaryFolder folder;
  Dataset data;
  stg_strategy_factory factory = sized<stg_strategy_factory>();
  int num_by_ticket = 0;
};

const std::vector<float> in_order{6, 5, 4, 3, 2, 1};

}  // namespace

TEST_CASE("On an accelerator batches are announced before their steps, and each is given once") {
  Fed fed;
  // Which ones depends on how fast the reader is.
  for (int passes = 0; passes < 1000 && fed.num_by_ticket < 10; ++passes) {
    CHECK(fed.pass() == in_order);
    CHECK(told.waiting.empty());
  }
  CHECK(fed.num_by_ticket >= 10);
}

TEST_CASE("A batch that was announced is taken back and given again") {
  Fed fed;
  for (int passes = 0; passes < 1000 && told.waiting.size() < 5; ++passes) {
    CHECK(fed.pass([](BatchFeed& feed) { feed.take_back(); }) == in_order);
  }
  CHECK(told.waiting.size() >= 5);
  CHECK(fed.num_by_ticket == 0);
}

TEST_CASE("A strategy that turns out to take no announcements loses no batch, and is asked once") {
  Fed fed;
  told.is_unimplemented = true;
  int passes = 0;
  for (; passes < 1000 && told.num_announced < 5; ++passes) CHECK(fed.pass() == in_order);
  CHECK(fed.num_by_ticket == 0);
  CHECK(told.num_announced >= 5);
  CHECK(told.num_announced <= passes);
}

TEST_CASE("On the CPU nothing is announced") {
  Fed fed;
  told.device_kind = STG_DEVICE_CPU;
  for (int passes = 0; passes < 20; ++passes) CHECK(fed.pass() == in_order);
  CHECK(told.last_ticket == 0);
}
