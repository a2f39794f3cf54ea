// SPDX-License-Identifier: Apache-2.0
//
// What came of a check.
#pragma once

#include <string>
#include <vector>

#include "conformance/checks/check.h"

namespace stratagem::conformance {

enum class Outcome { passed, failed, crashed, skipped, warned };

inline const char* name_of(Outcome outcome) {
  static const char* const names[] = {"passed", "failed", "crashed", "skipped", "warned"};
  return names[static_cast<int>(outcome)];
}

struct Result {
  const check_entry* of = nullptr;
  std::string strategy;  ///< empty for a check of the plugin as a whole
  Outcome outcome = Outcome::passed;
  std::string kind;                   ///< of a crash: how it ended
  std::vector<std::string> messages;  ///< what was not so; why it was skipped; what is warned of
  std::string output;                 ///< what the process wrote to stdout and stderr, the beginning of it
  double seconds = 0;
};

}  // namespace stratagem::conformance
