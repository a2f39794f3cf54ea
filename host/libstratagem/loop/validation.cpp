// SPDX-License-Identifier: Apache-2.0
//
// The loop's validation: when it is due, and what follows from its values.
#include <algorithm>
#include <cmath>

#include "libstratagem/loop/fit.hpp"

namespace stratagem {

/// Before anything is trained: a wrong monitor, or what can't validate, is better known before the first hour than after it. Leaves no
/// trace, and counts for nothing. Returns whether it came to its end.
bool FitLoop::try_validation() {
  if (!validation_data_ || position_.validation_pending) return true;  // one that is pending is the first that a resumed run does
  const bool leaves_no_trace = strategy_.put_back(strategy_.side_state());
  if (!leaves_no_trace) {
    events_.log(STG_LOG_WARNING,
                concat("the strategy ", shown(strategy_.name()), " has no export_state or no import_state: what a ",
                       "validation draws from generators and writes to buffers is not put back after it"));
    if (resume_) return true;  // it would be another run
  }
  const int64_t wanted = resume_ && knows_monitors() ? 0 : trainer_.num_sanity_val_steps;
  const int64_t all = validation_data_->num_batches;
  std::optional<Evaluation> evaluation;
  try {
    evaluation = run_validation(wanted == no_limit ? all : std::clamp<int64_t>(wanted, 1, all));
  } catch (const Error& error) {
    // With 0 nothing but a strategy or model without validation is told.
    if (wanted != 0 || error.code == STG_UNIMPLEMENTED || (error.flags & STG_ERROR_INSTANCE_USABLE) == 0) throw;
    return true;
  }
  if (!evaluation) return false;
  if (wanted == 0) return true;
  const auto values = with_train_loss(evaluation->metrics);
  if (config_.early_stopping) monitored(config_.early_stopping->monitor, values);
  if (config_.checkpoint && config_.checkpoint->monitor) monitored(*config_.checkpoint->monitor, values);
  return true;
}

/// Whether each has been a name that validation gives, by what the run has seen so far.
bool FitLoop::knows_monitors() const {
  const auto knows = [](const Monitor& monitor, bool has_seen) { return has_seen || monitor.name == train_loss_name; };
  const StoppingState& seen = position_.stopping;
  return (!config_.early_stopping || knows(config_.early_stopping->monitor, seen.best || seen.num_misses != 0)) &&
         (!config_.checkpoint || !config_.checkpoint->monitor || knows(*config_.checkpoint->monitor, !position_.best.empty()));
}

/// Nothing where it was stopped before its end.
std::optional<Evaluation> FitLoop::run_validation(int64_t num_batches) {
  if (events_.stop_requested()) return std::nullopt;
  if (feed_) feed_->take_back();
  EvaluationData data = *validation_data_;
  data.num_batches = num_batches;
  try {
    Evaluation evaluation = validate_aside(strategy_, data, progress(STG_STAGE_VALIDATE, 0, num_batches), events_);
    return evaluation.stopped ? std::nullopt : std::optional(std::move(evaluation));
  } catch (Error& error) {
    if (error.code == STG_UNIMPLEMENTED)
      error.message += "; /data/validation needs it: leave that out, or use a strategy and a model that have it";
    throw;
  }
}

/// Between two updates of an epoch.
bool FitLoop::validation_is_due() const {
  return trainer_.val_check_interval && position_.step % *trainer_.val_check_interval == 0;
}

/// At the end of an epoch, or of the run, which is always validated.
bool FitLoop::validation_is_due_after(Ended ended) const {
  const bool is_validated = position_.validated_step == position_.step;
  const bool is_last = ended == Ended::limit || !finished().empty() || position_.epoch + 1 == trainer_.max_epochs;
  if (trainer_.val_check_interval) return !is_validated && (is_last || validation_is_due());
  const bool is_due = ended == Ended::epoch && (position_.epoch + 1) % trainer_.check_val_every_n_epoch == 0;
  return is_due || (is_last && !is_validated);
}

/// Returns whether it came to its end.
bool FitLoop::validate() {
  if (validation_data_) {
    const auto evaluation = run_validation(validation_data_->num_batches);
    if (!evaluation) return false;
    validation_ = evaluation->metrics;
    metrics_->write(position_, "validate", validation_);
  }
  judge(with_train_loss(validation_));
  position_.validated_step = position_.step;
  position_.validation_pending = false;
  tick();
  return true;
}

std::map<std::string, double> FitLoop::with_train_loss(std::map<std::string, double> values) {
  loss_.flush(0);
  values.emplace(train_loss_name, loss_.epoch.mean());
  return values;
}

/// Every process decides, and all get the same answer.
void FitLoop::judge(const std::map<std::string, double>& values) {
  if (config_.early_stopping) {
    const EarlyStoppingConfig& config = *config_.early_stopping;
    const double value = monitored(config.monitor, values);
    if (!std::isfinite(value)) {
      events_.log(STG_LOG_WARNING, concat(shown(config.monitor.name), " is ", value, " after update ", position_.step,
                                          "; early stopping takes it as no improvement"));
    }
    observe(position_.stopping, config, value);
    const bool own = !reason_to_stop(position_.stopping, config).empty();
    position_.stopping.is_others_decision = strategy_.decide(own, STG_DECIDE_ANY) && !own;
    if (const std::string reason = reason_to_stop(position_.stopping, config); !reason.empty())
      events_.log(STG_LOG_INFO, concat("stopping after update ", position_.step, ": ", reason));
  }
  if (config_.checkpoint && config_.checkpoint->monitor) {
    const double value = monitored(*config_.checkpoint->monitor, values);
    is_best_ = strategy_.decide(is_one_of_the_best(position_.best, *config_.checkpoint, value), STG_DECIDE_ALL);
    if (is_best_) insert(position_.best, *config_.checkpoint, {position_.step, value});
  }
}

/// The best so far may have been removed, or lie in another folder: then the best is chosen anew.
void FitLoop::forget_lost_checkpoints() {
  std::erase_if(position_.best, [&](const RankedCheckpoint& best) {
    if (checkpoints_->has(best.step)) return false;
    events_.log(STG_LOG_WARNING, concat("one of the best checkpoints so far, ", checkpoint_name(best.step), " (",
                                        config_.checkpoint->monitor->name, " ", shown(best.value), "), ",
                                        checkpoints_->why_not(best.step), "; the best are chosen without it"));
    return true;
  });
}

}  // namespace stratagem
