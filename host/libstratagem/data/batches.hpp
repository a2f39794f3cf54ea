// SPDX-License-Identifier: Apache-2.0
//
// The batches of one epoch, prepared ahead by a thread of its own where the data set allows it.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <vector>

#include "libstratagem/data/dataset.hpp"

namespace stratagem {

/// Requires: the data set outlives it; one thread calls next. `mutex_` guards ready_, done_ and failure_; the reader thread, where there
/// is one, alone reads the data set and order_.
class BatchStream {
 public:
  /// Batches of `batch_size` samples in the given order (none: as they are numbered), from batch number `first_batch` on, before number `end_batch`; the last of the
  /// data set may be smaller.
  BatchStream(const Dataset& dataset, std::optional<std::vector<int64_t>> order, int64_t batch_size, int64_t first_batch = 0,
              int64_t end_batch = std::numeric_limits<int64_t>::max());

  /// The next batch, or nothing after the last. Rethrows what the reader thread has thrown.
  std::optional<Tree> next();
  /// The same where it was read ahead already, else nothing.
  std::optional<Tree> next_if_ready();

  /// Whether the calling thread is one of those that prepare batches.
  static bool is_reader_thread();

 private:
  void read(const std::stop_token& stop);
  std::optional<Tree> take_ready();
  Tree batch(int64_t index) const;

  const Dataset& dataset_;
  const std::optional<std::vector<int64_t>> order_;
  const int64_t batch_size_;
  int64_t next_batch_;  // of who reads
  const int64_t end_batch_;

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Tree> ready_;
  bool done_ = false;
  std::exception_ptr failure_;
  std::jthread reader_;  // last: it uses all of the above
};

}  // namespace stratagem
