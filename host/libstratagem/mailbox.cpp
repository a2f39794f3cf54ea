// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/mailbox.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

namespace stratagem {
namespace {

constexpr size_t max_events = 4096;

Json to_json(const Progress& progress) {
  return {{"event", "progress"},
          {"stage", progress.stage},
          {"epoch", progress.epoch},
          {"max_epochs", progress.max_epochs},
          {"batch", progress.batch},
          {"num_batches", progress.num_batches},
          {"step", progress.step},
          {"max_steps", progress.max_steps},
          {"loss", std::isfinite(progress.loss) ? Json(progress.loss) : Json(nullptr)}};
}

}  // namespace

void Mailbox::begin_at(const Progress& progress) {
  const std::lock_guard lock(mutex_);
  progress_ = progress;
}

void Mailbox::put(const Progress& progress) {
  {
    const std::lock_guard lock(mutex_);
    progress_ = progress;
  }
  keep(progress);
}

void Mailbox::put_log(uint32_t level, const std::string& message) {
  if (keeps_events_) keep(Json{{"event", "log"}, {"level", level}, {"message", message}});
}

void Mailbox::put_metrics(const std::string& line) {
  if (keeps_events_) keep(Json{{"event", "metrics"}, {"line", Json::parse(line)}});
}

void Mailbox::put_swap(int64_t step, const Json& strategy, const Error* error) {
  if (!keeps_events_) return;
  const Json why = error == nullptr ? Json(nullptr) : Json{{"code", error->code}, {"message", error->message}};
  keep(Json{{"event", "swap"}, {"step", step}, {"strategy", strategy}, {"error", why}});
}

void Mailbox::keep(Event event) {
  if (!keeps_events_) return;
  const auto is_progress = [](const Event& kept) { return std::holds_alternative<Progress>(kept); };
  const std::lock_guard lock(mutex_);
  num_progress_ += is_progress(event) ? 1 : 0;
  events_.push_back(std::move(event));
  if (events_.size() > max_events) {
    const auto first = num_progress_ == 0 ? events_.begin() : std::find_if(events_.begin(), events_.end(), is_progress);
    num_progress_ -= is_progress(*first) ? 1 : 0;
    events_.erase(first);
    ++num_dropped_;
  }
  changed_.notify_one();
}

Progress Mailbox::progress() const {
  const std::lock_guard lock(mutex_);
  return progress_;
}

Json Mailbox::next(uint64_t timeout_ns) {
  if (!keeps_events_) throw failed_precondition("events of this session are not kept; open it with STG_SESSION_QUEUE_EVENTS");
  // Longer than any process lives, and short enough to be added to the clock.
  constexpr uint64_t max_timeout_ns = uint64_t{1} << 60;
  const auto timeout = std::chrono::nanoseconds(std::min(timeout_ns, max_timeout_ns));
  std::unique_lock lock(mutex_);
  const bool is_ready = changed_.wait_until(lock, std::chrono::steady_clock::now() + timeout,
                                            [&] { return is_closed_ || num_dropped_ != 0 || !events_.empty(); });
  if (is_closed_) throw failed_precondition("the session was closed while an event was waited for");
  if (!is_ready) return nullptr;
  if (num_dropped_ != 0) return {{"event", "dropped"}, {"count", std::exchange(num_dropped_, 0)}};
  const Event event = std::move(events_.front());
  events_.pop_front();
  if (const auto* progress = std::get_if<Progress>(&event)) {
    --num_progress_;
    return to_json(*progress);
  }
  return std::get<Json>(event);
}

void Mailbox::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

}  // namespace stratagem
