// SPDX-License-Identifier: Apache-2.0
#include "conformance/runner/task.hpp"

#include <algorithm>
#include <mutex>

#include "base/text.hpp"
#include "conformance/fixture/process.h"
#include "conformance/settings.hpp"

namespace stratagem::conformance {
namespace {

// The checks are C and report through a function; so this is what a process has once.
struct Hearing {
  std::mutex lock;
  Tell tell = nullptr;
  std::string place;  ///< "on 2 devices: "
  bool is_skipped = false, has_failed = false, has_warned = false;
};

Hearing& hearing() {
  static Hearing one;
  return one;
}

void hear(int kind, const char* text) {
  Hearing& of = hearing();
  const std::lock_guard hold(of.lock);
  if (of.is_skipped) return;  // after that nothing means anything
  of.is_skipped |= kind == REPORT_SKIPPED;
  of.has_failed |= kind == REPORT_FAILED;
  of.has_warned |= kind == REPORT_WARNED;
  const Outcome outcome = kind == REPORT_FAILED ? Outcome::failed : kind == REPORT_SKIPPED ? Outcome::skipped : Outcome::warned;
  of.tell(outcome, of.place + text);
}

std::string copy_of(const stg_string& text) { return {text.data == nullptr ? "" : text.data, text.size_bytes}; }

std::vector<uint64_t> numbers_of_devices(const check_entry& of) {
  if ((of.needs & NEEDS_MASK) != NEEDS_STRATEGY) return {1};
  const bool can_more = (the_host.factory->capabilities & STG_CAPABILITY_MULTIPLE_DEVICES) != 0;
  if ((of.needs & IS_ONCE) != 0) return {can_more ? 2u : 1u};
  if (!can_more) return {1};
  return (of.needs & NEEDS_DEVICES) != 0 ? std::vector<uint64_t>{2, 3} : std::vector<uint64_t>{1, 2, 3};
}

// What the check stands on. Null: it is there.
const char* prepare(const Task& task, uint32_t needs) {
  const char* wrong = nullptr;
  the_host.path = task.file.c_str();
  the_host.config = task.config.c_str();
  the_host.seed = static_cast<uint32_t>(task.seed);
  settings().run_path = task.run_path;
  remember_process();
  if (needs >= NEEDS_LIBRARY) wrong = open_library(task.file.c_str());
  if (wrong == nullptr && needs >= NEEDS_PLUGIN) wrong = enter_plugin();
  if (wrong == nullptr && needs >= NEEDS_STRATEGY && choose_strategy(task.strategy.c_str()) == nullptr)
    wrong = "the table no longer has this strategy";
  return wrong;
}

}  // namespace

Settings& settings() {
  static Settings of_process;
  return of_process;
}

const check_entry* find_check(const std::string& id) {
  for (uint64_t i = 0; i < num_check_lists; ++i) {
    const check_entry* begin = check_lists[i]->checks;
    const check_entry* found =
        std::find_if(begin, begin + check_lists[i]->num_checks, [&](const check_entry& one) { return one.id == id; });
    if (found != begin + check_lists[i]->num_checks) return found;
  }
  return nullptr;
}

PluginFacts enter(const Task& task) {
  PluginFacts facts;
  const auto told = [](const char* wrong) { return wrong == nullptr ? std::string() : std::string(wrong); };
  facts.no_library = told(prepare(task, NEEDS_LIBRARY));
  if (!facts.no_library.empty()) return facts;
  facts.broken = told(enter_plugin());
  if (the_host.plugin == nullptr && facts.broken.starts_with("it refuses")) std::swap(facts.broken, facts.no_library);
  if (!facts.broken.empty() || !facts.no_library.empty()) return facts;
  facts.name = copy_of(the_host.plugin->name);
  facts.version = copy_of(the_host.plugin->version);
  for (uint64_t i = 0; i < the_host.plugin->num_strategies; ++i) {
    const stg_strategy_factory& factory = *the_host.plugin->strategies[i];
    const uint32_t *begin = factory.device_kinds, *end = begin + factory.num_device_kinds;
    facts.strategies.push_back({copy_of(factory.name), factory.capabilities, std::find(begin, end, STG_DEVICE_CPU) != end});
  }
  return facts;
}

Outcome perform(const Task& task, const check_entry& of, Tell tell) {
  Hearing& heard = hearing();
  heard.tell = tell;
  heard.is_skipped = heard.has_failed = heard.has_warned = false;
  heard.place.clear();
  on_report = hear;
  if ((of.needs & WATCHES_OUTPUT) != 0) redirect_output();
  if (const char* wrong = prepare(task, of.needs & NEEDS_MASK)) {
    hear(REPORT_FAILED, wrong);
    return Outcome::failed;
  }
  const int num_before = count_checks();
  bool was_done = false;
  for (const uint64_t number : numbers_of_devices(of)) {
    the_host.num_devices = number;
    heard.is_skipped = false;
    if ((of.needs & NEEDS_MASK) == NEEDS_STRATEGY) heard.place = concat("on ", number, number == 1 ? " device: " : " devices: ");
    of.run();
    was_done |= !heard.is_skipped;
  }
  if (heard.has_failed) return Outcome::failed;
  if (!was_done) return Outcome::skipped;
  if (count_checks() == num_before) {
    hear(REPORT_FAILED, "the check looked at nothing; this is a fault of the tool");
    return Outcome::failed;
  }
  return heard.has_warned ? Outcome::warned : Outcome::passed;
}

}  // namespace stratagem::conformance
