// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/data/batches.hpp"

#include <algorithm>
#include <numeric>

namespace stratagem {
namespace {

// Two would do to hide the reader; a third takes up a step that was faster than the others.
constexpr size_t max_ready = 3;

thread_local bool reads_here = false;

}  // namespace

BatchStream::BatchStream(const Dataset& dataset, std::optional<std::vector<int64_t>> order, int64_t batch_size,
                         int64_t first_batch, int64_t end_batch)
    : dataset_(dataset),
      order_(std::move(order)),
      batch_size_(batch_size),
      next_batch_(first_batch),
      end_batch_(
          std::min(end_batch, num_batches(order_ ? static_cast<int64_t>(order_->size()) : dataset.num_samples(), batch_size))) {
  if (dataset.reads_ahead()) reader_ = std::jthread([this](const std::stop_token& stop) { read(stop); });
}

Tree BatchStream::batch(int64_t index) const {
  const int64_t begin = index * batch_size_;
  const int64_t total = order_ ? static_cast<int64_t>(order_->size()) : dataset_.num_samples();
  const auto num_rows = static_cast<size_t>(std::min(batch_size_, total - begin));
  if (order_) return dataset_.batch(std::span(*order_).subspan(static_cast<size_t>(begin), num_rows));
  std::vector<int64_t> rows(num_rows);
  std::iota(rows.begin(), rows.end(), begin);
  return dataset_.batch(rows);
}

bool BatchStream::is_reader_thread() { return reads_here; }

void BatchStream::read(const std::stop_token& stop) {
  reads_here = true;
  std::exception_ptr failure;
  try {
    for (; next_batch_ < end_batch_; ++next_batch_) {
      Tree made = batch(next_batch_);
      std::unique_lock lock(mutex_);
      if (!changed_.wait(lock, stop, [&] { return ready_.size() < max_ready; })) return;
      ready_.push_back(std::move(made));
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

/// Under the lock.
std::optional<Tree> BatchStream::take_ready() {
  std::optional<Tree> first(std::move(ready_.front()));
  ready_.pop_front();
  changed_.notify_all();
  return first;
}

std::optional<Tree> BatchStream::next_if_ready() {
  const std::lock_guard lock(mutex_);
  return ready_.empty() ? std::nullopt : take_ready();
}

std::optional<Tree> BatchStream::next() {
  if (!reader_.joinable()) return next_batch_ < end_batch_ ? std::optional(batch(next_batch_++)) : std::nullopt;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !ready_.empty() || done_; });
  if (!ready_.empty()) return take_ready();
  if (failure_) std::rethrow_exception(failure_);
  return std::nullopt;
}

}  // namespace stratagem
