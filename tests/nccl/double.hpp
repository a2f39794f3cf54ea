// SPDX-License-Identifier: Apache-2.0
//
// A stand-in for NCCL, CUDA and the clock: notes what it is asked for, is busy for as long as it is told, fails at the call that it is
// told, and knows the rules that NCCL leaves to its caller.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "nccl/functions.hpp"

namespace stratagem::test {

struct NcclDouble {
  std::vector<std::string> calls;  // "init 0 of 2", "group_start", "all_reduce 1 count 8", ...
  int fail_at = 0;                 // the n-th call from now on gives an error; 0: none
  bool fails_late = false;         // a look that is to fail gives what went wrong since, instead of failing itself
  std::string failed;              // the call that did
  int looks_until_ready = 0;       // so many looks find a communicator at work after each group that it was in
  std::set<int> never_ready;       // ranks, after a group from now on
  std::function<void()> on_rest = [] {};
  uint64_t now_ns = 1;  // goes on by a millisecond in each rest

  std::vector<int> num_aborts, num_destroys;  // by communicator, in the order of their making
  std::set<std::string> broken_rules;
  int num_open_groups = 0;  // in all threads
  std::atomic<int> num_inside{0};
  std::mutex mutex;  // of all this
};

/// The one that the functions act on, made anew.
NcclDouble& begin_double();
const NcclFunctions& double_functions();

}  // namespace stratagem::test
