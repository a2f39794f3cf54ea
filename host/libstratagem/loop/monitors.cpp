// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/loop/monitors.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace stratagem {
namespace {

Json or_null(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

std::optional<double> number_or_nothing(const Json& value) {
  return value.is_null() ? std::nullopt : std::optional(value.get<double>());
}

Json mode_of(const Monitor& monitor) { return monitor.is_max ? "max" : "min"; }

bool is_of(const Json& saved, const Monitor& monitor) {
  return saved.is_object() && saved.at("monitor") == monitor.name && saved.at("mode") == mode_of(monitor);
}

}  // namespace

double monitored(const Monitor& monitor, const std::map<std::string, double>& values) {
  const auto found = values.find(monitor.name);
  if (found != values.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [name, value] : values) names.push_back(name);
  throw invalid_argument(monitor.pointer, ": the model's validation gives no ", shown(monitor.name),
                         suggestion(monitor.name, names));
}

void observe(StoppingState& state, const EarlyStoppingConfig& config, double value) {
  state.last = std::isfinite(value) ? std::optional(value) : std::nullopt;
  const double required = config.monitor.is_max ? value - config.min_delta : value + config.min_delta;
  if (state.last && (!state.best || config.monitor.is_better(required, *state.best))) {
    state.best = value;
    state.num_misses = 0;
  } else {
    ++state.num_misses;
  }
}

std::string reason_to_stop(const StoppingState& state, const EarlyStoppingConfig& config) {
  const std::string name = shown(config.monitor.name);
  if (config.stopping_threshold && state.last && config.monitor.is_better(*state.last, *config.stopping_threshold)) {
    return concat("/early_stopping/stopping_threshold (", shown(*config.stopping_threshold), ") is passed: ", name, " is ",
                  shown(*state.last));
  }
  if (state.num_misses >= config.patience) {
    const std::string seen = state.best ? concat("no better than ", shown(*state.best)) : "not a finite number";
    return concat("/early_stopping/patience (", config.patience, ") is reached: ", name, " was ", seen, " in the last ",
                  state.num_misses, state.num_misses == 1 ? " validation" : " validations");
  }
  return state.is_others_decision ? "/early_stopping: another process decided to stop" : "";
}

bool is_one_of_the_best(const BestCheckpoints& best, const CheckpointConfig& config, double value) {
  if (!std::isfinite(value)) return false;
  const bool has_room = config.save_top_k == no_limit || best.size() < static_cast<size_t>(config.save_top_k);
  return has_room || config.monitor->is_better(value, best[static_cast<size_t>(config.save_top_k) - 1].value);
}

void insert(BestCheckpoints& best, const CheckpointConfig& config, RankedCheckpoint checkpoint) {
  std::erase_if(best, [&](const RankedCheckpoint& other) { return other.step == checkpoint.step; });
  const auto place = std::find_if(best.begin(), best.end(), [&](const RankedCheckpoint& other) {
    return config.monitor->is_better(checkpoint.value, other.value);
  });
  best.insert(place, checkpoint);
  if (config.save_top_k != no_limit && best.size() > static_cast<size_t>(config.save_top_k))
    best.resize(static_cast<size_t>(config.save_top_k));
}

Json to_json(const StoppingState& state, const Monitor& monitor) {
  return {{"monitor", monitor.name},    {"mode", mode_of(monitor)},    {"best", or_null(state.best)},
          {"misses", state.num_misses}, {"last", or_null(state.last)}, {"others_decision", state.is_others_decision}};
}

Json to_json(const BestCheckpoints& best, const Monitor& monitor) {
  Json list = Json::array();
  for (const RankedCheckpoint& checkpoint : best) list.push_back({{"step", checkpoint.step}, {"value", checkpoint.value}});
  return {{"monitor", monitor.name}, {"mode", mode_of(monitor)}, {"checkpoints", list}};
}

std::optional<StoppingState> stopping_state(const Json& saved, const Monitor& monitor) {
  if (!is_of(saved, monitor)) return std::nullopt;
  return StoppingState{number_or_nothing(saved.at("best")), saved.at("misses").get<int64_t>(),
                       number_or_nothing(saved.at("last")), saved.at("others_decision").get<bool>()};
}

std::optional<BestCheckpoints> best_checkpoints(const Json& saved, const Monitor& monitor) {
  if (!is_of(saved, monitor)) return std::nullopt;
  BestCheckpoints best;
  for (const Json& checkpoint : saved.at("checkpoints"))
    best.push_back({checkpoint.at("step").get<int64_t>(), checkpoint.at("value").get<double>()});
  return best;
}

}  // namespace stratagem
