// SPDX-License-Identifier: Apache-2.0
//
// How the loop asks a strategy, on a plugin that is nothing but a table.
#include "libstratagem/loop/instance.hpp"

#include "base/structs.hpp"
#include "libstratagem/plugins/loader.hpp"
#include "support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

/// What the strategy answers to a decision, and what it was asked.
struct Answer {
  static inline uint32_t decision = 0;
  static inline uint32_t mode = 99;
};

stg_strategy_api table_of(decltype(stg_strategy_api::reduce_boolean_decision) decide) {
  auto table = sized<stg_strategy_api>();
  table.create = [](const stg_create_args*, stg_strategy** out) -> stg_error* {
    *out = reinterpret_cast<stg_strategy*>(&Answer::decision);
    return nullptr;
  };
  table.destroy = [](stg_strategy*) {};
  table.reduce_boolean_decision = decide;
  return table;
}

stg_strategy_factory factory_of(const stg_strategy_api& table) {
  auto factory = sized<stg_strategy_factory>();
  factory.name = to_abi("table");
  factory.api = &table;
  return factory;
}

}  // namespace

TEST_CASE("A decision is the strategy's, for all or any of the processes") {
  const stg_strategy_api table =
      table_of([](stg_strategy*, const stg_call*, uint32_t, uint32_t mode, uint32_t* out) -> stg_error* {
        Answer::mode = mode;
        *out = Answer::decision;
        return nullptr;
      });
  StrategyInstance strategy(factory_of(table), Json::object(), nullptr);
  for (const bool answer : {false, true}) {
    for (const bool own : {false, true}) {
      for (const uint32_t mode : {STG_DECIDE_ALL, STG_DECIDE_ANY}) {
        Answer::decision = answer ? 1 : 0;
        CHECK(strategy.decide(own, mode) == answer);
        CHECK(Answer::mode == mode);
      }
    }
  }
}

TEST_CASE("A strategy that has no decisions, or says that it hasn't, is one process: its own input") {
  const stg_strategy_api tables[] = {table_of(nullptr),
                                     table_of([](stg_strategy*, const stg_call*, uint32_t, uint32_t, uint32_t*) -> stg_error* {
                                       return to_abi(unimplemented("reduce_boolean_decision"));
                                     })};
  for (const stg_strategy_api& table : tables) {
    StrategyInstance strategy(factory_of(table), Json::object(), nullptr);
    for (const bool own : {false, true}) CHECK(strategy.decide(own, STG_DECIDE_ANY) == own);
  }
}

TEST_CASE("A strategy that fails to decide ends the run with its error") {
  const stg_strategy_api table = table_of([](stg_strategy*, const stg_call*, uint32_t, uint32_t, uint32_t*) -> stg_error* {
    return to_abi(Error(STG_DEADLINE_EXCEEDED, "rank 1 is not there"));
  });
  StrategyInstance strategy(factory_of(table), Json::object(), nullptr);
  CHECK(error_of([&] { strategy.decide(true, STG_DECIDE_ALL); }).message == "rank 1 is not there");
}

TEST_CASE("A strategy without states has nothing to put back after validation") {
  const stg_strategy_api table = table_of(nullptr);
  StrategyInstance strategy(factory_of(table), Json::object(), nullptr);
  Tree nothing = strategy.side_state();
  CHECK(nothing.root().type == STG_NONE);
  CHECK_NOTHROW(strategy.put_back(std::move(nothing)));
}

TEST_CASE("Of a plugin whose slots are null each function is absent, told by its name, and one without create is refused") {
  const auto factory_in = [](const char* file) -> const stg_strategy_factory& {
    return find_strategy(load_plugin(TEST_PLUGINS "/bad/" + std::string(file)), "bad");
  };
  StrategyInstance strategy(factory_in("null_slots.so"), Json::object(), nullptr);
  CHECK(error_of([&] { strategy.setup(nullptr, STG_STAGE_FIT); }).message == "the strategy \"bad\" has no function setup");
  CHECK(error_of([&] { strategy.devices(); }).message == "the strategy \"bad\" has no function devices");
  CHECK(error_of([&] { strategy.export_state(0); }).code == STG_UNIMPLEMENTED);
  CHECK(strategy.decide(true, STG_DECIDE_ALL));
  CHECK_FALSE(strategy.can_save());
  CHECK(error_of([&] { StrategyInstance(factory_in("none.so"), Json::object(), nullptr); }).message ==
        "the strategy \"bad\" has no create or no destroy in its table");
}
