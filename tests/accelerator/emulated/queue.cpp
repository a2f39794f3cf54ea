// SPDX-License-Identifier: Apache-2.0
#include "accelerator/emulated/queue.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <map>
#include <thread>
#include <utility>

#include "accelerator/emulated/detector.hpp"
#include "base/text.hpp"

namespace emulated {

using stratagem::concat;
using namespace std::chrono_literals;

namespace {

struct Failure {
  std::string planned;  // for the next operation that the device runs
  std::string present;
};

// Never destroyed: threads of streams outlive main.
struct State {
  std::mutex mutex;
  int num_devices = 4;
  std::atomic<bool> was_used = false;
  std::map<std::pair<int, c10::StreamId>, Queue*> queues;
  std::array<int64_t, max_devices> next_of_pool{};

  std::mutex failures_mutex;
  std::array<Failure, max_devices> failures;

  std::atomic<uint64_t> delays = 0;  // which call of set_delays
  std::atomic<uint64_t> seed = 0;
  std::atomic<int64_t> longest_us = 0;

  std::atomic<bool> is_ending = false;
  std::atomic<int> num_running = 0;
};

State& state() {
  static auto* instance = new State;
  return *instance;
}

// A kernel that runs while static objects are destroyed would crash.
void end_kernels() {
  state().is_ending = true;
  for (int i = 0; i < 2000 && state().num_running > 0; ++i) std::this_thread::sleep_for(1ms);
}

thread_local int device_now = 0;
thread_local std::array<c10::StreamId, max_devices> streams_now{};

}  // namespace

Running::Running() {
  ++state().num_running;
  while (state().is_ending) {
    if (state().num_running > 0) --state().num_running;
    std::this_thread::sleep_for(1h);
  }
}

Running::~Running() { --state().num_running; }

void set_num_devices(int num_devices) {
  TORCH_CHECK(num_devices >= 1 && num_devices <= max_devices, "emulated: ", num_devices, " devices; 1 to ", max_devices,
              " can be had");
  TORCH_CHECK(!state().was_used || num_devices == state().num_devices, "emulated: devices were used already");
  state().num_devices = num_devices;
}

int num_devices() { return state().num_devices; }

c10::Device device_of(int index) { return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

std::string name_of(int device) { return concat("emulated:", device); }

void set_delays(uint64_t seed, std::chrono::microseconds longest) {
  state().seed = seed;
  state().longest_us = longest.count();
  ++state().delays;
}

// ---- devices that fail

std::string failure(int device) {
  const std::lock_guard lock(state().failures_mutex);
  return state().failures[device].present;
}

void throw_if_failed(int device) {
  const std::string why = failure(device);
  if (why.empty()) return;
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 1, concat(name_of(device), ": ", why));
}

void fail_now(int device, const std::string& why) {
  const std::lock_guard lock(state().failures_mutex);
  if (state().failures[device].present.empty()) state().failures[device].present = why;
}

void fail_device(int device, std::string why) {
  TORCH_CHECK(device >= 0 && device < num_devices(), "emulated: there is no device ", device);
  const std::lock_guard lock(state().failures_mutex);
  state().failures[device].planned = std::move(why);
}

void heal() {
  const std::lock_guard lock(state().failures_mutex);
  state().failures = {};
}

namespace {

// Whether the device's next operation can run.
bool may_run(int device, const std::string& operation) {
  const std::lock_guard lock(state().failures_mutex);
  Failure& its = state().failures[device];
  if (!its.planned.empty()) its.present = concat(std::exchange(its.planned, {}), " (in ", operation, ")");
  return its.present.empty();
}

}  // namespace

// ---- queues

Queue::Queue(int of_device, c10::StreamId of_id, size_t of_number) : device(of_device), id(of_id), number(of_number) {}

std::string Queue::name() const { return concat(name_of(device), " stream ", id); }

void Queue::push(Job job) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back(std::move(job));
  ++num_pushed_;
  if (!std::exchange(has_thread_, true)) std::thread([this] { run(); }).detach();
  filled_.notify_one();
}

uint64_t Queue::num_pushed() const {
  const std::lock_guard lock(mutex_);
  return num_pushed_;
}

bool Queue::is_done(uint64_t num_jobs) const {
  const std::lock_guard lock(mutex_);
  return num_done_ >= num_jobs;
}

void Queue::wait_for(uint64_t num_jobs) const {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return num_done_ >= num_jobs; });
}

void Queue::run() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::set_num_threads(1);
  for (;;) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      filled_.wait(lock, [&] { return !jobs_.empty(); });
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    execute(job);
    const std::lock_guard lock(mutex_);
    ++num_done_;
    if (job.then) job.then();  // under the lock: an event is done when its stream says so, and the other way round
    done_.notify_all();
  }
}

void Queue::execute(const Job& job) {
  if (job.is_kernel) {
    delay();
    if (!may_run(device, job.name)) return;
  }
  try {
    if (job.work) job.work();
  } catch (const c10::Error& error) {
    fail_now(device, concat(error.what_without_backtrace(), " (in ", job.name, ")"));
  } catch (const std::exception& error) {
    fail_now(device, concat(error.what(), " (in ", job.name, ")"));
  }
}

void Queue::delay() {
  const int64_t longest_us = state().longest_us;
  if (longest_us == 0) return;
  if (std::exchange(delays_, state().delays.load()) != state().delays) random_.seed(state().seed * 1000003 + number);
  std::this_thread::sleep_for(std::chrono::microseconds(std::uniform_int_distribution<int64_t>(0, longest_us)(random_)));
}

Queue& queue_of(const c10::Stream& stream) {
  TORCH_CHECK(stream.device_type() == c10::DeviceType::PrivateUse1, "emulated: ", stream, " is a stream of another device");
  TORCH_CHECK(
      stream.device_index() >= 0 && stream.device_index() < num_devices() && stream.id() >= 0 && stream.id() <= streams_per_pool,
      "emulated: there is no stream ", stream.id(), " of device ", static_cast<int>(stream.device_index()));
  const std::lock_guard lock(state().mutex);
  if (!state().was_used.exchange(true)) std::atexit(end_kernels);
  Queue*& queue = state().queues[{stream.device_index(), stream.id()}];
  if (queue == nullptr) queue = new Queue(stream.device_index(), stream.id(), state().queues.size() - 1);
  return *queue;
}

std::vector<Queue*> queues() {
  const std::lock_guard lock(state().mutex);
  std::vector<Queue*> all;
  for (const auto& [key, queue] : state().queues) all.push_back(queue);
  return all;
}

c10::Stream next_of_pool(int device) {
  const std::lock_guard lock(state().mutex);
  return c10::Stream(c10::Stream::UNSAFE, device_of(device), 1 + state().next_of_pool[device]++ % streams_per_pool);
}

Queue& current_queue(int device) { return queue_of(c10::Stream(c10::Stream::UNSAFE, device_of(device), streams_now[device])); }

c10::StreamId exchange_current(int device, c10::StreamId id) { return std::exchange(streams_now[device], id); }

int current_device() { return device_now; }

int exchange_device(int device) {
  TORCH_CHECK(device >= 0 && device < num_devices(), "emulated: there is no device ", device, "; there are ", num_devices());
  return std::exchange(device_now, device);
}

bool is_idle(const c10::Stream& stream) {
  const Queue& queue = queue_of(stream);
  return queue.is_done(queue.num_pushed());
}

void drain() {
  for (const Queue* queue : queues()) queue->wait_for(queue->num_pushed());
}

}  // namespace emulated
