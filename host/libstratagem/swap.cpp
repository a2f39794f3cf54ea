// SPDX-License-Identifier: Apache-2.0
//
// A session's steps, and the exchange of its strategy between two of them. Everything that a new strategy can fail at comes before the
// old one is touched: it is created and set up beside it, from a view of its state. Optimizer, generators and loss scale are part of
// that state; loop, loader and schedule don't know which strategy there is.
#include <algorithm>
#include <chrono>
#include <set>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "libstratagem/session.hpp"

namespace stratagem {
namespace {

/// The new strategy could not have the memory, and the old one could not have it back.
struct StrategyLost : Error {
  StrategyLost(uint32_t error_code, std::string text) : Error(error_code, std::move(text)) { flags = 0; }
};

/// The keys whose values differ, as "/trainer/max_steps".
std::vector<std::string> changed_keys(const Json& before, const Json& now) {
  std::set<std::string> keys;
  for (const Json& change : Json::diff(before, now)) keys.insert(change.at("path").get<std::string>());
  return {keys.begin(), keys.end()};
}

bool is_on_accelerator(const StrategyInstance& strategy) {
  const auto devices = strategy.devices();
  return std::any_of(devices.begin(), devices.end(), [](const std::string& name) { return name.rfind("cpu", 0) != 0; });
}

}  // namespace

// ---- steps

FitLoop& Session::begun_loop() {
  require_fit();
  if (own_loop_) throw failed_precondition("this session was opened with STG_SESSION_OWN_LOOP: it has no updates of its own");
  if (loop_ && loop_->has_failed()) throw failed_precondition("this session's run has ended with an error; open another one");
  if (loop_) return *loop_;
  const Dataset* validation = evaluation_ ? &*evaluation_ : nullptr;
  if (config_.trainer.overfits && config_.validation) validation = &*train_;
  loop_.emplace(config_, *strategy_, *train_, validation, resume_, events_);
  // A resume goes on under the strategy that the run had come to. What it did then is told already.
  if (resume_ && !resume_->position.strategy.is_null() && !loop_->is_over()) try_swap(Json(resume_->position.strategy));
  loop_->begin();
  return *loop_;
}

bool Session::step(uint64_t num_updates) {
  if (has_run_) throw failed_precondition("this session has run; open another one");
  FitLoop& loop = begun_loop();
  const int64_t begin = loop.step();
  while (!loop.is_over() && static_cast<uint64_t>(loop.step() - begin) < num_updates) advance();
  if (!loop.is_over()) return false;
  loop.save_last();
  end_updates();
  return true;
}

void Session::advance() {
  if (loop_->is_before_update()) swap_if_asked();
  loop_->advance();
}

// ---- the ways to ask for a swap

void Session::swap_if_asked() {
  const auto& swaps = config_.swaps;
  const auto due =
      std::find_if(swaps.rbegin(), swaps.rend(), [&](const SwapConfig& swap) { return swap.at_step <= loop_->step(); });
  if (due != swaps.rend() && due->at_step > loop_->last_planned_swap()) {
    loop_->note_planned_swap(due->at_step);
    try_swap(due->strategy);
  }
  if (events_.requests->reload.exchange(false)) reload();
  if (const auto strategy = events_.requests->take_swap()) try_swap(*strategy);
}

/// A request that came during the last update is told of, too.
void Session::end_updates() {
  const auto strategy = events_.requests->take_last_swap();
  if (!strategy) return;
  const Error late = failed_precondition("it was asked for after the run's last update");
  log(STG_LOG_WARNING, concat("no swap to ", strategy->dump(), ": ", late.message));
  if (events_.swap) events_.swap(loop_->step(), *strategy, &late);
}

/// Better known now than at its step; but what is missing may be there by then.
void Session::warn_of_planned_swaps() const {
  for (size_t i = 0; i < config_.swaps.size(); ++i) {
    if (const int64_t last = config_.trainer.max_steps; last != no_limit && config_.swaps[i].at_step >= last) {
      log(STG_LOG_WARNING, concat("/swap/", i, "/at_step is ", config_.swaps[i].at_step,
                                  ", which never comes: the run ends after ", last, " updates (/trainer/max_steps)"));
    }
    try {
      Config config = config_;
      wanted_strategy(config_.swaps[i].strategy, config);
    } catch (const Error& error) {
      log(STG_LOG_WARNING, concat("/swap/", i, "/strategy: as things are, the swap at step ", config_.swaps[i].at_step,
                                  " will leave the strategy before it in place: ", error.message));
    }
  }
}

Json strategy_of(const std::string& text) {
  Json strategy = parse_json(text, "the strategy", {.allow_comments = true});
  drop_nulls(strategy);
  Problems problems;
  check_strategy(strategy, "/", problems);
  problems.raise("the strategy");
  return strategy;
}

void Session::require_fit() const {
  if (command_ != Command::fit)
    throw failed_precondition("this session is not for fit: it has no updates, and no swaps between them");
}

void Session::swap(const Json& strategy) {
  require_fit();
  if (has_run_ || (loop_ && loop_->is_over())) throw failed_precondition("this session's run is over; there is nothing to swap");
  if (const auto error = try_swap(strategy)) throw *error;
}

/// They are no part of a state: with them, the update that they are for would be another one.
void Session::require_no_gradients() const {
  const stg_status status = strategy_->status();
  if (status.num_micro_batches == 0 && status.has_graph == 0) return;
  throw failed_precondition("the strategy holds ",
                            status.has_graph != 0 ? std::string("a training_step without its backward")
                                                  : concat("the gradients of ", status.num_micro_batches, " micro-batches"),
                            ", which a swap would lose; call optimizer_step first, or zero_grad");
}

void Session::request_swap(Json strategy) const {
  require_fit();
  if (own_loop_) {
    throw failed_precondition("this session was opened with STG_SESSION_OWN_LOOP: it has no updates to wait for; call ",
                              "stg_session_swap between two of the program's own");
  }
  if (!events_.requests->swap_to(std::move(strategy)))
    throw failed_precondition("this session's run is over; there is nothing to swap");
}

void Session::reload() {
  if (!given_.file) {
    log(STG_LOG_WARNING, "asked to read the config again, but it was given as a text, not as a file");
    return;
  }
  const std::string file = given_.file->string();
  // What was a pipe is read by now, and a run must not wait for what may never be written.
  std::error_code unreachable;
  if (std::filesystem::exists(*given_.file, unreachable) && !std::filesystem::is_regular_file(*given_.file, unreachable)) {
    log(STG_LOG_WARNING, concat("asked to read the config again, which changes nothing: ", file, " is no regular file"));
    return;
  }
  Json now;
  try {
    const ConfigText text = read_config_file(*given_.file, given_.overrides);
    Problems problems;
    check_config(text, command_, problems);
    problems.raise(text.source);
    now = text.json;
  } catch (const Error& error) {
    log(STG_LOG_WARNING, concat("asked to read the config again, which changes nothing: ", error.message));
    return;
  }
  const Json wanted = now["strategy"];
  Json before = config_.json;
  before["strategy"] = wanted;
  if (const auto others = changed_keys(before, now); !others.empty()) {
    log(STG_LOG_WARNING, concat(file, ": a run that goes on takes another \"strategy\" only; left as they were: ", join(others)));
  }
  if (wanted == config_.json["strategy"]) {
    log(STG_LOG_INFO, concat(file, " is read again: its strategy is the one that runs"));
  } else if (!try_swap(wanted)) {
    config_.own_strategy = wanted;
  }
}

// ---- the swap

const stg_strategy_factory& Session::wanted_strategy(const Json& strategy, Config& config) const {
  Problems problems;
  config.json["strategy"] = strategy;
  config.strategy = check_strategy(strategy, given_.folder, problems);
  problems.raise("the strategy");
  const stg_strategy_factory& factory = load_strategy(config.strategy, Catalogue(config.plugin_path));
  check_options("strategy", factory.name, factory.options_schema, config.strategy.options, problems);
  check_accelerator_name(&factory, strategy, problems);
  problems.raise("the strategy");
  check_accelerator(factory, strategy);
  return factory;
}

/// Returns why the old strategy goes on, or nothing. Throws what ends the run.
std::optional<Error> Session::try_swap(const Json& strategy) {
  const int64_t step = loop_ ? loop_->step() : resume_ ? resume_->position.step : 0;
  if (loop_) loop_->before_swap();
  const std::string old(strategy_->name());
  std::optional<Error> failure;
  const auto begin = std::chrono::steady_clock::now();
  try {
    exchange_strategy(strategy);
  } catch (const StrategyLost& lost) {
    if (loop_) loop_->fail();
    try {
      if (events_.swap) events_.swap(step, strategy, &lost);
    } catch (...) {
      // The run ends in any case; why the strategy is lost is what has to be told.
    }
    throw;
  } catch (...) {
    failure = describe_exception(std::current_exception());
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (failure) {
    log(STG_LOG_WARNING, concat("the swap to ", strategy.dump(), " before update ", step + 1, " failed; the strategy \"", old,
                                "\" goes on: ", failure->message));
  } else {
    log(STG_LOG_INFO, concat("before update ", step + 1, ": strategy \"", strategy_->name(), "\" on ", join(strategy_->devices()),
                             " in the place of \"", old, "\""));
  }
  const Error* error = failure ? &*failure : nullptr;
  if (loop_) {
    loop_->after_swap(strategy, seconds, error);
  } else if (events_.swap) {
    events_.swap(step, strategy, error);
  }
  return failure;
}

void Session::exchange_strategy(const Json& strategy) {
  require_no_gradients();
  Config config = config_;
  const stg_strategy_factory& factory = wanted_strategy(strategy, config);
  StrategyInstance next = create_strategy(config, factory);
  require_save(next);
  std::shared_ptr<const stg_model> model = create_model();
  try {
    set_up(next, model.get(), strategy_->export_state(0));
  } catch (const Error& error) {
    if (error.code != STG_RESOURCE_EXHAUSTED || (!is_on_accelerator(next) && !is_on_accelerator(*strategy_))) throw;
    exchange_through_host(next, model.get(), error);
  }
  // Nothing from here on fails. The old instance ends here, and then its model.
  *strategy_ = std::move(next);
  model_ = std::move(model);
  strategy_factory_ = &factory;
  config_.json["strategy"] = strategy;
  config_.strategy = std::move(config.strategy);
  if (resume_) resume_->position.strategy = nullptr;  // the run goes on under this one
}

/// Where a device can't hold both: the state waits in host memory while the old strategy makes room.
void Session::exchange_through_host(StrategyInstance& next, const stg_model* model, const Error& reason) {
  log(STG_LOG_INFO, concat("the state goes through host memory, as the devices can't hold two strategies: ", reason.message));
  const Tree state = strategy_->to_host(strategy_->export_state(STG_EXPORT_COPY));
  strategy_->teardown();
  try {
    set_up(next, model, copy_tree(state.root()));
  } catch (...) {
    const Error failure = describe_exception(std::current_exception());
    try {
      set_up(*strategy_, model_.get(), copy_tree(state.root()));
    } catch (...) {
      const Error back = describe_exception(std::current_exception());
      throw StrategyLost(back.code,
                         concat("the strategy \"", next.name(), "\" can't be set up (", failure.message, "), and neither can \"",
                                strategy_->name(), "\" any more, which had made room for it: ", back.message));
    }
    throw failure;
  }
}

}  // namespace stratagem
