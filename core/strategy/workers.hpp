// SPDX-License-Identifier: Apache-2.0
//
// A thread per replica, kept for the run. The caller of run() is worker 0, so that one replica needs no thread at all.
//
// A run is a list of phases; in each, every worker does its part, and all meet before the next phase begins. At a meeting the caller
// does the phase's serial part (`then`) before the others go on: so what of the host's is called there is called on its own thread,
// which may hold its locks. Something thrown anywhere ends the run at the next meeting: what follows is skipped by all.
//
//   worker 0 (caller)   forward, backward | then: loss | reduce, update its range |
//   worker 1            forward, backward |            | reduce, update its range |
//
// Waiting is a short spin, then a futex. Only the caller watches deadline, cancel flag and abort, and only in a phase that is
// `interruptible` (one that runs a model's code): while it waits there it gives the run up, and at its meeting too if it was cancelled
// or aborted. Workers that are still in the model's code leave when they come back; what a phase captures must therefore be owned by
// it (a shared_ptr), never be a local of the caller.
//
// Requires: run, and the destructor, from one thread at a time. Guarantees: abort from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/host.hpp"

namespace stratagem {

/// A thread of ours: the host's signals are for the host's threads, so all are blocked in it. At most 15 characters of the name are seen.
std::thread start_thread(const std::string& name, std::function<void()> body);

/// Of those that this process may run on.
size_t num_usable_cores();

class Workers {
 public:
  struct Phase {
    const char* name = "";
    std::function<void(size_t worker)> each;
    std::function<void()> then{};  ///< may be empty
    bool interruptible = false;
  };

  struct Options {
    size_t num_workers = 1;
    bool on_caller_thread = false;  ///< no threads: the parts of a phase run one after the other
    std::function<void()> initialise_thread{};
  };

  explicit Workers(Options options);
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;
  /// Joins; waits for a model that is still computing.
  ~Workers();

  size_t size() const { return options_.num_workers; }
  /// Whether it is one of these threads that calls.
  bool has_this_thread() const noexcept;

  /// Runs the phases. Throws what the worker with the smallest number threw, as an Error. When the run is given up: with
  /// STG_ERROR_INSTANCE_DRAINING if some worker did not leave within the grace period.
  void run(const Call& call, std::vector<Phase> phases);

  /// Makes a run in progress end with STG_ABORTED, and every later one.
  void abort() noexcept;

 private:
  struct Job;
  void hand_out(const std::shared_ptr<Job>& job);
  void run_phase(const Call& call, Job& job, uint32_t phase);
  void meet(const Call& call, Job& job, uint32_t phase);
  [[noreturn]] void give_up(Job& job, uint32_t phase, uint32_t code);
  void work(size_t worker);
  void follow(Job& job, size_t worker) const;

  Options options_;
  uint32_t num_spins_;
  std::atomic<bool> aborted_{false};
  std::atomic<uint32_t> sequence_{0};  // futex: a new job, or the end
  std::atomic<bool> ending_{false};
  std::mutex mutex_;  // guards job_
  std::shared_ptr<Job> job_;
  std::vector<std::thread> threads_;
};

}  // namespace stratagem
