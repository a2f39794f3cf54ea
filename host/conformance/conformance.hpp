// SPDX-License-Identifier: Apache-2.0
//
// `stratagem conformance`: tries a plugin against every promise of the ABI. The plugin is never loaded into this process: each check
// runs in a child, which is this program again (a child that was only forked would not be clean).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace stratagem::conformance {

inline constexpr uint64_t default_seed = 20260101;

struct Options {
  std::string file;
  std::vector<std::string> only, skip;  ///< patterns of ids, as of a shell
  std::string strategy;                 ///< this one of the plugin's; empty: all
  std::string config;                   ///< a JSON object: what each instance's config begins with
  std::vector<std::string> run_path;    ///< folders that its RUNPATH may name
  uint64_t seed = default_seed;
  unsigned jobs = 0;  ///< checks side by side; 0: as many as there are CPUs
  double timeout_s = 20;
  uint64_t memory_mib = 4096;
  bool list = false;
  bool json = false;
  bool in_process = false;  ///< for a debugger
};

/// The exit codes of `run`.
enum Verdict : int { conforms = 0, does_not_conform = 1, bad_options = 2, no_plugin = 3 };

/// Runs the checks and prints the report, or lists them.
int run(const Options& options);

/// How `run` starts this program as a child: `<program> conformance-child`, everything else on its standard input.
inline constexpr const char* child_command = "conformance-child";
int run_child();

}  // namespace stratagem::conformance
