// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/loop/position.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "libstratagem/data/dataset.hpp"
#include "libstratagem/loop/schedule.hpp"

namespace stratagem {
namespace {

/// What decides which samples batch number n of an epoch holds, by the place in the config.
Json order_of_batches(const Config& config, int64_t num_samples) {
  Json order = {{"/data/train (samples)", num_samples},
                {"/data/train/batch_size", config.train->batch_size},
                {"/data/train/shuffle", config.train->shuffle}};
  if (config.train->shuffle) order["/seed"] = config.seed;
  return order;
}

/// What decides the numbers of an update: its rate, its size, its arithmetic.
Json update_settings(const Config& config, int64_t num_samples) {
  Json settings = {{"/trainer/accumulate_grad_batches", config.trainer.accumulate_grad_batches},
                   {"/trainer/gradient_clip_val", config.trainer.gradient_clip_val},
                   {"/precision", config.json.value("precision", "32-true")},
                   {"/deterministic", config.json.value("deterministic", false)}};
  if (config.trainer.gradient_clip_val > 0) {
    settings["/trainer/gradient_clip_algorithm"] = config.trainer.gradient_clip_algorithm;
  }
  if ((config.scheduler.name == "cosine" || config.scheduler.name == "one_cycle") && !config.scheduler.total_steps) {
    settings["/scheduler/total_steps (the run's length)"] = total_updates(config, num_samples);
  }
  if (const int64_t num = num_train_batches(config, num_samples); num != num_batches(num_samples, config.train->batch_size)) {
    settings["/trainer/limit_train_batches (batches of an epoch)"] = num;
  }
  for (const auto& member : config.strategy.options.items()) settings["/strategy/options/" + member.key()] = member.value();
  for (const char* section : {"optimizer", "scheduler"}) {
    const Json values = config.json.value(section, Json::object());
    for (const auto& member : values.items()) {
      settings[concat("/", section, "/", member.key())] = member.value();
    }
  }
  return settings;
}

/// Calls `changed(pointer, saved, now)` for each key whose values differ; null stands for absent.
template <class Changed>
void compare(const Json& saved, const Json& now, Changed changed) {
  for (const auto& member : now.items()) {
    const Json before = saved.value(member.key(), Json());
    if (before != member.value()) changed(member.key(), before, member.value());
  }
  for (const auto& member : saved.items()) {
    if (!now.contains(member.key())) changed(member.key(), member.value(), Json());
  }
}

/// What the monitors have seen. Another monitor begins anew, one that is left out is forgotten, and that is told.
void restore_monitors(const Json& state, const Config& config, Position& position, std::vector<std::string>& warnings) {
  const auto restore = [&](const char* key, const Monitor& monitor, const auto read, auto& out) {
    const Json saved = state.value(key, Json());
    if (saved.is_null()) return;
    if (const auto value = read(saved, monitor)) {
      out = *value;
    } else {
      warnings.push_back(concat(monitor.pointer, " (", monitor.is_max ? "max" : "min", ") is ", shown(monitor.name),
                                " in the config and ", shown(saved.at("monitor")), " (", saved.at("mode").get<std::string>(),
                                ") in the checkpoint; what was best so far doesn't count"));
    }
  };
  const auto forget = [&](const char* pointer, const char* key, const auto has_seen, const char* what) {
    const Json saved = state.value(key, Json());
    // A run that writes no checkpoints leaves those that know.
    if (!config.checkpoint || saved.is_null() || !has_seen(saved)) return;
    warnings.push_back(
        concat(pointer, " is ", shown(saved.at("monitor")), " in the checkpoint and left out of the config; ", what));
  };
  if (config.early_stopping) {
    restore("early_stopping", config.early_stopping->monitor, stopping_state, position.stopping);
  } else {
    forget(
        "/early_stopping/monitor", "early_stopping",
        [](const Json& saved) { return !saved.at("best").is_null() || saved.at("misses") != 0; },
        "what early stopping has seen is forgotten, and where it comes back it begins anew");
  }
  if (config.checkpoint && config.checkpoint->monitor) {
    restore("best", *config.checkpoint->monitor, best_checkpoints, position.best);
  } else {
    forget(
        "/checkpoint/monitor", "best", [](const Json& saved) { return !saved.at("checkpoints").empty(); },
        "which are the best so far is forgotten, they stay as another run's would");
  }
}

/// The best under another monitor are this run's no more: keep_last leaves them alone.
std::optional<CheckpointRecord> checkpoint_record(const Json& state, const Position& position) {
  const Json saved = state.value("checkpoints", Json());
  if (saved.is_null()) return std::nullopt;
  CheckpointRecord record{saved.at("own").get<std::set<int64_t>>(), saved.at("for_being_best").get<std::set<int64_t>>()};
  const Json best = state.value("best", Json());
  if (position.best.empty() && best.is_object()) {
    for (const Json& checkpoint : best.at("checkpoints")) record.own.erase(checkpoint.at("step").get<int64_t>());
  }
  return record;
}

/// A run goes on under the strategy that it had come to, unless the config has another plan now.
void restore_strategy(const Json& state, const Config& config, Position& position) {
  const Json planned = state.value("planned", Json());
  if (planned.is_null() || planned.at("strategy") != config.own_strategy ||
      planned.at("swap") != config.json.value("swap", Json()))
    return;
  position.planned_swap = planned.at("done").get<int64_t>();
  if (const Json in_force = state.at("config").value("strategy", Json()); in_force != config.own_strategy)
    position.strategy = in_force;
}

std::string shown_or_absent(const Json& value) { return value.is_null() ? "absent" : shown(value); }

}  // namespace

Json to_json(const CheckpointRecord& record) { return {{"own", record.own}, {"for_being_best", record.for_being_best}}; }

Json host_state(const Position& position, const Config& config, int64_t num_samples) {
  const bool has_best = config.checkpoint && config.checkpoint->monitor;
  return {{"format", 1},
          {"epoch", position.epoch},
          {"batch", position.batch},
          {"step", position.step},
          {"validation_pending", position.validation_pending},
          {"epoch_is_whole", position.epoch_is_whole},
          // NaN has no number in JSON; null reads back as it.
          {"loss", {{"sum", position.loss.sum}, {"weight", position.loss.weight}}},
          {"validated_step", position.validated_step},
          {"seconds", position.seconds},
          {"skipped_updates", position.num_skipped},
          {"early_stopping", config.early_stopping ? to_json(position.stopping, config.early_stopping->monitor) : Json(nullptr)},
          {"best", has_best ? to_json(position.best, *config.checkpoint->monitor) : Json(nullptr)},
          {"order", order_of_batches(config, num_samples)},
          {"updates", update_settings(config, num_samples)},
          {"planned",
           {{"strategy", config.own_strategy}, {"swap", config.json.value("swap", Json())}, {"done", position.planned_swap}}},
          {"config", config.json}};
}

Position restore_position(const Json& state, const Config& config, int64_t num_samples, std::vector<std::string>& warnings) {
  Position position;
  try {
    if (state.at("format") != 1)
      throw data_loss("the loop's state in the checkpoint has format ", shown(state.at("format")), "; this version reads 1");
    position.epoch = state.at("epoch").get<int64_t>();
    position.batch = state.at("batch").get<int64_t>();
    position.step = state.at("step").get<int64_t>();
    position.validation_pending = state.at("validation_pending").get<bool>();
    position.epoch_is_whole = state.at("epoch_is_whole").get<bool>();
    if (std::min({position.epoch, position.batch, position.step}) < 0) {
      throw data_loss("the loop's state in the checkpoint counts below 0: epoch ", position.epoch, ", batch ", position.batch,
                      ", step ", position.step);
    }
    const auto number = [](const Json& value) {
      return value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
    };
    position.loss = {number(state.at("loss").at("sum")), number(state.at("loss").at("weight"))};
    position.validated_step = state.value("validated_step", int64_t{-1});
    position.seconds = state.value("seconds", 0.0);
    position.num_skipped = state.value("skipped_updates", int64_t{0});
    restore_monitors(state, config, position, warnings);
    position.checkpoints = checkpoint_record(state, position);
    restore_strategy(state, config, position);
    Config to_compare = config;
    if (!position.strategy.is_null()) to_compare.strategy.options = position.strategy.value("options", Json::object());
    const bool within_epoch = position.batch != 0 && !position.epoch_is_whole;
    compare(state.at("order"), order_of_batches(config, num_samples),
            [&](const std::string& pointer, const Json& saved, const Json& now) {
              const std::string both = concat(pointer, " is ", shown_or_absent(saved), " in the checkpoint and ",
                                              shown_or_absent(now), " in the config");
              if (within_epoch) {
                throw invalid_argument(
                    both, "; the checkpoint lies within an epoch (batch ", position.batch, " of epoch ", position.epoch,
                    "), which can only go on with the same order of batches: set it back, or resume from the end of an epoch");
              }
              warnings.push_back(both + "; the config's is used");
            });
    compare(state.at("updates"), update_settings(to_compare, num_samples),
            [&](const std::string& pointer, const Json& saved, const Json& now) {
              warnings.push_back(concat(pointer, " is ", shown_or_absent(saved), " in the checkpoint and ", shown_or_absent(now),
                                        " in the config; the config's is used from update ", position.step + 1, " on"));
            });
  } catch (const Json::exception& error) {
    throw data_loss("the loop's state in the checkpoint is not one of this program's: ", error.what());
  }
  return position;
}

}  // namespace stratagem
