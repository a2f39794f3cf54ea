// SPDX-License-Identifier: Apache-2.0
//
// What follows from a watched value after a validation: whether to stop, and whether the checkpoint is one of the best. Both are decided
// from the config and a state that is part of a run's position, so a resumed run decides as the unbroken one. A value that is not
// finite is never better than another.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "libstratagem/config/config.hpp"

namespace stratagem {

/// The value of the monitor. Throws Error{INVALID_ARGUMENT} with its pointer and the names that there are, if it is none of them.
double monitored(const Monitor& monitor, const std::map<std::string, double>& values);

struct StoppingState {
  std::optional<double> best;
  int64_t num_misses = 0;           // validations since the best one
  std::optional<double> last;       // the last value, if it is finite
  bool is_others_decision = false;  // another process wants to stop
};

void observe(StoppingState& state, const EarlyStoppingConfig& config, double value);
/// Why training is to end, or nothing.
std::string reason_to_stop(const StoppingState& state, const EarlyStoppingConfig& config);

struct RankedCheckpoint {
  int64_t step = 0;
  double value = 0;
};
/// The best first; of equal ones the older.
using BestCheckpoints = std::vector<RankedCheckpoint>;

bool is_one_of_the_best(const BestCheckpoints& best, const CheckpointConfig& config, double value);
void insert(BestCheckpoints& best, const CheckpointConfig& config, RankedCheckpoint checkpoint);

/// As they are saved: with the name and the mode of the monitor, since they mean nothing under another one.
Json to_json(const StoppingState& state, const Monitor& monitor);
Json to_json(const BestCheckpoints& best, const Monitor& monitor);
/// Nothing where they are of another monitor.
std::optional<StoppingState> stopping_state(const Json& saved, const Monitor& monitor);
std::optional<BestCheckpoints> best_checkpoints(const Json& saved, const Monitor& monitor);

}  // namespace stratagem
