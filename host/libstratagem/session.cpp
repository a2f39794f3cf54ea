// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/session.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/disk.hpp"
#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "base/gpu.hpp"
#include "base/structs.hpp"
#include "libstratagem/config/overwrites.hpp"
#include "libstratagem/loop/evaluate.hpp"
#include "libstratagem/loop/schedule.hpp"

namespace stratagem {
namespace fs = std::filesystem;
namespace {

uint64_t stage_of(Command command) {
  switch (command) {
    case Command::fit:
      return STG_STAGE_FIT;
    case Command::validate:
      return STG_STAGE_VALIDATE;
    case Command::test:
      return STG_STAGE_TEST;
    case Command::predict:
      return STG_STAGE_PREDICT;
  }
  return STG_STAGE_FIT;
}

fs::path file_of(Offer offer, const LibraryConfig& config, const Catalogue& catalogue) {
  return config.path ? *config.path : catalogue.find(offer, config.name).path;
}

const Plugin& plugin_of(Offer offer, const LibraryConfig& config, const Catalogue& catalogue) {
  return load_plugin(file_of(offer, config, catalogue));
}

/// Why there is no GPU, where the config wants one; else empty.
std::string missing_gpu(const Json& config) {
  const Json::json_pointer place("/strategy/accelerator");
  return config.contains(place) && config.at(place) == "cuda" ? find_gpus().missing : "";
}

/// Whether it knows accelerators that we have no names for.
bool has_other_kinds(const stg_strategy_factory& factory) {
  const auto is_other = [](uint32_t kind) { return kind != STG_DEVICE_CPU && kind != STG_DEVICE_CUDA; };
  return std::any_of(factory.device_kinds, factory.device_kinds + factory.num_device_kinds, is_other);
}

/// Runs `body`; what an error in it means is said by `codes`: {code, code as which it leaves}.
template <class Body>
auto with_codes(std::initializer_list<std::pair<uint32_t, uint32_t>> codes, const std::string& context, Body body) {
  try {
    return body();
  } catch (const Error& error) {
    Error outer = error.within(context, error.replica, error.device);
    for (const auto& [from, to] : codes) {
      if (error.code == from) outer.code = to;
    }
    throw outer;
  }
}

}  // namespace

const stg_strategy_factory& load_strategy(const LibraryConfig& config, const Catalogue& catalogue) {
  return find_strategy(plugin_of(Offer::strategy, config, catalogue), config.name);
}

std::vector<std::string> device_kinds(const stg_strategy_factory& factory) {
  std::vector<std::string> kinds;
  for (uint64_t i = 0; i < factory.num_device_kinds; ++i) kinds.push_back(device_name({factory.device_kinds[i], 0}));
  for (std::string& kind : kinds) kind = kind.substr(0, kind.find(':'));
  return kinds;
}

const stg_model_factory& load_model(const LibraryConfig& config, const Catalogue& catalogue) {
  return find_model(plugin_of(Offer::model, config, catalogue), config.name);
}

void check_accelerator_name(const stg_strategy_factory* factory, const Json& strategy, Problems& problems) {
  if (!strategy.contains("accelerator") || !strategy["accelerator"].is_string() ||
      (factory != nullptr && has_other_kinds(*factory)))
    return;
  static const Json names = {{"enum", {"auto", "cpu", "cuda"}}};
  check_schema(names, strategy["accelerator"], "/strategy/accelerator", "", problems);
}

/// A strategy says which kinds of device it can use; a config that wants another one lacks a device, not a key.
void check_accelerator(const stg_strategy_factory& factory, const Json& config) {
  const std::string wanted = config.value("accelerator", "auto");
  if (wanted == "auto" || (wanted != "cpu" && wanted != "cuda" && has_other_kinds(factory))) return;
  const std::vector<std::string> kinds = device_kinds(factory);
  if (std::find(kinds.begin(), kinds.end(), wanted) != kinds.end()) return;
  throw Error(STG_UNAVAILABLE, concat("/strategy/accelerator is \"", wanted, "\", which the strategy \"", text_of(factory.name),
                                      "\" can't use here; it can use ", join(kinds)));
}

void check_options(const char* key, stg_string name, stg_string schema, const Json& options, Problems& problems) {
  const std::string owner = concat(" by the ", key, " \"", text_of(name), "\"");
  check_schema(options_schema(schema, owner), options, concat("/", key, "/options"), owner, problems);
}

HostServices::HostServices(std::function<void(uint32_t, const std::string&)> log)
    : log_(std::move(log)), table_(sized<stg_host>()) {
  table_.self = this;
  table_.log = [](void* self, uint32_t level, stg_string message, const stg_tree* /*fields*/) {
    static_cast<HostServices*>(self)->log_(level, std::string(text_of(message)));
  };
}

Session::Session(SessionRequest request)
    : command_(request.command),
      events_(std::move(request.events)),
      own_loop_(request.own_loop),
      caller_thread_only_(request.caller_thread_only),
      sources_(std::move(request.sources)),
      services_([this](uint32_t level, const std::string& text) { log(level, text); }) {
  model_ = std::move(request.model);
  if (command_ == Command::predict && !own_loop_) prepare_predictions(request.output);
  if (!events_.log) events_.log = [](uint32_t, const std::string&) {};
  given_ = std::move(request.config);
  load_plugins(given_);
  given_.json = nullptr;
  if (!own_loop_) read_data();
  check_accelerator(*strategy_factory_, config_.json["strategy"]);
  strategy_.emplace(create_strategy(config_, *strategy_factory_));
  require_save(*strategy_);
  model_ = create_model();
  set_up(*strategy_, model_.get(), {});
  if (!request.checkpoint.empty()) load_checkpoint(request.checkpoint);
  if (command_ != Command::fit || own_loop_) return;
  prepare_outputs();
  warn_of_planned_swaps();
}

Progress Session::beginning() const {
  Progress progress{stage_of(command_)};
  if (command_ == Command::fit) {
    progress.max_epochs = config_.trainer.max_epochs;
    progress.max_steps = config_.trainer.max_steps;
    if (train_) progress.num_batches = num_train_batches(config_, train_->num_samples());
  } else if (evaluation_) {
    progress.num_batches = evaluation_data().num_batches;
  }
  if (!resume_) return progress;
  const Position& position = resume_->position;
  progress.epoch = position.epoch;
  progress.batch = position.batch;
  progress.step = position.step;
  return progress;
}

/// Known before anything is loaded, since it is what was typed last.
void Session::prepare_predictions(const std::string& output) {
  if (output.empty()) throw invalid_argument("predict needs a file to write to, .npz or .safetensors");
  output_ = fs::absolute(output).lexically_normal();
  const fs::path folder = check_predictions_file(output_).parent_path();
  if (access(folder.c_str(), W_OK | X_OK) != 0)
    throw invalid_argument("can't write to ", folder.string(), ": ", std::strerror(errno));
}

void Session::log(uint32_t level, const std::string& message) const { events_.log(level, message); }

/// Config and plugins together, so that unknown options and refused plugins stand in the same list as unknown keys.
void Session::load_plugins(const ConfigText& text) {
  Problems problems;
  config_ = check_config(text, command_, problems, own_loop_);
  check_host_parts(problems);
  if (!own_loop_) check_overwrites(config_, command_, output_, problems);
  const Catalogue catalogue(config_.plugin_path);
  std::vector<uint32_t> refusals;
  // Without a GPU at all no strategy can have one. Nothing is loaded then: LibTorch takes longer than to say so.
  const std::string lacking = missing_gpu(text.json);
  if (!lacking.empty()) {
    problems.add("/strategy/accelerator", concat("\"cuda\": ", lacking));
    refusals.push_back(STG_UNAVAILABLE);
  }
  const auto load = [&](Offer offer, const LibraryConfig& library, const auto load_factory, auto& factory) {
    if (library.name.empty() && !library.path) return;
    const std::string key = word_for(offer);
    const size_t num_before = problems.all().size();
    try {
      if (!lacking.empty()) {
        const fs::path file = file_of(offer, library, catalogue);
        if (std::error_code none; !fs::exists(file, none)) throw not_found("there is no file ", file.string());
        return;
      }
      factory = &load_factory(library, catalogue);
      check_options(key.c_str(), factory->name, factory->options_schema, library.options, problems);
    } catch (const Error& error) {
      const bool wrong_name = error.code == STG_INVALID_ARGUMENT && !library.name.empty();
      problems.add(wrong_name ? concat("/", key, "/name") : library.pointer, error.message);
      const bool is_refusal = error.code != STG_NOT_FOUND && error.code != STG_INVALID_ARGUMENT;
      if (is_refusal && problems.all().size() != num_before) refusals.push_back(error.code);
    }
  };
  load(Offer::strategy, config_.strategy, load_strategy, strategy_factory_);
  load(Offer::model, config_.model, load_model, model_factory_);
  if (lacking.empty() && text.json.contains("strategy"))
    check_accelerator_name(strategy_factory_, text.json["strategy"], problems);
  const bool only_refusals = !refusals.empty() && refusals.size() == problems.all().size();
  problems.raise(config_.source, only_refusals ? refusals.front() : STG_INVALID_ARGUMENT);
  const auto passed_over = catalogue.passed_over({{Offer::strategy, config_.strategy.name}, {Offer::model, config_.model.name}});
  for (const std::string& warning : passed_over) log(STG_LOG_WARNING, warning);
}

/// What the config says of things that the host brings, and what it brought.
void Session::check_host_parts(Problems& problems) const {
  if (config_.model.is_host && model_ == nullptr) {
    problems.add("/model/kind", "\"host\" is the program's own model (stg_session_args.model), and it gave none");
  } else if (!config_.model.is_host && model_ != nullptr) {
    problems.add("/model/kind",
                 "the program gave a model of its own (stg_session_args.model), which is used by the kind \"host\" only");
  }
  const auto check = [&](const char* key, const std::optional<DatasetConfig>& data, bool is_used) {
    if (!is_used || own_loop_ || !data || data->source.empty() || find_source(sources_, data->source) != nullptr) return;
    problems.add(concat("/data/", key, "/source"), concat(shown(data->source), " is no source of the program's",
                                                          sources_.empty() ? "; it gave none (stg_session_args.sources)"
                                                                           : suggestion(data->source, names_of(sources_))));
  };
  const bool fit = command_ == Command::fit;
  check("train", config_.train, fit);
  check("validation", config_.validation, (fit && !config_.trainer.overfits) || command_ == Command::validate);
  check("test", config_.test, command_ == Command::test);
  check("predict", config_.predict, command_ == Command::predict);
}

void Session::read_data() {
  const auto load = [this](const std::optional<DatasetConfig>& config, std::optional<Dataset>& data) {
    if (!config) return;
    config->source.empty() ? data.emplace(*config) : data.emplace(*config, find_source(sources_, config->source));
    if (caller_thread_only_) data->read_on_callers_thread();
  };
  if (command_ == Command::fit) load(config_.train, train_);
  if (!config_.trainer.overfits) load(evaluation_config(), evaluation_);
  check_limits();
}

const std::optional<DatasetConfig>& Session::evaluation_config() const {
  if (command_ == Command::test) return config_.test;
  return command_ == Command::predict ? config_.predict : config_.validation;
}

const BatchLimit& Session::evaluation_limit() const {
  const TrainerConfig& trainer = config_.trainer;
  if (command_ == Command::test) return trainer.limit_test_batches;
  return command_ == Command::predict ? trainer.limit_predict_batches : trainer.limit_val_batches;
}

EvaluationData Session::evaluation_data() const { return {*evaluation_, *evaluation_config(), evaluation_limit()}; }

void Session::check_limits() const {
  const auto check = [](const char* key, const BatchLimit& limit, const std::optional<Dataset>& data, const auto& config) {
    if (!data) return;
    const int64_t all = num_batches(data->num_samples(), config->batch_size);
    if (limit.of(all) == 0) {
      throw invalid_argument("/trainer/", key, ": ", shown(limit.share), " of ", all, all == 1 ? " batch" : " batches",
                             " is less than one batch; raise it, or give a whole number of batches");
    }
  };
  const TrainerConfig& trainer = config_.trainer;
  check(trainer.overfits ? "overfit_batches" : "limit_train_batches", trainer.limit_train_batches, train_, config_.train);
  check(command_ == Command::test      ? "limit_test_batches"
        : command_ == Command::predict ? "limit_predict_batches"
                                       : "limit_val_batches",
        evaluation_limit(), evaluation_, evaluation_config());
}

StrategyInstance Session::create_strategy(const Config& config, const stg_strategy_factory& factory) const {
  if (caller_thread_only_ && (factory.capabilities & STG_CAPABILITY_CALLER_THREAD_ONLY) == 0) {
    throw failed_precondition("the strategy \"", text_of(factory.name), "\" can't run everything on the caller's thread, ",
                              "as STG_SESSION_CALLER_THREAD_ONLY wants it");
  }
  // What a strategy doesn't find or can't have at creation is a device.
  const auto missing = {std::pair{STG_NOT_FOUND, STG_UNAVAILABLE}, std::pair{STG_FAILED_PRECONDITION, STG_UNAVAILABLE}};
  return with_codes(missing, concat("strategy \"", text_of(factory.name), "\""), [&] {
    try {
      return StrategyInstance(factory, strategy_config(config), services_.table(), &events_.requests->cancel,
                              caller_thread_only_ ? STG_CREATE_CALLER_THREAD_ONLY : 0);
    } catch (Error& error) {
      error.message = with_config_pointer(error.message);
      throw;
    }
  });
}

/// What is trained would be lost.
void Session::require_save(const StrategyInstance& strategy) const {
  if (!config_.checkpoint || command_ != Command::fit || own_loop_ || strategy.can_save()) return;
  throw invalid_argument("/checkpoint: the strategy \"", strategy.name(),
                         "\" has no function save; leave /checkpoint out, or use ", "a strategy that has one");
}

// Before any training, what a model's code throws is about the options that it was given.
constexpr std::initializer_list<std::pair<uint32_t, uint32_t>> thrown_before_training = {{STG_UNKNOWN, STG_INVALID_ARGUMENT},
                                                                                         {STG_INTERNAL, STG_INVALID_ARGUMENT}};

/// A new one; the host's own is the same for all strategies.
std::shared_ptr<const stg_model> Session::create_model() const {
  if (model_factory_ == nullptr) return model_;
  return with_codes(thrown_before_training, concat("model \"", text_of(model_factory_->name), "\""), [&] {
    const std::string options = config_.model.options.dump();
    const stg_model* model = nullptr;
    check(model_factory_->create(to_abi(options), services_.table(), &model));
    return std::shared_ptr<const stg_model>(model, [](const stg_model* made) {
      if (made->release != nullptr) made->release(made->self);
    });
  });
}

void Session::set_up(StrategyInstance& strategy, const stg_model* model, Tree state) const {
  with_codes(thrown_before_training, concat("setting up the strategy \"", strategy.name(), "\""),
             [&] { strategy.setup(model, stage_of(command_), std::move(state)); });
}

Json Session::load_first_whole(const std::vector<fs::path>& candidates) {
  for (const fs::path& candidate : candidates) {
    const bool last_hope = candidate == candidates.back();
    std::string damage = damage_of(candidate);
    if (damage.empty()) {
      try {
        checkpoint_ = candidate;
        std::vector<std::string> misfits;
        Json state = strategy_->load(candidate.string(), misfits);
        if (!misfits.empty()) {
          log(STG_LOG_WARNING,
              concat("the config's optimizer has another state than the checkpoint's (", misfits.front(),
                     misfits.size() == 1 ? "" : concat(" and ", misfits.size() - 1, " more"), "); what doesn't fit begins anew"));
        }
        return state;
      } catch (const Error& error) {
        if (last_hope && error.code == STG_NOT_FOUND)
          throw not_found(candidate.string(), " holds no checkpoint: ", error.message);
        if (last_hope || (error.code != STG_DATA_LOSS && error.code != STG_NOT_FOUND)) throw;
        damage = error.message;
      }
    } else if (last_hope) {
      throw data_loss("the checkpoint ", candidate.string(), " is not whole: ", damage);
    }
    log(STG_LOG_WARNING, concat("the checkpoint ", candidate.string(), " is not whole (", damage, "); trying the one before it"));
  }
  throw not_found("no checkpoint");
}

void Session::load_checkpoint(const std::string& given) {
  const auto codes = {std::pair{STG_FAILED_PRECONDITION, STG_INVALID_ARGUMENT},
                      std::pair{STG_PERMISSION_DENIED, STG_INVALID_ARGUMENT}, std::pair{STG_UNKNOWN, STG_INVALID_ARGUMENT}};
  with_codes(codes, "loading a checkpoint", [&] {
    const Json state = load_first_whole(checkpoint_candidates(given));
    if (command_ != Command::fit || own_loop_) return;
    if (state.is_null()) throw data_loss(checkpoint_.string(), " holds weights, but no position in a run; it can't be resumed");
    std::vector<std::string> warnings;
    resume_ = Resume{restore_position(state, config_, train_->num_samples(), warnings), checkpoint_};
    for (const std::string& warning : warnings) log(STG_LOG_WARNING, warning);
    const Position& position = resume_->position;
    log(STG_LOG_INFO, concat("resuming from ", checkpoint_.string(), ": step ", position.step, ", epoch ", position.epoch,
                             ", batch ", position.batch));
  });
}

/// A folder that can't be written to is better known before the first hour than after it.
void Session::prepare_outputs() const {
  const auto prepare = [](const fs::path& folder, const char* pointer) {
    try {
      disk::make_folders(folder);
    } catch (const Error& error) {
      throw invalid_argument(pointer, ": ", error.message);
    }
    if (access(folder.c_str(), W_OK | X_OK) != 0)
      throw invalid_argument(pointer, ": can't write to ", folder.string(), ": ", std::strerror(errno));
  };
  if (config_.checkpoint) prepare(config_.checkpoint->dir, "/checkpoint/dir");
  if (config_.metrics) {
    prepare(config_.metrics->parent_path(), "/metrics/path");
    try {
      MetricsFile::check(*config_.metrics);
    } catch (const Error& error) {
      throw invalid_argument("/metrics/path: ", error.message);
    }
  }
}

Json Session::run() {
  if (own_loop_)
    throw failed_precondition("this session was opened with STG_SESSION_OWN_LOOP: the program drives stg_session_strategy");
  if (has_run_) throw failed_precondition("this session has run; open another one");
  if (loop_ && loop_->has_failed()) throw failed_precondition("this session's run has ended with an error; open another one");
  has_run_ = true;
  Json result = command_ == Command::fit ? fit() : command_ == Command::predict ? predict_once() : evaluate_once();
  result["strategy"] = text_of(strategy_factory_->name);
  result["devices"] = strategy_->devices();
  return result;
}

Json Session::fit() {
  FitLoop& loop = begun_loop();
  while (!loop.is_over()) advance();
  const FitResult fit = loop.finish();
  end_updates();
  const auto text_or_null = [](const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); };
  Json result = {{"steps", fit.steps},
                 {"epochs", fit.epochs},
                 {"skipped_updates", fit.skipped_updates},
                 {"train_loss", fit.train_loss},
                 {"validation", fit.validation},
                 {"seconds", fit.seconds},
                 {"step_ms_median", fit.step_ms_median},
                 {"checkpoint", fit.checkpoint ? Json(fit.checkpoint->string()) : Json(nullptr)},
                 {"best", nullptr},
                 {"ended_by", text_or_null(fit.ended_by)},
                 {"interrupted", fit.interrupted}};
  if (fit.best) {
    result["best"] = {{"checkpoint", fit.best->checkpoint.string()},
                      {"step", fit.best->ranked.step},
                      {"monitor", fit.best->monitor},
                      {"value", fit.best->ranked.value}};
  }
  if (!fit.nothing_to_do.empty()) {
    result["nothing_to_do"] = fit.nothing_to_do;
    log(STG_LOG_INFO, concat("nothing to do: ", fit.nothing_to_do));
  }
  return result;
}

Json Session::evaluate_once() {
  const bool test = command_ == Command::test;
  const Evaluation evaluation = evaluate(*strategy_, evaluation_data(), Progress{stage_of(command_)}, events_);
  return {{test ? "test" : "validation", evaluation.metrics},
          {"checkpoint", checkpoint_.empty() ? Json(nullptr) : Json(checkpoint_.string())},
          {"interrupted", evaluation.stopped}};
}

/// An interrupted one writes nothing: a file of half the samples would look whole.
Json Session::predict_once() {
  Predictions predictions(output_);
  const bool stopped = predict(*strategy_, evaluation_data(), Progress{stage_of(command_)}, events_, predictions);
  if (!stopped) predictions.write(output_);
  for (const std::string& note : predictions.notes()) log(STG_LOG_INFO, note);
  return {{"predictions", stopped ? Json(nullptr) : Json(output_.string())},
          {"arrays", predictions.shapes()},
          {"checkpoint", checkpoint_.empty() ? Json(nullptr) : Json(checkpoint_.string())},
          {"interrupted", stopped}};
}

}  // namespace stratagem
