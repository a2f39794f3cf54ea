// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/config/config.hpp"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

#include "base/error.hpp"
#include "base/json.hpp"
#include "libstratagem/config/overrides.hpp"
#include "libstratagem/config/paths.hpp"

namespace stratagem {
namespace fs = std::filesystem;
namespace {

/// Reads members of one object of a config. An absent one leaves the default; so does one of a wrong type, which the schema has
/// reported: the rest is read nevertheless, so that all that is wrong is told at once.
class Section {
 public:
  explicit Section(const Json& object) : json_(object) {}
  Section(const Section& parent, const char* key) : json_(parent.has(key) ? parent.json_.at(key) : empty()) {}

  bool has(const char* key) const { return json_.is_object() && json_.contains(key); }

  template <class T>
  void read(const char* key, T& out) const {
    try {
      if (has(key)) out = json_.at(key).get<T>();
    } catch (const Json::exception&) {
    }
  }
  template <class T>
  void read(const char* key, std::optional<T>& out) const {
    T value{};
    if (!has(key)) return;
    read(key, value);
    out = std::move(value);
  }

 private:
  static const Json& empty() {
    static const Json object = Json::object();
    return object;
  }
  const Json& json_;
};

class Reader {
 public:
  Reader(const ConfigText& text, Command command, Problems& problems, bool own_loop)
      : text_(text), root_(text.json), command_(command), own_loop_(own_loop), problems_(problems) {}

  Config read() {
    Config config;
    config.json = text_.json;
    config.source = text_.source;
    read_plugin_path(config);
    root_.read("strategy", config.own_strategy);
    config.strategy = read_strategy();
    read_swaps(config);
    config.model = read_model();
    root_.read("seed", config.seed);
    read_optimizer(config);
    read_scheduler(config);
    read_trainer(config);
    read_data(config);
    read_outputs(config);
    read_early_stopping(config);
    apply_overfit_batches(config);
    return config;
  }

  LibraryConfig read_strategy() { return read_library("strategy"); }

 private:
  fs::path path(const std::string& value, const std::string& pointer) {
    return config_path(value, text_.folder, pointer, problems_);
  }

  void read_plugin_path(Config& config) {
    std::vector<std::string> folders;
    root_.read("plugin_path", folders);
    for (const std::string& folder : folders) {
      config.plugin_path.push_back(path(folder, pointer_to("/plugin_path", std::to_string(config.plugin_path.size()))));
    }
  }

  LibraryConfig read_library(const std::string& key) {
    const Section section(root_, key.c_str());
    LibraryConfig library;
    section.read("name", library.name);
    section.read("options", library.options);
    std::optional<std::string> file;
    section.read("path", file);
    library.pointer = concat("/", key, file ? "/path" : "/name");
    if (file) {
      library.path = path(*file, library.pointer);
    } else if (library.name.find('/') != std::string::npos) {
      library.path = path(std::exchange(library.name, {}), library.pointer);
    }
    return library;
  }

  void read_swaps(Config& config) {
    std::vector<Json> swaps;
    root_.read("swap", swaps);
    for (const Json& swap : swaps) {
      SwapConfig read;
      const Section section(swap);
      section.read("at_step", read.at_step);
      section.read("strategy", read.strategy);
      const std::string pointer = concat("/swap/", config.swaps.size(), "/at_step");
      if (!config.swaps.empty() && read.at_step <= config.swaps.back().at_step) {
        problems_.add(pointer, concat(read.at_step, " must be after the swap before it, at ", config.swaps.back().at_step));
      }
      config.swaps.push_back(std::move(read));
    }
  }

  LibraryConfig read_model() {
    const Section section(root_, "model");
    std::string kind;
    section.read("kind", kind);
    if (kind == "host") return read_host_model(section);
    LibraryConfig model = read_library("model");
    if (kind != "torchscript") {
      if (model.name.empty() && !model.path) problems_.add("/model/name", "this key or /model/path is required: which model");
      return model;
    }
    // The plugin of that name is given the file.
    if (section.has("name"))
      problems_.add("/model/name", "belongs to the kind \"library\"; a TorchScript file is named by /model/path");
    if (model.path) {
      require_readable(*model.path, "/model/path", problems_);
      if (model.options.is_object()) model.options["path"] = model.path->string();
    } else if (!section.has("name")) {
      problems_.add("/model/path", "this key is required: the TorchScript file");
    }
    model.name = kind;
    model.path.reset();
    model.pointer = "/model/kind";
    return model;
  }

  LibraryConfig read_host_model(const Section& section) {
    for (const char* key : {"name", "path", "options"}) {
      if (section.has(key))
        problems_.add(concat("/model/", key), "belongs to a model that is loaded, not to the kind \"host\", the program's own");
    }
    LibraryConfig model;
    model.pointer = "/model/kind";
    model.is_host = true;
    return model;
  }

  /// Whether our loop trains.
  bool fits() const { return command_ == Command::fit && !own_loop_; }

  void read_optimizer(Config& config) {
    if (root_.has("optimizer")) {
      Section(root_, "optimizer").read("lr", config.lr);
    } else if (fits()) {
      problems_.add("/optimizer", R"(this key is required to fit, as in {"name": "sgd", "lr": 0.01})");
    }
  }

  void read_scheduler(Config& config) {
    const Section section(root_, "scheduler");
    SchedulerConfig& scheduler = config.scheduler;
    section.read("name", scheduler.name);
    section.read("warmup_steps", scheduler.warmup_steps);
    section.read("step_size", scheduler.step_size);
    section.read("gamma", scheduler.gamma);
    section.read("min_lr", scheduler.min_lr);
    section.read("total_steps", scheduler.total_steps);
    section.read("pct_start", scheduler.pct_start);
    section.read("div_factor", scheduler.div_factor);
    section.read("final_div_factor", scheduler.final_div_factor);
    if (scheduler.name == "step" && !section.has("step_size")) {
      problems_.add("/scheduler/step_size", "this key, a whole number, is required by the scheduler \"step\"");
    }
    const std::string cosine = "cosine", step = "step", one_cycle = "one_cycle";
    const auto belongs = [&](const char* key, std::initializer_list<std::string> to) {
      if (section.has(key) && std::find(to.begin(), to.end(), scheduler.name) == to.end()) {
        problems_.add(concat("/scheduler/", key),
                      concat("belongs to the scheduler \"", join(to, "\" or \""), "\", not to \"", scheduler.name, "\""));
      }
    };
    belongs("step_size", {step});
    belongs("gamma", {step});
    belongs("min_lr", {cosine});
    belongs("total_steps", {cosine, one_cycle});
    for (const char* key : {"pct_start", "div_factor", "final_div_factor"}) belongs(key, {one_cycle});
  }

  void read_trainer(Config& config) {
    const Section section(root_, "trainer");
    TrainerConfig& trainer = config.trainer;
    section.read("max_steps", trainer.max_steps);
    // With max_steps or max_time alone, that is the limit.
    if (trainer.max_steps != no_limit || section.has("max_time")) trainer.max_epochs = no_limit;
    section.read("max_epochs", trainer.max_epochs);
    section.read("gradient_clip_val", trainer.gradient_clip_val);
    section.read("gradient_clip_algorithm", trainer.gradient_clip_algorithm);
    section.read("accumulate_grad_batches", trainer.accumulate_grad_batches);
    section.read("log_every_n_steps", trainer.log_every_n_steps);
    read_max_time(section, trainer.max_time_s);
    if (fits() && trainer.max_epochs == no_limit && trainer.max_steps == no_limit && !section.has("max_time")) {
      problems_.add("/trainer/max_epochs",
                    "-1 here, and neither /trainer/max_steps nor /trainer/max_time: training would never end; set one of them");
    }
    const SchedulerConfig& scheduler = config.scheduler;
    const bool needs_length = (scheduler.name == "cosine" || scheduler.name == "one_cycle") && !scheduler.total_steps;
    if (fits() && needs_length && section.has("max_time") && trainer.max_epochs == no_limit && trainer.max_steps == no_limit) {
      problems_.add("/scheduler/total_steps",
                    concat("the scheduler \"", scheduler.name,
                           "\" needs the run's length in updates, which /trainer/max_time doesn't tell; give it, or set "
                           "/trainer/max_steps or /trainer/max_epochs"));
    }
    section.read("num_sanity_val_steps", trainer.num_sanity_val_steps);
    section.read("val_check_interval", trainer.val_check_interval);
    section.read("check_val_every_n_epoch", trainer.check_val_every_n_epoch);
    if (section.has("val_check_interval") && section.has("check_val_every_n_epoch")) {
      problems_.add("/trainer/check_val_every_n_epoch",
                    "validation is counted in epochs by this, in updates by /trainer/val_check_interval; give one of them");
    }
    read_limit(section, "limit_train_batches", trainer.limit_train_batches);
    read_limit(section, "limit_val_batches", trainer.limit_val_batches);
    read_limit(section, "limit_test_batches", trainer.limit_test_batches);
    read_limit(section, "limit_predict_batches", trainer.limit_predict_batches);
  }

  // Seconds, or "DD:HH:MM:SS".
  void read_max_time(const Section& trainer, std::optional<double>& seconds) {
    Json given;
    trainer.read("max_time", given);
    if (given.is_number()) seconds = given.get<double>();
    if (!given.is_string()) return;
    std::istringstream text(given.get<std::string>());
    double total = 0;
    bool is_over = false;
    for (const double per_unit : {0.0, 24.0, 60.0, 60.0}) {
      std::string unit;
      std::getline(text, unit, ':');
      if (unit.empty() || unit.find_first_not_of("0123456789") != std::string::npos) return;  // the schema has told
      is_over |= per_unit != 0 && std::stod(unit) >= per_unit;
      total = total * per_unit + std::stod(unit);
    }
    if (is_over) {
      problems_.add("/trainer/max_time",
                    concat(shown(given), " has more than 23 hours, 59 minutes or 59 seconds in their places; ",
                           "carry them over, or give the time in seconds: ", shown(total)));
    } else if (total == 0) {
      problems_.add("/trainer/max_time", concat(shown(given), " is no time at all; leave it out to have no limit"));
    }
    seconds = total;
  }

  static void read_limit(const Section& trainer, const char* key, BatchLimit& limit) {
    Json given;
    trainer.read(key, given);
    if (given.is_number_integer()) {
      limit.count = given.get<int64_t>();
    } else if (given.is_number()) {
      limit.share = given.get<double>();
    }
  }

  void apply_overfit_batches(Config& config) {
    const Section section(root_, "trainer");
    if (!section.has("overfit_batches")) return;
    for (const char* key : {"limit_train_batches", "limit_val_batches"}) {
      if (section.has(key))
        problems_.add(concat("/trainer/", key), "/trainer/overfit_batches says which batches are used; give one of them");
    }
    if (!fits() || !config.train) return;
    TrainerConfig& trainer = config.trainer;
    trainer.overfits = true;
    read_limit(section, "overfit_batches", trainer.limit_train_batches);
    trainer.limit_val_batches = trainer.limit_train_batches;
    config.train->shuffle = false;
    if (config.validation) config.validation = config.train;
  }

  std::optional<Monitor> read_monitor(const Section& section, const char* owner, const Config& config) {
    Monitor monitor;
    section.read("monitor", monitor.name);
    if (monitor.name.empty()) return std::nullopt;
    std::string mode = "min";
    section.read("mode", mode);
    monitor.is_max = mode == "max";
    monitor.pointer = concat("/", owner, "/monitor");
    if (fits() && !config.validation && monitor.name != train_loss_name) {
      problems_.add(monitor.pointer, concat(shown(monitor.name),
                                            " must be a metric of validation, and there is no "
                                            "/data/validation; without it \"",
                                            train_loss_name, "\" can be monitored"));
    }
    return monitor;
  }

  void read_early_stopping(Config& config) {
    if (!root_.has("early_stopping")) return;
    const Section section(root_, "early_stopping");
    EarlyStoppingConfig stopping;
    const auto monitor = read_monitor(section, "early_stopping", config);
    if (!monitor) return;  // the schema has told
    stopping.monitor = *monitor;
    section.read("patience", stopping.patience);
    section.read("min_delta", stopping.min_delta);
    section.read("stopping_threshold", stopping.stopping_threshold);
    config.early_stopping = stopping;
  }

  std::optional<DatasetConfig> read_dataset(const char* key, const fs::path& root, bool used) {
    const Section data(root_, "data");
    if (!data.has(key)) return std::nullopt;
    const Section section(data, key);
    const std::string pointer = concat("/data/", key);
    DatasetConfig dataset;
    section.read("source", dataset.source);
    section.read("format", dataset.format);
    section.read("batch_size", dataset.batch_size);
    section.read("shuffle", dataset.shuffle);
    section.read("limit", dataset.limit);
    const bool has_source = section.has("source");
    for (const char* part : {"format", "inputs", "targets"}) {
      if (has_source && section.has(part))
        problems_.add(concat(pointer, "/", part),
                      concat("belongs to a data set in files, not to a source (", pointer, "/source)"));
      if (!has_source && !section.has(part) && std::string(part) != "targets")
        problems_.add(concat(pointer, "/", part),
                      "this key is required of a data set in files; one of the program's own has \"source\"");
    }
    if (has_source) return dataset;
    dataset.inputs = read_array(section, "inputs", pointer + "/inputs", dataset.format, root, used);
    if (section.has("targets"))
      dataset.targets = read_array(section, "targets", pointer + "/targets", dataset.format, root, used);
    return dataset;
  }

  // "x.npy" or {"path": "x.npz", "name": "x"}.
  ArrayConfig read_array(const Section& dataset, const char* key, std::string pointer, const std::string& format,
                         const fs::path& root, bool used) {
    const Section section(dataset, key);
    ArrayConfig array;
    std::string file;
    dataset.read(key, file);
    section.read("name", array.name);
    section.read("columns", array.columns);
    const auto belongs = [&](const char* part, bool fits, const char* to) {
      if (section.has(part) && !fits) problems_.add(concat(pointer, "/", part), concat("belongs to ", to, ", not to ", format));
    };
    belongs("name", format == "npz" || format == "safetensors", "npz and safetensors");
    belongs("columns", format == "csv", "csv");
    if (section.has("path")) {
      section.read("path", file);
      pointer += "/path";
    }
    if (file.empty()) return array;  // the schema has told
    array.path = config_path(file, root, pointer, problems_);
    if (used) require_readable(array.path, pointer, problems_);
    return array;
  }

  void read_data(Config& config) {
    const Section data(root_, "data");
    std::string folder = ".";
    data.read("root", folder);
    const fs::path root = path(folder, "/data/root");
    const bool fit = fits();
    const auto reads = [&](Command command) { return command_ == command && !own_loop_; };
    config.train = read_dataset("train", root, fit);
    // With overfit_batches validation is on the batches of training, and its own file isn't asked for.
    const bool validates = fit ? !Section(root_, "trainer").has("overfit_batches") : reads(Command::validate);
    config.validation = read_dataset("validation", root, validates);
    config.test = read_dataset("test", root, reads(Command::test));
    config.predict = read_dataset("predict", root, reads(Command::predict));
    const auto require = [&](const char* key, const std::optional<DatasetConfig>& dataset, const char* command) {
      if (!dataset) problems_.add(concat("/data/", key), concat("this key is required to ", command));
    };
    if (fit) require("train", config.train, "fit");
    if (reads(Command::validate)) require("validation", config.validation, "validate");
    if (reads(Command::test)) require("test", config.test, "test");
    if (reads(Command::predict)) require("predict", config.predict, "predict");
  }

  void read_outputs(Config& config) {
    if (root_.has("checkpoint")) {
      const Section section(root_, "checkpoint");
      CheckpointConfig checkpoint;
      std::string dir;
      section.read("dir", dir);
      checkpoint.dir = path(dir, "/checkpoint/dir");
      section.read("every_n_steps", checkpoint.every_n_steps);
      section.read("keep_last", checkpoint.keep_last);
      section.read("save_top_k", checkpoint.save_top_k);
      checkpoint.monitor = read_monitor(section, "checkpoint", config);
      for (const char* key : {"mode", "save_top_k"}) {
        if (section.has(key) && !section.has("monitor"))
          problems_.add(concat("/checkpoint/", key), "belongs to /checkpoint/monitor, which is not given");
      }
      config.checkpoint = checkpoint;
    }
    if (root_.has("metrics")) {
      std::string file;
      Section(root_, "metrics").read("path", file);
      config.metrics = path(file, "/metrics/path");
    }
  }

  const ConfigText& text_;
  Section root_;
  Command command_;
  bool own_loop_;
  Problems& problems_;
};

void apply(ConfigText& text, const std::vector<std::string>& overrides) {
  if (!text.json.is_object()) throw invalid_argument(text.source, ": a config is a JSON object, not ", shown(text.json));
  apply_overrides(text.json, overrides);
  drop_nulls(text.json);
}

}  // namespace

int64_t BatchLimit::of(int64_t num_batches) const {
  if (count) return std::min(*count, num_batches);
  // 0.29 * 100 is 28.999...96.
  return static_cast<int64_t>(share * static_cast<double>(num_batches) * (1 + 4 * std::numeric_limits<double>::epsilon()));
}

ConfigText read_config_file(const fs::path& file, const std::vector<std::string>& overrides) {
  const fs::path absolute = fs::absolute(file).lexically_normal();
  Problems problems;
  require_readable(absolute, "", problems);
  if (!problems.empty()) throw not_found("config: ", problems.all().front().text);
  std::ifstream in(absolute, std::ios::binary);
  std::ostringstream content;
  content << in.rdbuf();
  ConfigText text{parse_json(content.str(), absolute.string(), {.allow_comments = true}), absolute.parent_path(),
                  absolute.string(), absolute, overrides};
  apply(text, overrides);
  return text;
}

ConfigText read_config_text(const std::string& text, const fs::path& folder, const std::vector<std::string>& overrides) {
  ConfigText result{parse_json(text, "config", {.allow_comments = true}), fs::absolute(folder).lexically_normal(), "config"};
  apply(result, overrides);
  return result;
}

Config check_config(const ConfigText& text, Command command, Problems& problems, bool own_loop) {
  static const Json schema = Json::parse(config_schema_text());
  check_schema(schema, text.json, "", "", problems);
  return Reader(text, command, problems, own_loop).read();
}

LibraryConfig check_strategy(const Json& strategy, const fs::path& folder, Problems& problems) {
  static const Json schema = [] {
    Json lone = Json::parse(config_schema_text());
    lone["required"] = {"strategy"};
    return lone;
  }();
  const ConfigText text{{{"strategy", strategy}}, folder, ""};
  check_schema(schema, text.json, "", "", problems);
  return Reader(text, Command::fit, problems, false).read_strategy();
}

Json strategy_config(const Config& config) {
  Json result = Json::object();
  for (const char* key : {"precision", "optimizer", "seed", "deterministic", "threads"}) {
    if (config.json.contains(key)) result[key] = config.json[key];
  }
  const Json& strategy = config.json["strategy"];
  for (const char* key : {"accelerator", "devices", "options"}) {
    if (strategy.contains(key)) result[key] = strategy[key];
  }
  return result;
}

std::string with_config_pointer(const std::string& message) {
  for (const char* key : {"/accelerator", "/devices", "/options"}) {
    if (message.rfind(key, 0) == 0) return "/strategy" + message;
  }
  return message;
}

}  // namespace stratagem
