// SPDX-License-Identifier: Apache-2.0
//
// The emulated streams: queues of jobs, each with a thread that it keeps. Kernels wait their delay and fail with their device; markers
// (events, waits, gates) do neither, so that nobody waits for ever.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <string>

#include "accelerator/emulated/clock.hpp"

namespace emulated {

constexpr int max_devices = 16;
constexpr int64_t streams_per_pool = 32;  // as in LibTorch's own: then they come round again

int num_devices();
c10::Device device_of(int index);
std::string name_of(int device);

struct Job {
  std::function<void()> work;
  bool is_kernel = false;
  std::string name;
  std::function<void()> then{};  ///< when it counts as done
};

class Queue {
 public:
  Queue(int device, c10::StreamId id, size_t number);
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  const int device;
  const c10::StreamId id;
  const size_t number;  ///< its place in clocks
  Clock clock;          ///< under the world's lock

  c10::Stream stream() const { return c10::Stream(c10::Stream::UNSAFE, device_of(device), id); }
  std::string name() const;

  void push(Job job);
  uint64_t num_pushed() const;
  bool is_done(uint64_t num_jobs) const;
  void wait_for(uint64_t num_jobs) const;

  std::optional<uint64_t> asked_at;  ///< num_pushed() when it was last asked whether it is done; under the world's lock

 private:
  void run();
  void execute(const Job& job);
  void delay();

  mutable std::mutex mutex_;
  std::condition_variable filled_;
  mutable std::condition_variable done_;
  std::deque<Job> jobs_;
  uint64_t num_pushed_ = 0;
  uint64_t num_done_ = 0;
  bool has_thread_ = false;
  uint64_t delays_ = 0;
  std::mt19937_64 random_;
};

Queue& queue_of(const c10::Stream& stream);
/// All that were used yet.
std::vector<Queue*> queues();
Queue& current_queue(int device);
c10::StreamId exchange_current(int device, c10::StreamId id);
c10::Stream next_of_pool(int device);

int current_device();
int exchange_device(int device);

/// While it lives the process doesn't end: static objects that a kernel uses are there.
class Running {
 public:
  Running();
  ~Running();
};

// ---- devices that fail

void throw_if_failed(int device);
std::string failure(int device);  ///< empty: none
void fail_now(int device, const std::string& why);

}  // namespace emulated
