// SPDX-License-Identifier: Apache-2.0
//
// What a run tells while it goes on, and the one thing that it is told: to stop.
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <string>

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

struct Events {
  std::function<void(uint32_t level, const std::string& message)> log;  // STG_LOG_*
  std::function<void(const Progress&)> progress;
  std::function<void(const std::string& line)> metrics;
  const std::atomic<bool>* stop = nullptr;

  bool stop_requested() const { return stop != nullptr && stop->load(std::memory_order_relaxed); }
};

}  // namespace stratagem
