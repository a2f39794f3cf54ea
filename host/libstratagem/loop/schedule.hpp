// SPDX-License-Identifier: Apache-2.0
//
// The learning rate of each update. Updates are counted, not batches, and a skipped update doesn't count. With u updates done before
// this one, w = warmup_steps, base = optimizer.lr:
//
//   u < w      base * (u + 1) / w                              full height at update number w
//   constant   base
//   step       base * gamma ^ floor((u - w) / step_size)
//   cosine     min_lr + (base - min_lr) * (1 + cos(pi * t)) / 2    t = min(1, (u - w) / (total_steps - w))
//   one_cycle  up by such a half wave from base / div_factor to base, down to base / (div_factor * final_div_factor); with n = total_steps
//              - w, the top is at u - w = pct_start * n - 1 and the end at n - 1, as in torch.optim.lr_scheduler.OneCycleLR (which cycles
//              momentum, too, unless told not to: this one doesn't)
#pragma once

#include <cstdint>
#include <optional>

#include "libstratagem/config/config.hpp"

namespace stratagem {

/// `total_updates` is how many updates the run makes at most; the length of cosine and one_cycle where the config gives none.
double learning_rate(const SchedulerConfig& scheduler, double base, int64_t num_updates_done, int64_t total_updates);

/// The batches of an epoch of training.
int64_t num_train_batches(const Config& config, int64_t num_samples);

/// The most updates that the trainer's limits allow on so many training samples.
int64_t total_updates(const Config& config, int64_t num_samples);

}  // namespace stratagem
