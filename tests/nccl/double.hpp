// SPDX-License-Identifier: Apache-2.0
//
// A stand-in for NCCL and CUDA that notes what it is asked for, is busy for as long as it is told, and fails at the call that it is told.
#pragma once

#include <atomic>
#include <set>
#include <string>
#include <vector>

#include "nccl/functions.hpp"

namespace stratagem::test {

struct NcclDouble {
  std::vector<std::string> calls;             // "init 0 of 2", "group_start", "all_reduce 1 op 0 count 8", ...
  int fail_at = 0;                            // the n-th call from now on gives an error; 0: none
  int looks_until_ready = 0;                  // so many looks find a communicator at work after each group
  std::set<int> never_ready;                  // ranks
  std::vector<int> num_aborts, num_destroys;  // by communicator, in the order of their making
  std::atomic<int> num_inside{0};
  std::atomic<bool> was_crowded{false};  // two threads were in it at once
};

/// The one that the functions act on, made anew.
NcclDouble& begin_double();
const NcclFunctions& double_functions();

}  // namespace stratagem::test
