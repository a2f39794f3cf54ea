// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/data/batches.hpp"

#include <algorithm>

namespace stratagem {
namespace {

// Two would do to hide the reader; a third takes up a step that was faster than the others.
constexpr size_t max_ready = 3;

}  // namespace

BatchStream::BatchStream(const Dataset& dataset, std::vector<int64_t> order, int64_t batch_size, int64_t first_batch,
                         int64_t end_batch)
    : dataset_(dataset),
      order_(std::move(order)),
      batch_size_(batch_size),
      first_batch_(first_batch),
      end_batch_(std::min(end_batch, num_batches(static_cast<int64_t>(order_.size()), batch_size))),
      reader_([this](const std::stop_token& stop) { read(stop); }) {}

void BatchStream::read(const std::stop_token& stop) {
  std::exception_ptr failure;
  try {
    const auto total = static_cast<int64_t>(order_.size());
    for (int64_t index = first_batch_; index < end_batch_; ++index) {
      const int64_t begin = index * batch_size_;
      const auto rows =
          std::span(order_).subspan(static_cast<size_t>(begin), static_cast<size_t>(std::min(batch_size_, total - begin)));
      Tree batch = dataset_.batch(rows);
      std::unique_lock lock(mutex_);
      if (!changed_.wait(lock, stop, [&] { return ready_.size() < max_ready; })) return;
      ready_.push_back(std::move(batch));
      changed_.notify_all();
    }
  } catch (...) {
    failure = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  failure_ = failure;
  done_ = true;
  changed_.notify_all();
}

std::optional<Tree> BatchStream::next() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !ready_.empty() || done_; });
  if (!ready_.empty()) {
    std::optional<Tree> batch(std::move(ready_.front()));
    ready_.pop_front();
    changed_.notify_all();
    return batch;
  }
  if (failure_) std::rethrow_exception(failure_);
  return std::nullopt;
}

}  // namespace stratagem
