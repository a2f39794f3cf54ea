// SPDX-License-Identifier: Apache-2.0
//
// What a check can be told by the command line, beyond what is in the_host.
#pragma once

#include <string>
#include <vector>

namespace stratagem::conformance {

struct Settings {
  std::vector<std::string> run_path;  ///< folders that a RUNPATH may name
};

/// Those of this process.
Settings& settings();

}  // namespace stratagem::conformance
