// SPDX-License-Identifier: Apache-2.0
//
// The training loop.
//
//   before anything is trained: a few batches of validation, to see that it works and gives what is monitored
//   until the run's limits are reached, or its early stopping ends it:
//     one epoch of updates, each of up to accumulate_grad_batches micro-batches; the last window of an epoch may be shorter
//   after each update: a metrics line, validation and a checkpoint where they are due, and a stop where one was asked for
//   validation at the end of the run
//
// It runs in steps, so that whoever drives it can do something between two updates: exchange the strategy, above all.
//
// A checkpoint that falls on a validation is written after it, so that a resume doesn't repeat it. After an error
// that leaves the strategy usable, one is written as of the last update: the weights are good, whatever was wrong with a batch.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "libstratagem/config/config.hpp"
#include "libstratagem/data/dataset.hpp"
#include "libstratagem/loop/checkpoints.hpp"
#include "libstratagem/loop/evaluate.hpp"
#include "libstratagem/loop/events.hpp"
#include "libstratagem/loop/feed.hpp"
#include "libstratagem/loop/instance.hpp"
#include "libstratagem/loop/metrics.hpp"
#include "libstratagem/loop/outputs.hpp"
#include "libstratagem/loop/position.hpp"

namespace stratagem {

struct FitResult {
  int64_t steps = 0;
  int64_t epochs = 0;  // completed
  int64_t skipped_updates = 0;
  double train_loss = 0;  // mean over the last epoch's samples
  std::map<std::string, double> validation;
  double seconds = 0;         // of this process, data and validation included
  double step_ms_median = 0;  // of the last 4096; NaN without an update
  std::optional<std::filesystem::path> checkpoint;
  struct Best {
    std::filesystem::path checkpoint;
    std::string monitor;
    RankedCheckpoint ranked;
  };
  std::optional<Best> best;
  bool interrupted = false;
  std::string ended_by;       // the limit, or the early stopping; nothing for a run that was interrupted
  std::string nothing_to_do;  // why, for a run that was finished before it was resumed
};

/// Where a run that is resumed stands, and which folder it was read from.
struct Resume {
  Position position;
  std::filesystem::path checkpoint;
};

class FitLoop {
 public:
  /// The strategy is set up, and has loaded the checkpoint of `resume`.
  FitLoop(const Config& config, StrategyInstance& strategy, const Dataset& train, const Dataset* validation,
          const std::optional<Resume>& resume, const Events& events);

  /// The sanity validation. First of all, once.
  void begin();
  /// One update (or one that is skipped) with what falls after it. Where a resumed run has a validation left, that alone.
  void advance();
  bool is_over() const { return has_failed_ || !nothing_to_do_.empty() || interrupted_ || !finished().empty(); }
  /// The last checkpoint, where there is something to save. After the run is over.
  void save_last();
  /// The same, and what came of it all. Once.
  FitResult finish();

  int64_t step() const { return position_.step; }
  /// Whether `advance` begins with an update.
  bool is_before_update() const { return !position_.validation_pending; }
  /// Between two advances: reads what the old strategy has computed and nobody has read yet.
  void before_swap();
  /// It has been tried. `error`: null, or why the old one goes on.
  void after_swap(const Json& strategy, double seconds, const Error* error);
  /// Of the config's swaps, whichever way they went.
  int64_t last_planned_swap() const { return position_.planned_swap; }
  void note_planned_swap(int64_t at_step);
  /// The strategy is lost: the run is over.
  void fail() { has_failed_ = true; }
  bool has_failed() const { return has_failed_; }

 private:
  enum class Ended { epoch, limit, stop };

  template <class Body>
  void or_save(Body body);
  void open_epoch();
  std::optional<Ended> train_window();
  bool update();
  stg_update_args update_args() const;
  void note_step(double ms);
  void after_update();
  void finish_epoch(Ended ended);
  void tick();
  // Validation and what follows from it: in validation.cpp.
  bool try_validation();
  bool knows_monitors() const;
  std::optional<Evaluation> run_validation(int64_t num_batches);
  bool validation_is_due() const;
  bool validation_is_due_after(Ended ended) const;
  bool validate();
  std::map<std::string, double> with_train_loss(std::map<std::string, double> values);
  void judge(const std::map<std::string, double>& values);
  void forget_lost_checkpoints();
  void save_if_due();
  bool save(bool for_being_best = false);
  void note_good();
  void save_after(const Error& error);
  std::string finished() const;
  Progress progress(uint64_t stage, int64_t batch, int64_t num_batches) const;
  void count_skipped(uint64_t outcome);
  FitResult result() const;

  const Config& config_;
  const TrainerConfig& trainer_;
  StrategyInstance& strategy_;
  const Dataset& train_;
  std::optional<EvaluationData> validation_data_;
  std::optional<Resume> resume_;
  const Events& events_;

  Position position_;
  TrainingLoss loss_;
  std::optional<BatchFeed> feed_;  // of the epoch that goes on
  std::optional<MetricsFile> metrics_;
  std::optional<Checkpoints> checkpoints_;
  Json saved_;     // the state that was last saved, or tried to be: the same one is not written twice
  Position good_;  // where the weights stand: of the last update, or the end of an epoch
  size_t num_good_losses_ = 0;
  int64_t total_updates_;
  size_t window_ = 0;  // micro-batches of the last update
  stg_update_result last_update_{};
  int64_t num_skipped_in_a_row_ = 0;
  double shown_loss_;
  double epoch_loss_;
  std::map<std::string, double> validation_;
  bool is_best_ = false;  // the weights, by the validation after the last update
  std::chrono::steady_clock::time_point begin_{};
  double seconds_before_ = 0;    // of the run's earlier processes
  std::vector<double> step_ms_;  // a ring of the last ones
  uint64_t num_steps_here_ = 0;
  bool interrupted_ = false;
  bool has_nothing_to_save_ = false;
  bool has_failed_ = false;
  std::string nothing_to_do_;
  double seconds_ = 0;
};

}  // namespace stratagem
