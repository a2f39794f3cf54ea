// SPDX-License-Identifier: Apache-2.0
//
// Events. Each recording has a state of its own: who waits for the last one isn't disturbed by the next.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "accelerator/emulated/queue.hpp"

namespace emulated {

class Record {
 public:
  explicit Record(int of_device) : device(of_device) {}

  const int device;
  Clock clock;             ///< what comes before it; under the world's lock
  bool was_asked = false;  ///< under the world's lock

  void set_done();
  bool is_done() const;
  void wait() const;
  std::chrono::steady_clock::time_point time() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool is_done_ = false;
  std::chrono::steady_clock::time_point time_;
};

struct Event {
  std::shared_ptr<Record> last;
};

/// Under the world's lock.
std::shared_ptr<Record> record_now(Queue& queue);
void wait_on(Queue& queue, const std::shared_ptr<Record>& record);

// Each takes the lock.
std::shared_ptr<Record> record(Queue& queue);
void order_after(Queue& queue, const std::shared_ptr<Record>& record);
/// The host waits; an error of the device is thrown.
void synchronize(const std::shared_ptr<Record>& record);
void synchronize(Queue& queue);
void synchronize_device(int device);
bool ask(const std::shared_ptr<Record>& record);
bool ask(Queue& queue);

}  // namespace emulated
