// SPDX-License-Identifier: Apache-2.0
//
// One run, from the config to the result: what the C API hands out. Opening it does everything that can go wrong before training
// starts, in the order in which a user can mend it: config, plugins and their options, data, devices, checkpoint.
#pragma once

#include <stratagem/host.h>

#include <memory>
#include <optional>
#include <string>

#include "libstratagem/config/config.hpp"
#include "libstratagem/data/dataset.hpp"
#include "libstratagem/loop/events.hpp"
#include "libstratagem/loop/fit.hpp"
#include "libstratagem/loop/instance.hpp"
#include "libstratagem/mailbox.hpp"
#include "libstratagem/plugins/loader.hpp"

namespace stratagem {

/// The services that plugins get: the log, at present.
class HostServices {
 public:
  explicit HostServices(std::function<void(uint32_t, const std::string&)> log);
  const stg_host* table() const { return &table_; }

 private:
  std::function<void(uint32_t, const std::string&)> log_;
  stg_host table_{};
};

struct SessionRequest {
  ConfigText config;
  Command command = Command::fit;
  std::string checkpoint;  // absolute or relative to the working directory; empty: none
  std::string output;      // the same; where predictions go
  Events events;           // `requests` outlives the session
  bool own_loop = false;
  bool caller_thread_only = false;
  std::shared_ptr<const stg_model> model;  // the host's own; may be null
  DataSources sources;
};

class Session {
 public:
  explicit Session(SessionRequest request);

  /// Runs once and returns the result as JSON; of a fit, what `step` has left.
  Json run();
  /// The one that is set up now.
  const StrategyInstance& strategy() const { return *strategy_; }
  /// Where the run begins or goes on.
  Progress beginning() const;
  /// So many updates of a fit. Returns whether it is over.
  bool step(uint64_t num_updates);

  /// Exchanges the strategy now; on an error the old one goes on.
  void swap(const Json& strategy);
  /// The same before the next update, from any thread.
  void request_swap(Json strategy) const;

 private:
  void load_plugins(const ConfigText& text);
  void check_host_parts(Problems& problems) const;
  void read_data();
  void check_limits() const;
  /// Of the data set that the command evaluates; fit validates.
  const std::optional<DatasetConfig>& evaluation_config() const;
  const BatchLimit& evaluation_limit() const;
  EvaluationData evaluation_data() const;
  StrategyInstance create_strategy(const Config& config, const stg_strategy_factory& factory) const;
  void require_save(const StrategyInstance& strategy) const;
  std::shared_ptr<const stg_model> create_model() const;
  void set_up(StrategyInstance& strategy, const stg_model* model, Tree state) const;
  // What goes on between two updates: in swap.cpp.
  FitLoop& begun_loop();
  void advance();
  void swap_if_asked();
  void end_updates();
  void warn_of_planned_swaps() const;
  void require_fit() const;
  const stg_strategy_factory& wanted_strategy(const Json& strategy, Config& config) const;
  std::optional<Error> try_swap(const Json& strategy);
  void require_no_gradients() const;
  void exchange_strategy(const Json& strategy);
  void exchange_through_host(StrategyInstance& next, const stg_model* model, const Error& reason);
  void reload();
  void load_checkpoint(const std::string& given);
  Json load_first_whole(const std::vector<std::filesystem::path>& candidates);
  void prepare_outputs() const;
  void prepare_predictions(const std::string& output);
  Json fit();
  Json evaluate_once();
  Json predict_once();
  void log(uint32_t level, const std::string& message) const;

  Command command_;
  Events events_;
  bool own_loop_;
  bool caller_thread_only_;
  DataSources sources_;
  ConfigText given_;  // but its JSON
  Config config_;
  std::optional<Dataset> train_, evaluation_;
  // Services and model outlive the instance that was made with them.
  HostServices services_;
  const stg_strategy_factory* strategy_factory_ = nullptr;
  const stg_model_factory* model_factory_ = nullptr;
  std::shared_ptr<const stg_model> model_;
  std::optional<StrategyInstance> strategy_;
  std::filesystem::path checkpoint_, output_;
  std::optional<Resume> resume_;
  std::optional<FitLoop> loop_;
  bool has_run_ = false;
};

/// The kinds of device that a strategy can use: "cpu", "cuda".
std::vector<std::string> device_kinds(const stg_strategy_factory& factory);
/// Loads the plugin that a part of the config names, and its factory.
const stg_strategy_factory& load_strategy(const LibraryConfig& config, const Catalogue& catalogue);
const stg_model_factory& load_model(const LibraryConfig& config, const Catalogue& catalogue);

/// A text that is to stand as a config's "strategy", checked as far as that goes without plugins.
Json strategy_of(const std::string& text);

/// Checks the options of a strategy or a model (`key`) by its own schema.
void check_options(const char* key, stg_string name, stg_string schema, const Json& options, Problems& problems);
/// Adds a problem for a name that is none of ours, where the strategy (null: none was found) knows no others.
void check_accelerator_name(const stg_strategy_factory* factory, const Json& strategy, Problems& problems);
/// Throws UNAVAILABLE where the strategy can't use the accelerator that it is to have.
void check_accelerator(const stg_strategy_factory& factory, const Json& strategy);

}  // namespace stratagem
