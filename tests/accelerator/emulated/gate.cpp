// SPDX-License-Identifier: Apache-2.0
#include <condition_variable>
#include <mutex>

#include "accelerator/emulated/detector.hpp"

namespace emulated {

struct Gate::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_open = false;
  bool is_reached = false;
};

Gate::Gate(const c10::Stream& stream) : state_(std::make_shared<State>()) {
  const auto hold = [state = state_] {
    std::unique_lock lock(state->mutex);
    state->is_reached = true;
    state->changed.notify_all();
    state->changed.wait(lock, [&] { return state->is_open; });
  };
  Queue& queue = queue_of(stream);
  const std::lock_guard lock(world());
  queue.push({hold, false, "gate"});
}

Gate::Gate(Gate&&) noexcept = default;

Gate::~Gate() {
  if (state_) open();
}

void Gate::open() {
  const std::lock_guard lock(state_->mutex);
  state_->is_open = true;
  state_->changed.notify_all();
}

void Gate::await_reached() const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->is_reached; });
}

}  // namespace emulated
