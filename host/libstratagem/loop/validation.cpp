// SPDX-License-Identifier: Apache-2.0
//
// The loop's validation: when it is due, and what follows from its values.
#include <cmath>

#include "libstratagem/loop/fit.hpp"

namespace stratagem {

/// Before a new run: a wrong monitor, or a model that can't validate, is better known before the first hour than after it. Leaves no
/// trace, and counts for nothing. Returns whether it came to its end.
bool FitLoop::try_validation() {
  const int64_t wanted = trainer_.num_sanity_val_steps;
  if (!validation_data_ || wanted == 0) return true;
  const int64_t all = validation_data_->num_batches;
  const auto evaluation = run_validation(wanted == no_limit ? all : std::min(wanted, all));
  if (!evaluation) return false;
  const auto values = with_train_loss(evaluation->metrics);
  if (config_.early_stopping) monitored(config_.early_stopping->monitor, values);
  if (config_.checkpoint && config_.checkpoint->monitor) monitored(*config_.checkpoint->monitor, values);
  return true;
}

/// Nothing where it was stopped before its end.
std::optional<Evaluation> FitLoop::run_validation(int64_t num_batches) {
  if (events_.stop_requested()) return std::nullopt;
  EvaluationData data = *validation_data_;
  data.num_batches = num_batches;
  const auto go_on = [&](int64_t done, int64_t total) {
    report(STG_STAGE_VALIDATE, done, total);
    return !events_.stop_requested();
  };
  Evaluation evaluation = validate_aside(strategy_, data, position_.step, go_on);
  return evaluation.stopped ? std::nullopt : std::optional(std::move(evaluation));
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
                                        config_.checkpoint->monitor->name, " ", shown(best.value), "), is not in ",
                                        config_.checkpoint->dir.string(), "; the best are chosen without it"));
    return true;
  });
}

}  // namespace stratagem
