// SPDX-License-Identifier: Apache-2.0
//
// A task in a process of its own, seen from outside: what it reported, and how it ended. A child can crash, hang, end by itself, flood
// its output or eat memory: all of that is a result.
#pragma once

#include "conformance/runner/task.hpp"

namespace stratagem::conformance {

struct Limits {
  double timeout_s = 0;
  uint64_t memory_bytes = 0;
};

struct ChildReport {
  bool is_done = false;  ///< it said so, and ended with 0 after that
  Outcome outcome = Outcome::crashed;
  std::string kind;  ///< of a crash
  std::vector<std::string> messages;
  PluginFacts facts;  ///< of entering
  std::string output;
  double seconds = 0;
};

ChildReport run_in_child(const Task& task, const Limits& limits);

}  // namespace stratagem::conformance
