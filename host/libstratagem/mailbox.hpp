// SPDX-License-Identifier: Apache-2.0
//
// What a session leaves for those who look at it from other threads: how far it is, and, if asked to, its events, for languages that
// can't be called on a foreign thread. Nobody who takes no events may make a run grow: so many are kept, and progress, which the next one
// repeats, goes first.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <variant>

#include "base/error.hpp"
#include "libstratagem/config/json_text.hpp"
#include "libstratagem/loop/events.hpp"

namespace stratagem {

/// Any thread may call anything; `mutex_` guards all members but keeps_events_.
class Mailbox {
 public:
  Mailbox(bool keeps_events, uint64_t stage) : keeps_events_(keeps_events) { progress_.stage = stage; }

  bool keeps_events() const { return keeps_events_; }
  /// Before the first `put`.
  void begin_at(const Progress& progress);
  void put(const Progress& progress);
  void put_log(uint32_t level, const std::string& message);
  void put_metrics(const std::string& line);
  void put_swap(int64_t step, const Json& strategy, const Error* error);

  Progress progress() const;
  /// The next event, waited for at most so long; null if there was none. Throws FAILED_PRECONDITION where none are kept, and when the
  /// session is closed meanwhile.
  Json next(uint64_t timeout_ns);
  void close();

 private:
  using Event = std::variant<Progress, Json>;
  void keep(Event event);

  const bool keeps_events_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Progress progress_;
  std::deque<Event> events_;
  uint64_t num_progress_ = 0;  // of events_
  uint64_t num_dropped_ = 0;   // since it was told
  bool is_closed_ = false;
};

}  // namespace stratagem
