// SPDX-License-Identifier: Apache-2.0
//
// The door: versions, refusals in words, small buffers.
#include <cstring>
#include <stdexcept>

#include "base/strategy.hpp"
#include "support/catch.hpp"

using namespace stratagem;

namespace {

stg_plugin make_plugin() {
  stg_plugin plugin = sized<stg_plugin>();
  plugin.name = to_abi("door");
  plugin.version = to_abi("2.3.4");
  return plugin;
}

struct Answer {
  explicit Answer(uint32_t major, uint32_t min, uint32_t max, uint64_t capacity = 512) {
    stg_probe_request request{major, min, max, 0, to_abi("test host")};
    std::memset(buffer, '#', sizeof buffer);
    reply.text = buffer;
    reply.text_capacity_bytes = capacity;
    code = sdk::answer_probe(&request, &reply, plugin);
  }
  stg_plugin plugin = make_plugin();
  char buffer[600];
  stg_probe_reply reply{};
  uint32_t code;
};

}  // namespace

TEST_CASE("A host of the same major whose minors meet the plugin's is accepted with the highest both know") {
  for (const uint32_t max : {0u, 1u, 9u}) {
    const Answer answer(STG_ABI_MAJOR, 0, max);
    CHECK(answer.code == STG_PROBE_ACCEPTED);
    CHECK(answer.reply.minor == 0);
    CHECK(answer.reply.plugin == &answer.plugin);
    CHECK(answer.reply.text_size_bytes == 0);
  }
}

TEST_CASE("Another major, or minors that don't meet, are refused in words that name both sides' versions") {
  for (const auto& [major, min, max] : {std::tuple{0u, 0u, 5u}, std::tuple{2u, 0u, 0u}, std::tuple{1u, 1u, 4u}}) {
    const Answer answer(major, min, max);
    CHECK(answer.code == STG_PROBE_REFUSED);
    CHECK(answer.reply.plugin == nullptr);
    const std::string text = answer.buffer;
    CHECK(text.size() + 1 == answer.reply.text_size_bytes);
    for (const std::string& part : {std::string("door"), std::string("2.3.4"), std::string("1.0"), std::string("test host"),
                                    concat(major, ".", min), concat(major, ".", max)}) {
      CAPTURE(text, part);
      CHECK(text.find(part) != std::string::npos);
    }
  }
}

TEST_CASE("A refusal is cut to the buffer, NUL-terminated, and the needed size is told") {
  const uint64_t needed = Answer(2, 0, 0).reply.text_size_bytes;
  for (const uint64_t capacity : {uint64_t{0}, uint64_t{1}, uint64_t{10}, needed - 1, needed}) {
    const Answer answer(2, 0, 0, capacity);
    CHECK(answer.reply.text_size_bytes == needed);
    if (capacity > 0) CHECK(std::strlen(answer.buffer) == std::min(capacity, needed) - 1);
    CHECK(answer.buffer[capacity] == '#');
  }
}

namespace {

struct Throwing : Strategy {
  explicit Throwing(const CreateArgs&) {}
  static StrategyInfo info() { throw std::runtime_error("no schema today"); }
  const std::vector<stg_device>& devices() const override { return none; }
  void setup(const Call&, Model, Tree, uint32_t) override {}
  void teardown(const Call&) override {}
  std::vector<stg_device> none;
};

}  // namespace

// The entry of a plugin, in this program.
STRATAGEM_STRATEGY_PLUGIN("throwing", "1.0.0", Throwing);

TEST_CASE("A strategy that says nothing of itself has an empty summary and an options schema that takes anything") {
  const sdk::StrategyPlugin made("forgetful", "1.0.0", {}, nullptr, false);
  CHECK(text_of(made.factory.summary).empty());
  CHECK(text_of(made.factory.options_schema) == "{}");
  CHECK(made.factory.num_device_kinds == 0);
  CHECK(made.api.save == nullptr);
}

TEST_CASE("A strategy that throws while it says what it is refuses in words, and nothing leaves its entry") {
  char text[200] = "";
  stg_probe_reply reply{};
  reply.text = text;
  reply.text_capacity_bytes = sizeof text;
  const stg_probe_request request{STG_ABI_MAJOR, 0, STG_ABI_MINOR, 0, to_abi("test host")};
  CHECK(stg_plugin_probe(&request, &reply) == STG_PROBE_REFUSED);
  CHECK(reply.plugin == nullptr);
  CHECK_THAT(std::string(text), Catch::Contains("throwing") && Catch::Contains("no schema today"));
  CHECK(stg_plugin_probe(&request, nullptr) == STG_PROBE_BAD_ARGUMENT);
}

TEST_CASE("A garbage request is a bad argument") {
  const stg_plugin plugin = make_plugin();
  stg_probe_reply reply{};
  stg_probe_request request{STG_ABI_MAJOR, 3, 2, 0, {}};
  CHECK(sdk::answer_probe(nullptr, &reply, plugin) == STG_PROBE_BAD_ARGUMENT);
  CHECK(sdk::answer_probe(&request, nullptr, plugin) == STG_PROBE_BAD_ARGUMENT);
  CHECK(sdk::answer_probe(&request, &reply, plugin) == STG_PROBE_BAD_ARGUMENT);
  request = {STG_ABI_MAJOR, 0, 0, 1, {}};
  CHECK(sdk::answer_probe(&request, &reply, plugin) == STG_PROBE_BAD_ARGUMENT);
  request = {STG_ABI_MAJOR, 0, 0, 0, {nullptr, 4}};
  CHECK(sdk::answer_probe(&request, &reply, plugin) == STG_PROBE_BAD_ARGUMENT);
}
