// SPDX-License-Identifier: Apache-2.0
//
// One check of one strategy, or the entering of the plugin: run in this process. A child does it with a pipe as its sink, the tool
// itself with --in-process.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "conformance/checks/check.h"
#include "conformance/runner/result.hpp"

namespace stratagem::conformance {

/// As it is handed to a child.
struct Task {
  std::string id;  ///< of a check; empty: enter the plugin and say what it has
  std::string strategy;
  std::string file;
  std::string config;  ///< members of an object, ended by a comma
  std::vector<std::string> run_path;
  uint64_t seed = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Task, id, strategy, file, config, run_path, seed)

struct StrategyFacts {
  std::string name;
  uint64_t capabilities = 0;
  bool has_cpu = false;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StrategyFacts, name, capabilities, has_cpu)

/// What entering a plugin gives.
struct PluginFacts {
  std::string no_library;  ///< why it can't be opened, or refuses: then it is no plugin for us
  std::string broken;      ///< what is wrong with what the probe gave
  std::string name, version;
  std::vector<StrategyFacts> strategies;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PluginFacts, no_library, broken, name, version, strategies)

PluginFacts enter(const Task& task);

/// Told as soon as something is known, on any thread, so that a crash leaves behind what was said before it.
using Tell = void (*)(Outcome, const std::string& text);
/// Runs the check. `tell` gets what is not so, why it was skipped, and warnings.
Outcome perform(const Task& task, const check_entry& of, Tell tell);

const check_entry* find_check(const std::string& id);

}  // namespace stratagem::conformance
