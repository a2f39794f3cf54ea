// SPDX-License-Identifier: Apache-2.0
//
// What a session leaves for those who look at it from other threads: how far it is.
#pragma once

#include <mutex>

#include "libstratagem/loop/events.hpp"

namespace stratagem {

/// Any thread may call anything; `mutex_` guards all members.
class Mailbox {
 public:
  void put(const Progress& progress) {
    const std::lock_guard lock(mutex_);
    progress_ = progress;
  }
  Progress progress() const {
    const std::lock_guard lock(mutex_);
    return progress_;
  }
  /// The session is closed.
  void close() {}

 private:
  mutable std::mutex mutex_;
  Progress progress_;
};

}  // namespace stratagem
