// SPDX-License-Identifier: Apache-2.0
#include "strategy/workers.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <optional>

#include "base/error.hpp"

namespace stratagem {

namespace {

constexpr uint64_t poll_interval_ns = 20'000'000;  // how late abort and the cancel flag are seen at worst
constexpr uint64_t grace_period_ns = 50'000'000;   // of the 100 ms in which a call must be back after its deadline

uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

// Sleeps while `word` is `value`; until_ns on CLOCK_MONOTONIC, 0: for ever. May wake for no reason.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t value, uint64_t until_ns = 0) {
  const timespec until{static_cast<time_t>(until_ns / 1'000'000'000u), static_cast<long>(until_ns % 1'000'000'000u)};
  syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, value, until_ns == 0 ? nullptr : &until, nullptr, FUTEX_BITSET_MATCH_ANY);
}

void futex_wake_all(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

uint32_t spin_until_changed(const std::atomic<uint32_t>& word, uint32_t value, uint32_t num_spins) {
  uint32_t seen = word.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < num_spins && seen == value; ++i) {
    pause_briefly();
    seen = word.load(std::memory_order_acquire);
  }
  return seen;
}

// Threads that are started while this lives begin with all signals blocked.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

size_t num_usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return std::max(1u, std::thread::hardware_concurrency());
  return static_cast<size_t>(std::max(1, CPU_COUNT(&set)));
}

std::thread start_thread(const std::string& name, std::function<void()> body) {
  const BlockedSignals blocked;
  std::thread thread(std::move(body));
  pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
  return thread;
}

struct Workers::Job {
  Job(std::vector<Phase> list, size_t num_workers)
      : phases(std::move(list)), failures(num_workers), num_phases_done(num_workers) {}

  std::vector<Phase> phases;
  // Errors, not exceptions: an exception object ends on the thread that threw it. Each written by its worker, read after the last meeting.
  std::vector<std::optional<Error>> failures;
  std::atomic<uint32_t> num_arrived{0};                // futex: threads that have done their part of the phase
  std::vector<std::atomic<uint32_t>> num_phases_done;  // by each worker: names whom a caller waits for
  std::atomic<uint32_t> next{0};                       // futex: the phase to run; phases.size(): it is over
  std::atomic<uint32_t> num_inside{0};                 // futex: threads that are still in the job

  void take_part(uint32_t phase, size_t worker) {
    try {
      phases[phase].each(worker);
    } catch (...) {
      failures[worker] = describe_exception(std::current_exception());
    }
    num_phases_done[worker].store(phase + 1, std::memory_order_release);
  }
  // Taken out, all of them: a worker may hold the job for a while after the call is back, and a model's error is not to be held with it.
  void throw_failure() {
    std::optional<Error> first;
    for (std::optional<Error>& failure : failures) {
      if (failure && !first) first = std::move(failure);
      failure.reset();
    }
    if (first) throw std::move(*first);
  }
  // Lets the others go on; phases.size() ends the run.
  void begin_phase(uint32_t phase) {
    next.store(phase, std::memory_order_release);
    futex_wake_all(next);
  }
};

Workers::Workers(Options options) : options_(std::move(options)) {
  // Spinning pays only where every worker can have a core.
  num_spins_ = options_.num_workers <= num_usable_cores() ? 2000 : 0;
  if (options_.on_caller_thread) return;
  try {
    for (size_t worker = 1; worker < options_.num_workers; ++worker) {
      threads_.push_back(start_thread(concat("replica-", worker), [this, worker] { work(worker); }));
    }
  } catch (const std::system_error& error) {
    const size_t num_started = threads_.size();
    ending_.store(true);
    sequence_.fetch_add(1);
    futex_wake_all(sequence_);
    for (std::thread& thread : threads_) thread.join();
    throw Error{STG_RESOURCE_EXHAUSTED, concat("only ", num_started, " of ", options_.num_workers - 1,
                                               " threads for replicas could be started: ", error.what())};
  }
}

Workers::~Workers() {
  ending_.store(true);
  sequence_.fetch_add(1, std::memory_order_release);
  futex_wake_all(sequence_);
  for (std::thread& thread : threads_) thread.join();
}

bool Workers::has_this_thread() const noexcept {
  return std::any_of(threads_.begin(), threads_.end(),
                     [](const std::thread& thread) { return thread.get_id() == std::this_thread::get_id(); });
}

void Workers::abort() noexcept {
  aborted_.store(true, std::memory_order_release);
  const std::lock_guard lock(mutex_);
  if (job_) futex_wake_all(job_->num_arrived);
}

void Workers::run(const Call& call, std::vector<Phase> phases) {
  if (aborted_.load(std::memory_order_acquire)) {
    Error error{STG_ABORTED, "the instance was aborted"};
    error.flags = STG_ERROR_INSTANCE_DRAINING;
    throw error;
  }
  call.check("the replicas to begin");
  const auto job = std::make_shared<Job>(std::move(phases), size());
  hand_out(job);
  try {
    for (uint32_t phase = 0; phase < job->phases.size(); ++phase) {
      run_phase(call, *job, phase);
      // The last phase's workers don't wait for its serial part.
      if (phase + 1 < job->phases.size()) job->begin_phase(phase + 1);
    }
  } catch (...) {
    job->begin_phase(static_cast<uint32_t>(job->phases.size()));
    hand_out(nullptr);
    throw;
  }
  hand_out(nullptr);
}

// Gives the threads a job; or, with null, says that there is none any more.
void Workers::hand_out(const std::shared_ptr<Job>& job) {
  if (threads_.empty()) return;
  if (job) job->num_inside.store(static_cast<uint32_t>(threads_.size()), std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    job_ = job;
  }
  if (!job) return;
  sequence_.fetch_add(1, std::memory_order_release);
  futex_wake_all(sequence_);
}

// The caller's side of a phase: its own part, the meeting, the serial part.
void Workers::run_phase(const Call& call, Job& job, uint32_t phase) {
  const Phase& current = job.phases[phase];
  job.take_part(phase, 0);
  if (threads_.empty()) {
    for (size_t worker = 1; worker < size(); ++worker) {
      if (current.interruptible) call.check(concat("replica ", worker, " in ", current.name));
      job.take_part(phase, worker);
    }
  } else {
    meet(call, job, phase);
  }
  job.throw_failure();
  // Nobody was waited for where one thread does it all; what has been asked for in the meantime counts nevertheless.
  if (current.interruptible && aborted_.load(std::memory_order_acquire)) give_up(job, phase, STG_ABORTED);
  if (current.interruptible && call.cancelled()) give_up(job, phase, STG_CANCELLED);
  if (current.then) current.then();
}

void Workers::work(size_t worker) {
  if (options_.initialise_thread) options_.initialise_thread();
  uint32_t seen = 0;
  while (true) {
    while (spin_until_changed(sequence_, seen, num_spins_) == seen) futex_wait(sequence_, seen);
    seen = sequence_.load(std::memory_order_acquire);
    if (ending_.load(std::memory_order_acquire)) return;
    std::shared_ptr<Job> job;
    {
      const std::lock_guard lock(mutex_);
      job = job_;
    }
    if (!job) continue;  // it was given up before this thread awoke
    follow(*job, worker);
    if (job->num_inside.fetch_sub(1, std::memory_order_acq_rel) == 1) futex_wake_all(job->num_inside);
  }
}

// A thread's side of a job.
void Workers::follow(Job& job, size_t worker) const {
  const auto num_phases = static_cast<uint32_t>(job.phases.size());
  for (uint32_t phase = 0; phase < num_phases;) {
    job.take_part(phase, worker);
    // After the last arrival the caller may begin the next phase, where this is counted anew.
    if (job.num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_.size()) futex_wake_all(job.num_arrived);
    if (phase + 1 == num_phases) return;
    uint32_t next = spin_until_changed(job.next, phase, num_spins_);
    while (next == phase) {
      futex_wait(job.next, phase);
      next = job.next.load(std::memory_order_acquire);
    }
    phase = next;
  }
}

// Waits until all threads have done their part.
void Workers::meet(const Call& call, Job& job, uint32_t phase) {
  const auto num_threads = static_cast<uint32_t>(threads_.size());
  uint32_t arrived = job.num_arrived.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < num_spins_ && arrived != num_threads; ++i) {
    pause_briefly();
    arrived = job.num_arrived.load(std::memory_order_acquire);
  }
  while (arrived != num_threads) {
    uint64_t until_ns = 0;
    if (job.phases[phase].interruptible) {
      if (aborted_.load(std::memory_order_acquire)) give_up(job, phase, STG_ABORTED);
      if (call.cancelled()) give_up(job, phase, STG_CANCELLED);
      if (call.past_deadline()) give_up(job, phase, STG_DEADLINE_EXCEEDED);
      until_ns = now_ns() + poll_interval_ns;
      if (call.has_deadline()) until_ns = std::min(until_ns, call.deadline_ns());
    }
    futex_wait(job.num_arrived, arrived, until_ns);
    arrived = job.num_arrived.load(std::memory_order_acquire);
  }
  job.num_arrived.store(0, std::memory_order_relaxed);
}

// Ends the run for the caller. Threads that are still in the model's code leave when they come back.
void Workers::give_up(Job& job, uint32_t phase, uint32_t code) {
  job.begin_phase(static_cast<uint32_t>(job.phases.size()));
  std::vector<std::string> awaited;
  for (size_t worker = 1; worker < size(); ++worker) {
    if (job.num_phases_done[worker].load(std::memory_order_acquire) <= phase) awaited.push_back(std::to_string(worker));
  }
  const uint64_t patience_ns = now_ns() + grace_period_ns;
  uint32_t inside = job.num_inside.load(std::memory_order_acquire);
  while (inside != 0 && now_ns() < patience_ns) {
    futex_wait(job.num_inside, inside, patience_ns);
    inside = job.num_inside.load(std::memory_order_acquire);
  }
  const char* reason = code == STG_ABORTED ? "aborted" : code == STG_CANCELLED ? "cancelled" : "the deadline passed";
  Error error{
      code, concat(reason, awaited.empty() ? "" : " while waiting for replica " + join(awaited), " in ", job.phases[phase].name)};
  if (inside != 0 || code == STG_ABORTED) error.flags = STG_ERROR_INSTANCE_DRAINING;
  if (inside != 0) error.message += concat("; ", inside, " of them did not come back: only abort and destroy are legal now");
  throw error;
}

}  // namespace stratagem
