// SPDX-License-Identifier: Apache-2.0
//
// What a run tells while it goes on, and what it is told.
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/value.hpp"
#include "libstratagem/config/json_text.hpp"

namespace stratagem {

struct Progress {
  uint64_t stage = 0;  // STG_STAGE_*
  int64_t epoch = 0;
  int64_t max_epochs = -1;
  int64_t batch = 0;
  int64_t num_batches = 0;
  int64_t step = 0;
  int64_t max_steps = -1;
  double loss = std::numeric_limits<double>::quiet_NaN();  // the one of the last metrics line
};

/// What is asked of a run from outside: other threads and, but for the swap, signal handlers.
class Requests {
 public:
  std::atomic<bool> stop{false};
  std::atomic<bool> reload{false};
  std::atomic<uint32_t> cancel{0};  // not 0: asked for; see stg_call

  /// A later one takes the place of one that waits. Returns whether it is still heard.
  bool swap_to(Json strategy) {
    const std::lock_guard lock(mutex_);
    if (!hears_swaps_) return false;
    strategy_ = std::move(strategy);
    return true;
  }
  void clear() {
    stop = reload = false;
    cancel = 0;
    const std::lock_guard lock(mutex_);
    strategy_.reset();
    hears_swaps_ = true;
  }
  std::optional<Json> take_swap() {
    const std::lock_guard lock(mutex_);
    return std::exchange(strategy_, std::nullopt);
  }
  /// The same for the last time.
  std::optional<Json> take_last_swap() {
    const std::lock_guard lock(mutex_);
    hears_swaps_ = false;
    return std::exchange(strategy_, std::nullopt);
  }

 private:
  std::mutex mutex_;  // guards what follows
  std::optional<Json> strategy_;
  bool hears_swaps_ = true;
};

struct Events {
  std::function<void(uint32_t level, const std::string& message)> log;  // STG_LOG_*
  // An error thrown by one of these ends the run.
  std::function<void(const Progress&)> progress;
  std::function<void(const std::string& line)> metrics;
  std::function<void(const Progress&)> batch_start;
  std::function<void(const Progress&, const stg_value& outputs)> batch_end;
  std::function<void(int64_t step, const Json& strategy, const Error* error)> swap;  // error: null, or why the old one goes on
  Requests* requests = nullptr;                                                      // lifetime: the session

  bool stop_requested() const { return requests != nullptr && requests->stop.load(std::memory_order_relaxed); }
};

}  // namespace stratagem
