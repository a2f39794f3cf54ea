// SPDX-License-Identifier: Apache-2.0
//
// The config as the host uses it: the JSON, checked, and turned into structs with every default filled in and every path absolute.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "libstratagem/config/json_text.hpp"
#include "libstratagem/config/problems.hpp"

namespace stratagem {

/// An array in a file: in one of several arrays by its name, in a CSV file by its columns.
struct ArrayConfig {
  std::filesystem::path path;
  std::optional<std::string> name;
  std::vector<std::string> columns;
};

struct DatasetConfig {
  std::string source;  // of the host's own; else format and files
  std::string format;
  ArrayConfig inputs;
  std::optional<ArrayConfig> targets;
  int64_t batch_size = 1;
  bool shuffle = false;
  std::optional<int64_t> limit;
};

struct SchedulerConfig {
  std::string name = "constant";
  int64_t warmup_steps = 0;
  int64_t step_size = 1;
  double gamma = 0.1;
  double min_lr = 0;
  double pct_start = 0.3;
  double div_factor = 25;
  double final_div_factor = 1e4;
  std::optional<int64_t> total_steps;
};

inline constexpr int64_t no_limit = -1;

/// How many batches of those that there are: a number, or a share of them.
struct BatchLimit {
  std::optional<int64_t> count;
  double share = 1;

  /// A share is rounded down: it may be none.
  int64_t of(int64_t num_batches) const;
};

/// The mean loss of the epoch so far, which can be watched beside the metrics of validation.
inline constexpr const char* train_loss_name = "train_loss";

/// A value that is watched, and which of two is better.
struct Monitor {
  std::string name;
  bool is_max = false;
  std::string pointer;  // the key that names it

  bool is_better(double value, double than) const { return is_max ? value > than : value < than; }
};

struct EarlyStoppingConfig {
  Monitor monitor;
  int64_t patience = 3;
  double min_delta = 0;
  std::optional<double> stopping_threshold;
};

struct TrainerConfig {
  int64_t max_epochs = 1;
  int64_t max_steps = no_limit;
  double gradient_clip_val = 0;
  std::string gradient_clip_algorithm = "norm";
  int64_t accumulate_grad_batches = 1;
  int64_t log_every_n_steps = 50;
  std::optional<double> max_time_s;
  int64_t num_sanity_val_steps = 2;
  std::optional<int64_t> val_check_interval;
  int64_t check_val_every_n_epoch = 1;
  BatchLimit limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches;
  bool overfits = false;  // overfit_batches: validation is on the batches of training
};

struct CheckpointConfig {
  std::filesystem::path dir;
  std::optional<int64_t> every_n_steps;
  std::optional<int64_t> keep_last;
  std::optional<Monitor> monitor;
  int64_t save_top_k = 1;
};

/// A strategy or a model: a name to look for, a file, or both.
struct LibraryConfig {
  std::string name;
  std::optional<std::filesystem::path> path;
  Json options = Json::object();
  std::string pointer;   // the key that says where it is
  bool is_host = false;  // a model that the program hands over
};

/// A strategy that takes the place of the one before.
struct SwapConfig {
  int64_t at_step = 0;  // after so many updates
  Json strategy;        // as "strategy" is given
};

struct Config {
  Json json;           // as given, overrides applied, nulls dropped; "strategy" is the one in force
  Json own_strategy;   // "strategy" as given
  std::string source;  // names it in messages: the file's absolute path
  std::vector<std::filesystem::path> plugin_path;
  LibraryConfig strategy;
  std::vector<SwapConfig> swaps;
  LibraryConfig model;
  uint64_t seed = 0;
  double lr = 0;
  SchedulerConfig scheduler;
  TrainerConfig trainer;
  std::optional<EarlyStoppingConfig> early_stopping;
  std::optional<DatasetConfig> train, validation, test, predict;
  std::optional<CheckpointConfig> checkpoint;
  std::optional<std::filesystem::path> metrics;
};

/// A config's text, not yet checked: which folder its paths are relative to, and what to call it.
struct ConfigText {
  Json json;
  std::filesystem::path folder;
  std::string source;
  std::optional<std::filesystem::path> file = {};  // what it was read from, and what was set on top
  std::vector<std::string> overrides = {};
};
ConfigText read_config_file(const std::filesystem::path& file, const std::vector<std::string>& overrides);
ConfigText read_config_text(const std::string& text, const std::filesystem::path& folder,
                            const std::vector<std::string>& overrides);

/// The config's JSON Schema: abi/config.schema.json, part of the library.
const std::string& config_schema_text();

/// What a config is used for: it decides which parts must be there.
enum class Command { fit, validate, test, predict };

/// Checks all that can be checked without plugins and returns what could be read; look at it only where `problems` stays empty. With
/// `own_loop`, the host's, what only our loop needs may be missing, and data is not looked at.
Config check_config(const ConfigText& text, Command command, Problems& problems, bool own_loop = false);

/// Checks what is to stand as "strategy".
LibraryConfig check_strategy(const Json& strategy, const std::filesystem::path& folder, Problems& problems);

/// What `create` of a strategy is given.
Json strategy_config(const Config& config);

/// What `create` says about it: a message that begins with a pointer into what it was given gets the config's.
std::string with_config_pointer(const std::string& message);

}  // namespace stratagem
