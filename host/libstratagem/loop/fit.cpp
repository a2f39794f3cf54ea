// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/loop/fit.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/structs.hpp"
#include "libstratagem/data/batches.hpp"
#include "libstratagem/data/permutation.hpp"
#include "libstratagem/loop/evaluate.hpp"
#include "libstratagem/loop/schedule.hpp"

namespace stratagem {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// A loss scale of 65536 that is halved each time is gone after 24; more skips in a row will never end.
constexpr int64_t max_skipped_in_a_row = 24;
// Losses that are kept unread at most, however rare the metrics lines are.
constexpr size_t max_kept_losses = 256;

double ms_since(Clock::time_point begin) { return std::chrono::duration<double, std::milli>(Clock::now() - begin).count(); }

double median(std::vector<double> values) {
  if (values.empty()) return nan;
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

std::optional<int64_t> resumed_step_in(const Config& config, const std::optional<Resume>& resume) {
  if (!resume || !config.checkpoint) return std::nullopt;
  std::error_code error;
  if (!std::filesystem::equivalent(resume->checkpoint.parent_path(), config.checkpoint->dir, error)) return std::nullopt;
  return resume->position.step;
}

}  // namespace

FitLoop::FitLoop(const Config& config, StrategyInstance& strategy, const Dataset& train, const Dataset* validation,
                 const std::optional<Resume>& resume, const Events& events)
    : config_(config),
      trainer_(config.trainer),
      strategy_(strategy),
      train_(train),
      validation_data_(validation),
      resume_(resume),
      events_(events),
      loss_(strategy),
      shown_loss_(nan),
      epoch_loss_(nan) {
  if (resume_) position_ = resume_->position;
  loss_.epoch = position_.loss;
  total_updates_ = total_updates(config_, train_.num_samples());
  note_good();
}

int64_t FitLoop::num_train_batches() const { return num_batches(train_.num_samples(), config_.train->batch_size); }

std::string FitLoop::finished() const {
  if (position_.validation_pending) return {};
  if (trainer_.max_steps != no_limit && position_.step >= trainer_.max_steps) {
    return concat("/trainer/max_steps (", trainer_.max_steps, ") is reached: ", position_.step, " updates are done");
  }
  if (trainer_.max_epochs != no_limit && position_.epoch >= trainer_.max_epochs) {
    return concat("/trainer/max_epochs (", trainer_.max_epochs, ") is reached: ", position_.epoch, " epochs are done");
  }
  return {};
}

FitResult FitLoop::run() {
  if (const std::string reason = finished(); !reason.empty()) {
    FitResult nothing = result();
    nothing.nothing_to_do = reason;
    if (resume_) nothing.checkpoint = resume_->checkpoint;
    return nothing;
  }
  const auto warn = [&](const std::string& text) { events_.log(STG_LOG_WARNING, text); };
  if (config_.checkpoint) checkpoints_.emplace(*config_.checkpoint, resumed_step_in(config_, resume_), warn);
  metrics_.emplace(config_.metrics, resume_ ? std::optional(position_) : std::nullopt, events_.metrics);
  const Clock::time_point begin = Clock::now();
  try {
    train();
    if (checkpoints_) save();
  } catch (...) {
    save_after(describe_exception(std::current_exception()));
    throw;
  }
  seconds_ = ms_since(begin) / 1000;
  return result();
}

void FitLoop::train() {
  while (finished().empty() && !interrupted_) {
    const Ended ended = position_.validation_pending ? Ended::epoch : train_epoch();
    if (ended == Ended::stop) {
      interrupted_ = true;
    } else {
      finish_epoch(ended);
    }
  }
}

FitLoop::Ended FitLoop::train_epoch() {
  std::vector<int64_t> order(static_cast<size_t>(train_.num_samples()));
  if (config_.train->shuffle) {
    order = permutation(train_.num_samples(), config_.seed, position_.epoch);
  } else {
    std::iota(order.begin(), order.end(), 0);
  }
  BatchStream stream(train_, std::move(order), config_.train->batch_size, position_.batch);
  const int64_t total = num_train_batches();
  while (position_.batch < total) {
    const Clock::time_point begin = Clock::now();
    const bool updated = update(stream);
    if (updated) {
      step_ms_.push_back(ms_since(begin));
      after_update();
    }
    if (updated && loss_.num_kept() >= max_kept_losses) loss_.flush(0);
    report(STG_STAGE_FIT, position_.batch, total);
    if (position_.batch == total) return Ended::epoch;
    if (position_.step == trainer_.max_steps) return Ended::limit;
    if (updated && checkpoints_ && checkpoints_->due(position_.step)) save();
    if (events_.stop_requested()) return Ended::stop;
  }
  return Ended::epoch;
}

/// One window of micro-batches. Returns whether the weights were updated.
bool FitLoop::update(BatchStream& stream) {
  const stg_update_args args = update_args();
  last_update_ = sized<stg_update_result>();
  window_ = static_cast<size_t>(std::min(trainer_.accumulate_grad_batches, num_train_batches() - position_.batch));
  for (size_t i = 0; i < window_; ++i) {
    auto batch = stream.next();
    if (!batch) throw internal("the reader ended before its last batch");
    const bool last = i + 1 == window_;
    loss_.add(strategy_.train(std::move(*batch), {position_.batch, position_.step}, last ? &args : nullptr, last_update_));
    ++position_.batch;
  }
  count_skipped(last_update_.outcome);
  if (last_update_.outcome != STG_UPDATE_DONE) return false;
  ++position_.step;
  note_good();
  return true;
}

stg_update_args FitLoop::update_args() const {
  auto args = sized<stg_update_args>();
  args.lr = learning_rate(config_.scheduler, config_.lr, position_.step, total_updates_);
  if (trainer_.gradient_clip_val > 0) {
    args.clip = trainer_.gradient_clip_algorithm == "norm" ? STG_CLIP_NORM : STG_CLIP_VALUE;
    args.clip_limit = trainer_.gradient_clip_val;
  }
  return args;
}

void FitLoop::count_skipped(uint64_t outcome) {
  if (outcome == STG_UPDATE_DONE) {
    num_skipped_in_a_row_ = 0;
  } else if (++num_skipped_in_a_row_ >= max_skipped_in_a_row) {
    throw Error(STG_ABORTED, concat(num_skipped_in_a_row_, " updates in a row were skipped (",
                                    outcome == STG_UPDATE_SKIPPED_OVERFLOW ? "a gradient was not finite" : "no sample counted",
                                    "); the weights are those after update ", position_.step));
  }
}

void FitLoop::after_update() {
  if (position_.step % trainer_.log_every_n_steps != 0) return;
  shown_loss_ = loss_.flush(window_);
  std::map<std::string, double> values = {
      {"loss", shown_loss_}, {"lr", learning_rate(config_.scheduler, config_.lr, position_.step - 1, total_updates_)}};
  if (std::isfinite(last_update_.gradient_norm)) values["gradient_norm"] = last_update_.gradient_norm;
  if (last_update_.loss_scale != 1) values["loss_scale"] = last_update_.loss_scale;
  metrics_->write(position_, "fit", values);
}

/// After the last update of an epoch, or of the run: the epoch's mean, validation, and on to the next.
void FitLoop::finish_epoch(Ended ended) {
  if (!position_.validation_pending) {
    note_good();  // windows at the end may have been skipped
    loss_.flush(0);
    metrics_->write(position_, "epoch", {{"train_loss", loss_.epoch.mean()}});
    position_.validation_pending = true;
    position_.epoch_is_whole = ended == Ended::epoch;
    note_good();
  }
  epoch_loss_ = loss_.epoch.mean();
  if (!validate()) {
    interrupted_ = true;
    return;
  }
  position_.validation_pending = false;
  if (position_.epoch_is_whole) {
    ++position_.epoch;
    position_.batch = 0;
    position_.epoch_is_whole = false;
    loss_.epoch = {};
  }
  note_good();
  if (checkpoints_ && checkpoints_->due(position_.step)) save();
  if (events_.stop_requested() && finished().empty()) interrupted_ = true;
}

/// Returns whether it came to its end.
bool FitLoop::validate() {
  if (validation_data_ == nullptr) return true;
  if (events_.stop_requested()) return false;
  const auto go_on = [&](int64_t done, int64_t total) {
    report(STG_STAGE_VALIDATE, done, total);
    return !events_.stop_requested();
  };
  const Evaluation evaluation =
      evaluate(strategy_, *validation_data_, config_.validation->batch_size, STG_STAGE_VALIDATE, position_.step, go_on);
  if (evaluation.stopped) return false;
  validation_ = evaluation.metrics;
  metrics_->write(position_, "validate", validation_);
  return true;
}

/// Returns whether there was something to save.
bool FitLoop::save() {
  loss_.flush(0);
  position_.loss = loss_.epoch;
  const Json state = host_state(position_, config_, train_.num_samples());
  if (state == saved_) return false;
  saved_ = state;
  checkpoints_->save(position_.step, [&](const std::string& folder) { strategy_.save(folder, state); });
  return true;
}

void FitLoop::note_good() {
  good_ = position_;
  num_good_losses_ = loss_.num_added();
}

/// What trained for hours must not go with one bad batch or a full disk for the metrics.
void FitLoop::save_after(const Error& error) {
  const bool has_trained = !step_ms_.empty();
  if (!checkpoints_ || !has_trained || (error.flags & STG_ERROR_INSTANCE_USABLE) == 0) return;
  const std::string what = concat("the weights after update ", good_.step);
  try {
    position_ = good_;
    loss_.forget_after(num_good_losses_);
    if (save()) {
      events_.log(STG_LOG_WARNING, concat(what, " are saved in ", checkpoints_->newest()->string(), ", to resume from"));
    }
  } catch (...) {
    events_.log(STG_LOG_WARNING, concat(what, " can't be saved: ", describe_exception(std::current_exception()).message));
  }
}

void FitLoop::report(uint64_t stage, int64_t batch, int64_t num_batches) const {
  if (events_.progress) {
    events_.progress(
        {stage, position_.epoch, trainer_.max_epochs, batch, num_batches, position_.step, trainer_.max_steps, shown_loss_});
  }
}

FitResult FitLoop::result() const {
  FitResult result;
  result.steps = position_.step;
  result.epochs = position_.epoch;
  result.train_loss = loss_.epoch.weight != 0 ? loss_.epoch.mean() : epoch_loss_;
  result.validation = validation_;
  result.seconds = seconds_;
  result.step_ms_median = median(step_ms_);
  if (checkpoints_) result.checkpoint = checkpoints_->newest();
  result.interrupted = interrupted_;
  return result;
}

}  // namespace stratagem
