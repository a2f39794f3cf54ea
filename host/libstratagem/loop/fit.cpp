// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/loop/fit.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "base/structs.hpp"
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
// Times of updates that the median is of: the last ones.
constexpr size_t max_kept_steps = 4096;

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
      resume_(resume),
      events_(events),
      loss_(strategy),
      shown_loss_(nan),
      epoch_loss_(nan) {
  if (validation != nullptr) validation_data_.emplace(*validation, *config_.validation, trainer_.limit_val_batches);
  if (resume_) position_ = resume_->position;
  seconds_before_ = position_.seconds;
  loss_.epoch = position_.loss;
  total_updates_ = total_updates(config_, train_.num_samples());
  note_good();
}

std::string FitLoop::finished() const {
  if (position_.validation_pending) return {};
  if (config_.early_stopping) {
    if (const std::string reason = reason_to_stop(position_.stopping, *config_.early_stopping); !reason.empty()) return reason;
  }
  if (trainer_.max_steps != no_limit && position_.step >= trainer_.max_steps) {
    return concat("/trainer/max_steps (", trainer_.max_steps, ") is reached: ", position_.step, " updates are done");
  }
  if (trainer_.max_epochs != no_limit && position_.epoch >= trainer_.max_epochs) {
    return concat("/trainer/max_epochs (", trainer_.max_epochs, ") is reached: ", position_.epoch, " epochs are done");
  }
  if (trainer_.max_time_s && position_.seconds >= *trainer_.max_time_s) {
    return concat("/trainer/max_time (", shown(*trainer_.max_time_s), " s) is reached: training took ", shown(position_.seconds),
                  " s");
  }
  return {};
}

/// What trained for hours must not go with one error.
template <class Body>
void FitLoop::or_save(Body body) {
  try {
    body();
  } catch (...) {
    has_failed_ = true;
    feed_.reset();
    save_after(describe_exception(std::current_exception()));
    if (checkpoints_) checkpoints_->finish();
    throw;
  }
}

void FitLoop::begin() {
  nothing_to_do_ = finished();
  if (!nothing_to_do_.empty()) return;
  const auto warn = [&](const std::string& text) { events_.log(STG_LOG_WARNING, text); };
  or_save([&] {
    if (config_.checkpoint)
      checkpoints_.emplace(*config_.checkpoint, resumed_step_in(config_, resume_), warn, position_.checkpoints);
    forget_lost_checkpoints();
    metrics_.emplace(config_.metrics, resume_ ? std::optional(position_) : std::nullopt, events_.metrics);
    begin_ = Clock::now();
    if (try_validation()) return;
    interrupted_ = has_nothing_to_save_ = true;  // nothing is trained yet
  });
}

void FitLoop::advance() {
  or_save([&] {
    const std::optional<Ended> ended = position_.validation_pending ? Ended::epoch : train_window();
    if (!ended) return;
    feed_.reset();
    if (*ended == Ended::stop) {
      interrupted_ = true;
    } else {
      finish_epoch(*ended);
    }
  });
}

void FitLoop::save_last() {
  or_save([&] {
    if (checkpoints_ && !has_nothing_to_save_) save();
  });
}

FitResult FitLoop::finish() {
  if (!nothing_to_do_.empty()) {
    FitResult nothing = result();
    nothing.nothing_to_do = nothing_to_do_;
    if (resume_) nothing.checkpoint = resume_->checkpoint;
    return nothing;
  }
  save_last();
  if (checkpoints_) checkpoints_->finish();
  seconds_ = ms_since(begin_) / 1000;
  return result();
}

void FitLoop::tick() { position_.seconds = seconds_before_ + ms_since(begin_) / 1000; }

void FitLoop::open_epoch() {
  std::optional<std::vector<int64_t>> order;
  if (config_.train->shuffle) order = permutation(train_.num_samples(), config_.seed, position_.epoch);
  feed_.emplace(strategy_, STG_STAGE_FIT, train_, std::move(order), config_.train->batch_size, position_.batch,
                num_train_batches(config_, train_.num_samples()));
}

/// Nothing where the epoch goes on.
std::optional<FitLoop::Ended> FitLoop::train_window() {
  const int64_t total = num_train_batches(config_, train_.num_samples());
  if (position_.batch >= total) return Ended::epoch;
  if (!feed_) open_epoch();
  const Clock::time_point begin = Clock::now();
  const bool updated = update();
  if (updated) {
    note_step(ms_since(begin));
    after_update();
  }
  if (updated && loss_.num_kept() >= max_kept_losses) loss_.flush(0);
  if (events_.progress) events_.progress(progress(STG_STAGE_FIT, position_.batch, total));
  if (position_.batch == total) return Ended::epoch;
  if (updated && validation_is_due()) {
    position_.validation_pending = true;
    note_good();
    if (!validate()) return Ended::stop;
    note_good();
  }
  if (!finished().empty()) return Ended::limit;
  if (updated) save_if_due();
  if (events_.stop_requested()) return Ended::stop;
  return std::nullopt;
}

void FitLoop::note_step(double ms) {
  const size_t place = num_steps_here_++ % max_kept_steps;
  if (place == step_ms_.size()) step_ms_.push_back(ms);
  step_ms_[place] = ms;
}

/// One window of micro-batches. Returns whether the weights were updated.
bool FitLoop::update() {
  const stg_update_args args = update_args();
  last_update_ = sized<stg_update_result>();
  const int64_t total = num_train_batches(config_, train_.num_samples());
  window_ = static_cast<size_t>(std::min(trainer_.accumulate_grad_batches, total - position_.batch));
  bool updated = false;
  std::exception_ptr event_error;  // of the last batch: thrown when the position is where the weights are
  for (size_t i = 0; i < window_; ++i) {
    auto batch = feed_->next();
    if (!batch) throw internal("the reader ended before its last batch");
    const bool last = i + 1 == window_;
    if (events_.batch_start) events_.batch_start(progress(STG_STAGE_FIT, position_.batch, total));
    StepOutcome outcome =
        strategy_.train(std::move(*batch), {position_.batch, position_.step}, last ? &args : nullptr, last_update_);
    ++position_.batch;
    updated = last && last_update_.outcome == STG_UPDATE_DONE;
    if (updated) ++position_.step;
    try {
      if (events_.batch_end) events_.batch_end(progress(STG_STAGE_FIT, position_.batch, total), outcome.outputs.root());
    } catch (...) {
      if (!last) throw;
      event_error = std::current_exception();
    }
    loss_.add(std::move(outcome));
  }
  tick();
  if (updated) note_good();
  if (event_error) std::rethrow_exception(event_error);
  count_skipped(last_update_.outcome);
  return updated;
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
    return;
  }
  ++position_.num_skipped;
  if (++num_skipped_in_a_row_ >= max_skipped_in_a_row) {
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
    std::map<std::string, double> values = {{"train_loss", loss_.epoch.mean()}};
    if (position_.num_skipped != 0) values["skipped_updates"] = static_cast<double>(position_.num_skipped);
    metrics_->write(position_, "epoch", values);
    position_.epoch_is_whole = ended == Ended::epoch;
    position_.validation_pending = validation_is_due_after(ended);
    note_good();
  }
  epoch_loss_ = loss_.epoch.mean();
  if (position_.validation_pending && !validate()) {
    interrupted_ = true;
    return;
  }
  if (position_.epoch_is_whole) {
    ++position_.epoch;
    position_.batch = 0;
    position_.epoch_is_whole = false;
    loss_.epoch = {};
  }
  note_good();
  save_if_due();
  if (events_.stop_requested() && finished().empty()) interrupted_ = true;
}

void FitLoop::save_if_due() {
  if (!checkpoints_) return;
  const bool due = checkpoints_->due(position_.step);
  if (due || is_best_) save(!due);
  is_best_ = false;
}

/// Returns whether there was something to save.
bool FitLoop::save(bool for_being_best) {
  loss_.flush(0);
  position_.loss = loss_.epoch;
  const Json state = host_state(position_, config_, train_.num_samples());
  if (state == saved_) {
    if (!for_being_best) checkpoints_->keep_newest();
    return false;
  }
  saved_ = state;
  std::vector<int64_t> best;
  for (const RankedCheckpoint& checkpoint : position_.best) best.push_back(checkpoint.step);
  Json whole = state;
  whole["checkpoints"] = to_json(checkpoints_->record_with(position_.step, for_being_best));
  try {
    checkpoints_->save(
        position_.step, [&](const std::string& folder) { strategy_.save(folder, whole); }, std::move(best), for_being_best);
  } catch (Error& error) {
    if (error.code == STG_UNIMPLEMENTED) error.message += "; /checkpoint needs it: leave that out, or use a strategy that has it";
    throw;
  }
  return true;
}

void FitLoop::note_good() {
  good_ = position_;
  num_good_losses_ = loss_.num_added();
}

void FitLoop::before_swap() {
  or_save([&] {
    if (feed_) feed_->take_back();
    loss_.flush(0);
  });
}

void FitLoop::after_swap(const Json& strategy, double seconds, const Error* error) {
  or_save([&] {
    if (metrics_ && error == nullptr) metrics_->write(position_, "swap", {{"strategy", strategy}, {"seconds", seconds}});
    if (events_.swap) events_.swap(position_.step, strategy, error);
  });
}

void FitLoop::note_planned_swap(int64_t at_step) { position_.planned_swap = good_.planned_swap = at_step; }

/// What trained for hours must not go with one bad batch or a full disk for the metrics.
void FitLoop::save_after(const Error& error) {
  const bool has_trained = num_steps_here_ != 0;
  if (!checkpoints_ || !has_trained || (error.flags & STG_ERROR_INSTANCE_USABLE) == 0) return;
  const std::string what = concat("the weights after update ", good_.step);
  try {
    strategy_.no_more_cancelling();
    position_ = good_;
    loss_.forget_after(num_good_losses_);
    if (save()) {
      events_.log(STG_LOG_WARNING, concat(what, " are saved in ", checkpoints_->newest()->string(), ", to resume from"));
    }
  } catch (...) {
    events_.log(STG_LOG_WARNING, concat(what, " can't be saved: ", describe_exception(std::current_exception()).message));
  }
}

Progress FitLoop::progress(uint64_t stage, int64_t batch, int64_t num_batches) const {
  return {stage, position_.epoch, trainer_.max_epochs, batch, num_batches, position_.step, trainer_.max_steps, shown_loss_};
}

FitResult FitLoop::result() const {
  FitResult result;
  result.steps = position_.step;
  result.epochs = position_.epoch;
  result.skipped_updates = position_.num_skipped;
  result.train_loss = loss_.epoch.weight != 0 ? loss_.epoch.mean() : epoch_loss_;
  result.validation = validation_;
  result.seconds = seconds_;
  result.step_ms_median = median(step_ms_);
  if (checkpoints_) result.checkpoint = checkpoints_->newest();
  if (config_.checkpoint && config_.checkpoint->monitor && !position_.best.empty()) {
    const RankedCheckpoint& best = position_.best.front();
    const std::filesystem::path folder = config_.checkpoint->dir / checkpoint_name(best.step);
    if (std::filesystem::is_directory(folder)) result.best = {folder, config_.checkpoint->monitor->name, best};
  }
  result.interrupted = interrupted_;
  if (!interrupted_) result.ended_by = finished();
  return result;
}

}  // namespace stratagem
