// SPDX-License-Identifier: Apache-2.0
//
// A process with limits: started by exec, in a group of its own that is killed and reaped as a whole.
#pragma once

#include <string>
#include <vector>

namespace stratagem::conformance {

/// Where a child finds the pipe for its records.
inline constexpr int child_record_fd = 3;

struct Ended {
  int exit_code = 0;
  int signal = 0;  ///< 0: none
  bool is_timed_out = false;
  bool is_too_big = false;  ///< it held more memory of its own than it may
  std::string records;      ///< from child_record_fd, at most 1 MiB
  std::string output;       ///< stdout and stderr, the first 4 KiB; the rest is read and dropped
  double seconds = 0;
};

/// Runs `command` (a path and its arguments) with `input` on its standard input. Any thread.
Ended run_process(const std::vector<std::string>& command, const std::string& input, double timeout_s, uint64_t memory_bytes);

/// From here on what the children leave behind becomes this process's: one that has left its group (a daemon), too.
void adopt_orphans();
/// Kills and reaps all children that there are. Nothing of run_process may be running.
void end_orphans();

}  // namespace stratagem::conformance
