// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/loop/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "libstratagem/data/dataset.hpp"

namespace stratagem {

namespace {

/// From `from` at t = 0 to `to` at t = 1, and there it stays.
double half_wave(double from, double to, double t) {
  return to + (from - to) * (1 + std::cos(std::numbers::pi * std::clamp(t, 0.0, 1.0))) / 2;
}

}  // namespace

double learning_rate(const SchedulerConfig& scheduler, double base, int64_t num_updates_done, int64_t total_updates) {
  const int64_t warmup = scheduler.warmup_steps;
  if (num_updates_done < warmup) return base * static_cast<double>(num_updates_done + 1) / static_cast<double>(warmup);
  const int64_t done = num_updates_done - warmup;
  if (scheduler.name == "step") return base * std::pow(scheduler.gamma, static_cast<double>(done / scheduler.step_size));
  const int64_t length = std::max<int64_t>(1, scheduler.total_steps.value_or(total_updates) - warmup);
  if (scheduler.name == "cosine")
    return half_wave(base, scheduler.min_lr, static_cast<double>(done) / static_cast<double>(length));
  if (scheduler.name == "one_cycle") {
    const double first = base / scheduler.div_factor;
    const double peak = scheduler.pct_start * static_cast<double>(length) - 1;
    const auto u = static_cast<double>(done);
    if (u <= peak) return half_wave(first, base, peak > 0 ? u / peak : 1);
    return half_wave(base, first / scheduler.final_div_factor, (u - peak) / (static_cast<double>(length) - 1 - peak));
  }
  return base;
}

int64_t num_train_batches(const Config& config, int64_t num_samples) {
  return config.trainer.limit_train_batches.of(num_batches(num_samples, config.train->batch_size));
}

int64_t total_updates(const Config& config, int64_t num_samples) {
  const TrainerConfig& trainer = config.trainer;
  // Micro-batches into updates are divided as samples into batches: the last may be smaller.
  const int64_t updates_per_epoch = num_batches(num_train_batches(config, num_samples), trainer.accumulate_grad_batches);
  int64_t total = std::numeric_limits<int64_t>::max();
  if (trainer.max_steps != no_limit) total = trainer.max_steps;
  int64_t by_epochs = 0;
  if (trainer.max_epochs != no_limit && !__builtin_mul_overflow(trainer.max_epochs, updates_per_epoch, &by_epochs)) {
    total = std::min(total, by_epochs);
  }
  return total;
}

}  // namespace stratagem
