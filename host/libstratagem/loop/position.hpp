// SPDX-License-Identifier: Apache-2.0
//
// Where a run is, as it is saved beside the weights and given back by load.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "libstratagem/config/config.hpp"
#include "libstratagem/loop/checkpoints.hpp"
#include "libstratagem/loop/means.hpp"
#include "libstratagem/loop/monitors.hpp"

namespace stratagem {

struct Position {
  int64_t epoch = 0;
  int64_t batch = 0;                // the next batch of the epoch; batches before it are done
  int64_t step = 0;                 // updates done
  bool validation_pending = false;  // training of the epoch (or the run) is done, its validation isn't
  bool epoch_is_whole = false;      // with it: all batches of the epoch are done, however many a resumed run would count
  WeightedMean loss = {};           // of this epoch so far
  int64_t validated_step = -1;      // after which update the last validation was
  double seconds = 0;               // of training up to here, in all processes of the run
  int64_t num_skipped = 0;          // updates that were skipped
  StoppingState stopping = {};
  BestCheckpoints best = {};
  std::optional<CheckpointRecord> checkpoints = {};  // of the checkpoint that it was read from
  int64_t planned_swap = 0;                          // the last of the config's swaps that was tried, by its at_step
  Json strategy = {};                                // of a checkpoint: in force, where the config's was swapped; else null
};

/// What `save` is given: position, and the part of the config that a resume compares.
Json to_json(const CheckpointRecord& record);
Json host_state(const Position& position, const Config& config, int64_t num_samples);

/// Reads it back. Throws Error{DATA_LOSS} for one that is not of our making; INVALID_ARGUMENT where the position can't be kept, as it
/// lies within an epoch and the order of batches has changed. `warnings` tells what else has changed and which value is used. What an
/// older version did not save is as in a new run.
Position restore_position(const Json& state, const Config& config, int64_t num_samples, std::vector<std::string>& warnings);

}  // namespace stratagem
