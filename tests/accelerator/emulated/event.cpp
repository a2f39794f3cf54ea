// SPDX-License-Identifier: Apache-2.0
#include "accelerator/emulated/event.hpp"

#include "accelerator/emulated/detector.hpp"

namespace emulated {

void Record::set_done() {
  const std::lock_guard lock(mutex_);
  is_done_ = true;
  time_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

bool Record::is_done() const {
  const std::lock_guard lock(mutex_);
  return is_done_;
}

void Record::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_done_; });
}

std::chrono::steady_clock::time_point Record::time() const {
  const std::lock_guard lock(mutex_);
  return time_;
}

std::shared_ptr<Record> record_now(Queue& queue) {
  const auto made = std::make_shared<Record>(queue.device);
  queue.clock.join(host_clock());
  made->clock = queue.clock;
  queue.push({nullptr, false, "event", [made] { made->set_done(); }});
  return made;
}

void wait_on(Queue& queue, const std::shared_ptr<Record>& record) {
  queue.clock.join(host_clock());
  queue.clock.join(record->clock);
  queue.push({[record] { record->wait(); }, false, "wait"});
}

std::shared_ptr<Record> record(Queue& queue) {
  throw_if_failed(queue.device);
  const std::lock_guard lock(world());
  return record_now(queue);
}

void order_after(Queue& queue, const std::shared_ptr<Record>& record) {
  throw_if_failed(queue.device);
  const std::lock_guard lock(world());
  wait_on(queue, record);
}

void synchronize(const std::shared_ptr<Record>& record) {
  throw_if_failed(record->device);
  record->wait();
  const std::lock_guard lock(world());
  ++count.synchronisations;
  host_waited(record->clock);
  throw_if_failed(record->device);
}

void synchronize(Queue& queue) { synchronize(record(queue)); }

void synchronize_device(int device) {
  throw_if_failed(device);
  std::vector<std::shared_ptr<Record>> records;
  for (Queue* queue : queues())
    if (queue->device == device) records.push_back(record(*queue));
  for (const auto& one : records) one->wait();
  const std::lock_guard lock(world());
  ++count.synchronisations;
  for (const auto& one : records) host_waited(one->clock);
  throw_if_failed(device);
}

bool ask(const std::shared_ptr<Record>& record) {
  throw_if_failed(record->device);
  const std::lock_guard lock(world());
  if (host_clock().covers(record->clock) && record->is_done()) return true;
  if (!std::exchange(record->was_asked, true) || !record->is_done()) return false;
  host_waited(record->clock);
  return true;
}

bool ask(Queue& queue) {
  throw_if_failed(queue.device);
  const std::lock_guard lock(world());
  const uint64_t num_jobs = queue.num_pushed();
  if (host_clock().covers(queue.clock) && queue.is_done(num_jobs)) return true;
  const bool was_asked = std::exchange(queue.asked_at, num_jobs) == num_jobs;
  if (!was_asked || !queue.is_done(num_jobs)) return false;
  host_waited(queue.clock);
  return true;
}

}  // namespace emulated
