// SPDX-License-Identifier: Apache-2.0
//
// One instance of a strategy, as the loop uses it: errors are exceptions, results own what they hold, and a plugin that lacks
// train_batch is driven by the three calls that it stands for.
#pragma once

#include <stratagem/strategy.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/model.hpp"
#include "base/value.hpp"
#include "libstratagem/config/json_text.hpp"

namespace stratagem {

/// What a step gave: its outputs, and one weight per replica that ran.
struct StepOutcome {
  Tree outputs;
  std::vector<double> weights;
  double total_weight() const;
};

/// What a step is given: a batch, or the ticket of an announced one.
struct StepBatch {
  Tree batch;
  uint64_t announced = 0;
};

/// Where in the run a step stands.
struct StepPlace {
  int64_t batch_index = 0;
  int64_t global_step = 0;
};

class StrategyInstance {
 public:
  /// Creates it. `host` may be null and must outlive everything that the instance gives out. `cancel` is the flag of its calls (stg_call),
  /// `flags` are STG_CREATE_*.
  StrategyInstance(const stg_strategy_factory& factory, const Json& config, const stg_host* host,
                   const std::atomic<uint32_t>* cancel = nullptr, uint64_t flags = 0);

  /// The plugin's own table, and its instance.
  const stg_strategy_api* table() const { return table_; }
  stg_strategy* handle() const { return instance_.get(); }
  /// For what is to be saved after a run was cancelled.
  void no_more_cancelling() { cancel_ = nullptr; }

  const std::string& name() const { return name_; }
  /// With a state, that is what it begins from.
  void setup(const stg_model* model, uint64_t stage, Tree state = {});
  void teardown();
  std::vector<std::string> devices() const;
  /// All zero where the plugin has none.
  stg_status status() const;

  /// One micro-batch. With `update` it is the last before an update, whose result goes to `result`.
  StepOutcome train(StepBatch batch, StepPlace place, const stg_update_args* update, stg_update_result& result);
  /// One batch in a stage without gradients (STG_STAGE_VALIDATE, STG_STAGE_TEST or STG_STAGE_PREDICT).
  StepOutcome evaluate(StepBatch batch, StepPlace place, uint64_t stage);
  /// Whether it gains by knowing a batch before its step: on an accelerator.
  bool takes_announcements();
  /// The ticket of a batch for a step of this stage; 0 where the strategy takes none, and the batch is gone.
  uint64_t announce(Tree batch, uint64_t stage);
  /// The tree with every tensor in host memory, finished.
  Tree to_host(Tree tree);

  /// One decision of all processes (STG_DECIDE_*). A plugin that has none of it is one process: its own.
  bool decide(bool own, uint32_t mode);

  /// What a model may change in a stage without gradients: its generators and buffers. A plugin without states has nothing to keep.
  Tree side_state();
  /// Returns false where the strategy can't.
  bool put_back(Tree side_state);

  /// `flags`: STG_EXPORT_COPY, else views of this instance's memory.
  Tree export_state(uint64_t flags);
  bool can_save() const { return api_.save != nullptr; }
  void save(const std::string& folder, const Json& host_state);
  /// Loads and returns what save was given; null if the checkpoint brings none. All of the model must fit. What of the optimizer's
  /// state doesn't begins anew, and is named in `misfits`.
  Json load(const std::string& folder, std::vector<std::string>& misfits);

 private:
  StepOutcome train_in_three_calls(stg_step_args args, const stg_update_args* update, stg_update_result& result);
  template <class Function, class... Arguments>
  void call(Function* function, const char* name, Arguments... arguments) const;
  /// The same for a member that a strategy may lack where the command or the config needs it: says whose member it is.
  template <class Function, class... Arguments>
  void call_wanted(Function* function, const char* name, Arguments... arguments) const;
  /// What a call is told: the flag. Throws CANCELLED where it is set already, for plugins that don't look at it.
  stg_call call_args() const;

  std::string name_;
  const stg_strategy_api* table_;
  stg_strategy_api api_;
  const std::atomic<uint32_t>* cancel_;
  std::shared_ptr<stg_strategy> instance_;
  std::optional<bool> has_train_batch_;      // known after the first batch
  std::optional<bool> takes_announcements_;  // known once it was asked
};

}  // namespace stratagem
