// SPDX-License-Identifier: Apache-2.0
//
// A child that its parent stops at each of its system calls, before and after it.
#pragma once

#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <optional>

namespace stratagem::test {

/// Starts `body` in a child, stopped before its first system call; its exit status is 0, or 1 if `body` threw. None where this machine
/// does not let a process trace its child.
inline std::optional<pid_t> start_traced(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(77);
    raise(SIGSTOP);
    try {
      body();
    } catch (...) {
      _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFEXITED(status)) return {};
  return child;
}

}  // namespace stratagem::test
