// SPDX-License-Identifier: Apache-2.0
//
// A thread per replica, kept for the run. The caller of run() is worker 0, so that one replica needs no thread at all.
//
// A run is a list of phases; in each, every worker does its part, and all meet before the next phase begins. The last one to arrive
// at a meeting does the phase's serial part (`then`) before the others go on. Something thrown anywhere ends the run at the next
// meeting: what follows is skipped by all.
//
//   worker 0 (caller)   forward, backward |            | reduce, update its range |
//   worker 1            forward, backward | then: loss | reduce, update its range |
//
// Waiting is a short spin, then a futex. Only the caller watches deadline, cancel flag and abort, and only while it waits in a phase
// that is `interruptible` (one that runs a model's code): it then gives the run up. Workers that are still in the model's code leave
// when they come back; what a phase captures must therefore be owned by it (a shared_ptr), never be a local of the caller.
//
// Requires: run, and the destructor, from one thread at a time. Guarantees: abort from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/host.hpp"

namespace stratagem {

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

  /// Runs the phases. Throws what the worker with the smallest number threw, as an Error. When the run is given up: with `borrows`, once the last
  /// worker has left; else at once, with STG_ERROR_INSTANCE_DRAINING if some worker did not leave within the grace period.
  void run(const Call& call, std::vector<Phase> phases, bool borrows = false);

  /// Makes a run in progress end with STG_ABORTED, and every later one.
  void abort() noexcept;

 private:
  struct Job;
  void run_on_caller(const Call& call, Job& job);
  void work(size_t worker);
  void take_part(Job& job, size_t worker, const Call* call);
  void arrive(Job& job, uint32_t phase);
  uint32_t wait_for_next(Job& job, uint32_t phase, const Call* call);
  void give_up(Job& job, uint32_t phase, uint32_t code);

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
