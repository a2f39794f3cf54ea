// SPDX-License-Identifier: Apache-2.0
//
// How tests of faults watch a run: by the threads of the process, the bytes of its state, and a deadline on each step.
#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <thread>

#include "spec/instance.hpp"

namespace stratagem::test {

inline size_t num_threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<size_t>(std::distance(begin(tasks), end(tasks)));
}

/// A thread that was joined stands in the list for a moment more.
inline bool num_threads_becomes(size_t expected) {
  const auto last = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (num_threads() != expected && std::chrono::steady_clock::now() < last) std::this_thread::yield();
  return num_threads() == expected;
}

/// Parameters, buffers, the optimizer's slots and the generators.
inline std::string state_bytes(const Tree& state) {
  std::string bytes = model_bytes(state) + optimizer_bytes(state);
  const stg_value& generators = *find(state.root(), "generators");
  for (uint32_t i = 0; i < generators.count; ++i) {
    const stg_value& generator = generators.as.items[i];
    if (generator.type == STG_BYTES) bytes.append(reinterpret_cast<const char*>(generator.as.bytes), generator.count);
  }
  return bytes;
}

/// In how many nanoseconds of CLOCK_MONOTONIC a call of now must be back.
inline stg_call within_seconds(int seconds) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  stg_call call = sized<stg_call>();
  call.deadline_ns = static_cast<uint64_t>(std::chrono::nanoseconds(now + std::chrono::seconds(seconds)).count());
  return call;
}

/// One batch and its update, by train_batch or by the functions that it is made of; back within 5 seconds.
inline void train_by(Instance& instance, Tree batch, bool in_one, double lr, uint64_t flags = 0, int64_t global_step = 0) {
  const stg_call call = within_seconds(5);
  stg_update_args update = sized<stg_update_args>();
  update.lr = lr;
  stg_step_args args = sized<stg_step_args>();
  args.batch = batch.argument();
  args.global_step = global_step;
  args.flags = flags | (in_one ? STG_BATCH_LAST_MICRO_BATCH : 0);
  args.update = in_one ? &update : nullptr;
  stg_step_result result = sized<stg_step_result>();
  if (in_one) {
    check(instance.api.train_batch(instance.self, &call, &args, &result, nullptr));
    const Tree outputs{result.outputs};
    return;
  }
  check(instance.api.training_step(instance.self, &call, &args, &result));
  const Tree outputs{result.outputs};
  check(instance.api.backward(instance.self, &call, flags | STG_BATCH_LAST_MICRO_BATCH));
  check(instance.api.optimizer_step(instance.self, &call, &update, nullptr));
}

}  // namespace stratagem::test
