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

constexpr uint32_t abandoned = UINT32_MAX;
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

size_t num_usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return std::max(1u, std::thread::hardware_concurrency());
  return static_cast<size_t>(std::max(1, CPU_COUNT(&set)));
}

// The host's signals are for the host's threads: those started while this lives begin with all blocked.
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

struct Workers::Job {
  Job(std::vector<Phase> list, size_t num_workers, bool borrows_argument)
      : phases(std::move(list)), borrows(borrows_argument), failures(num_workers), num_phases_done(num_workers) {}

  std::vector<Phase> phases;
  bool borrows;
  // Errors, not exceptions: an exception object ends on the thread that threw it. Each written by its worker, read after the last meeting.
  std::vector<std::optional<Error>> failures;
  std::optional<Error> serial_failure;
  std::atomic<bool> failed{false};
  std::atomic<uint32_t> num_arrived{0};
  std::vector<std::atomic<uint32_t>> num_phases_done;  // by each worker: names whom a caller waits for
  std::atomic<uint32_t> next{0};                       // futex: the phase to run; phases.size(): it is over; abandoned: given up
  std::atomic<uint32_t> num_inside{0};                 // futex: threads that are still in the job
  std::mutex mutex;                                    // a serial part and giving up exclude each other

  void fail(size_t worker) {
    failures[worker] = describe_exception(std::current_exception());
    failed.store(true, std::memory_order_release);
  }
  void throw_failure() const {
    for (const std::optional<Error>& failure : failures) {
      if (failure) throw Error(*failure);
    }
    if (serial_failure) throw Error(*serial_failure);
  }
  void run_serial_part(uint32_t phase) {
    if (failed.load(std::memory_order_acquire) || !phases[phase].then) return;
    try {
      phases[phase].then();
    } catch (...) {
      serial_failure = describe_exception(std::current_exception());
      failed.store(true, std::memory_order_release);
    }
  }
};

Workers::Workers(Options options) : options_(std::move(options)) {
  // Spinning pays only where every worker can have a core.
  num_spins_ = options_.num_workers <= num_usable_cores() ? 2000 : 0;
  if (options_.on_caller_thread) return;
  const BlockedSignals blocked;
  try {
    for (size_t worker = 1; worker < options_.num_workers; ++worker) {
      threads_.emplace_back([this, worker] { work(worker); });
      pthread_setname_np(threads_.back().native_handle(), concat("replica-", worker).substr(0, 15).c_str());
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
  if (job_) futex_wake_all(job_->next);
}

void Workers::run(const Call& call, std::vector<Phase> phases, bool borrows) {
  if (aborted_.load(std::memory_order_acquire)) {
    Error error{STG_ABORTED, "the instance was aborted"};
    error.flags = STG_ERROR_INSTANCE_DRAINING;
    throw error;
  }
  call.check("the replicas to begin");
  const auto job = std::make_shared<Job>(std::move(phases), size(), borrows);
  if (threads_.empty()) return run_on_caller(call, *job);

  job->num_inside.store(static_cast<uint32_t>(threads_.size()), std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    job_ = job;
  }
  sequence_.fetch_add(1, std::memory_order_release);
  futex_wake_all(sequence_);
  take_part(*job, 0, &call);
  {
    const std::lock_guard lock(mutex_);
    job_.reset();
  }
  job->throw_failure();
}

void Workers::run_on_caller(const Call& call, Job& job) {
  for (uint32_t phase = 0; phase < job.phases.size() && !job.failed; ++phase) {
    for (size_t worker = 0; worker < size(); ++worker) {
      if (job.phases[phase].interruptible && worker > 0) call.check(concat("replica ", worker, " in ", job.phases[phase].name));
      try {
        job.phases[phase].each(worker);
      } catch (...) {
        job.fail(worker);
      }
    }
    job.run_serial_part(phase);
  }
  job.throw_failure();
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
    take_part(*job, worker, nullptr);
    if (job->num_inside.fetch_sub(1, std::memory_order_acq_rel) == 1) futex_wake_all(job->num_inside);
  }
}

void Workers::take_part(Job& job, size_t worker, const Call* call) {
  for (uint32_t phase = 0; phase < job.phases.size();) {
    if (job.next.load(std::memory_order_acquire) == abandoned) return;
    try {
      job.phases[phase].each(worker);
    } catch (...) {
      job.fail(worker);
    }
    job.num_phases_done[worker].store(phase + 1, std::memory_order_release);
    arrive(job, phase);
    const bool is_last = phase + 1 == job.phases.size();
    if (worker != 0 && is_last) return;
    phase = wait_for_next(job, phase, call);
  }
}

void Workers::arrive(Job& job, uint32_t phase) {
  if (job.num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < size()) return;
  const std::lock_guard lock(job.mutex);
  if (job.next.load(std::memory_order_relaxed) == abandoned) return;
  job.num_arrived.store(0, std::memory_order_relaxed);
  job.run_serial_part(phase);
  job.next.store(job.failed ? static_cast<uint32_t>(job.phases.size()) : phase + 1, std::memory_order_release);
  futex_wake_all(job.next);
}

// Returns the phase to run next; a number past the last one ends the worker's part.
uint32_t Workers::wait_for_next(Job& job, uint32_t phase, const Call* call) {
  uint32_t next = spin_until_changed(job.next, phase, num_spins_);
  while (next == phase) {
    uint64_t until_ns = 0;
    if (call != nullptr && job.phases[phase].interruptible) {
      if (aborted_.load(std::memory_order_acquire)) give_up(job, phase, STG_ABORTED);
      if (call->cancelled()) give_up(job, phase, STG_CANCELLED);
      if (call->past_deadline()) give_up(job, phase, STG_DEADLINE_EXCEEDED);
      until_ns = now_ns() + poll_interval_ns;
      if (call->has_deadline()) until_ns = std::min(until_ns, call->deadline_ns());
    }
    futex_wait(job.next, phase, until_ns);
    next = job.next.load(std::memory_order_acquire);
  }
  return next;
}

// Ends the run for the caller, unless the meeting took place in the meantime.
void Workers::give_up(Job& job, uint32_t phase, uint32_t code) {
  {
    const std::lock_guard lock(job.mutex);
    if (job.next.load(std::memory_order_relaxed) != phase) return;
    job.next.store(abandoned, std::memory_order_release);
  }
  futex_wake_all(job.next);
  std::vector<std::string> awaited;
  for (size_t worker = 1; worker < size(); ++worker) {
    if (job.num_phases_done[worker].load(std::memory_order_acquire) <= phase) awaited.push_back(std::to_string(worker));
  }
  const uint64_t patience_ns = now_ns() + grace_period_ns;
  uint32_t inside = job.num_inside.load(std::memory_order_acquire);
  while (inside != 0 && (job.borrows || now_ns() < patience_ns)) {
    futex_wait(job.num_inside, inside, job.borrows ? 0 : patience_ns);
    inside = job.num_inside.load(std::memory_order_acquire);
  }
  {
    const std::lock_guard lock(mutex_);
    job_.reset();
  }
  const char* reason = code == STG_ABORTED ? "aborted" : code == STG_CANCELLED ? "cancelled" : "the deadline passed";
  Error error{code, concat(reason, " while waiting for replica ", join(awaited), " in ", job.phases[phase].name)};
  if (inside != 0 || code == STG_ABORTED) error.flags = STG_ERROR_INSTANCE_DRAINING;
  if (inside != 0) error.message += concat("; ", inside, " of them did not come back: only abort and destroy are legal now");
  throw error;
}

}  // namespace stratagem
