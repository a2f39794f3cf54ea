// SPDX-License-Identifier: Apache-2.0
//
// The checkpoints of a run: which folders there are, which is the newest, which may go. What is in a folder is the strategy's affair;
// it writes one as a whole or not at all. Names are step-00000200: the number counts updates and is compared as a number.
//
//   dir/step-00000200/   a checkpoint
//   dir/last             a text file with the name of the newest, moved after that is complete
//   dir/best             the same for the best, where there is a monitor
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/disk.hpp"
#include "libstratagem/config/config.hpp"

namespace stratagem {

std::string checkpoint_name(int64_t step);
/// The number in a name that checkpoint_name could have made.
std::optional<int64_t> step_of(const std::string& name);

/// The folders to try for `--resume DIR` or `--checkpoint DIR`, the best first. DIR is a checkpoint, or the folder of a run: then the
/// one that `last` names, and the others from the highest number down. DIR/last and DIR/best are the ones that they name. Throws NOT_FOUND with the absolute path if there is none.
std::vector<std::filesystem::path> checkpoint_candidates(const std::filesystem::path& dir);

/// Why a checkpoint can't be whole, as far as its files tell (a truncated weights file), or nothing.
std::string damage_of(const std::filesystem::path& checkpoint);

/// Which checkpoints are a run's, as each of them remembers it.
struct CheckpointRecord {
  std::set<int64_t> own;
  std::set<int64_t> for_being_best;  ///< of own: saved for that alone
};

class Checkpoints {
 public:
  using Save = std::function<void(const std::string& folder)>;
  using Warn = std::function<void(const std::string& text)>;

  /// `resumed_step`: the run goes on from a checkpoint in this folder. Those in its `record` (absent, of an older version: those up to the
  /// step) belong to the run and are counted by keep_last; others are another run's and stay as they are. So do those that can't be read, for a reason that may pass: what has its name
  /// was whole once. Leftovers of a save that was killed go after the next save.
  Checkpoints(CheckpointConfig config, std::optional<int64_t> resumed_step, Warn warn,
              const std::optional<CheckpointRecord>& record = {});

  bool due(int64_t step) const;
  /// As the checkpoint of this step is to remember it.
  CheckpointRecord record_with(int64_t step, bool for_being_best) const;
  bool has(int64_t step) const { return record_.own.contains(step); }
  /// Why it hasn't one, in words.
  std::string why_not(int64_t step) const;
  /// `best`: the steps of the best checkpoints, the best first; they stay. One that is saved for being one of them only is not counted
  /// by keep_last, and goes when it is one no more and not the newest.
  void save(int64_t step, const Save& save, std::vector<int64_t> best = {}, bool for_being_best = false);
  /// The newest one stays for another reason, too.
  void keep_newest();
  std::optional<std::filesystem::path> newest() const;
  /// The run is over: the next one in this folder is not told of it.
  void finish() { folder_ = {}; }

 private:
  void point_to(const char* pointer, std::optional<int64_t> step) const;
  void prune();
  bool is_best(int64_t step) const { return std::find(best_.begin(), best_.end(), step) != best_.end(); }

  CheckpointConfig config_;
  Warn warn_;
  disk::FileDescriptor folder_;  // locked while the run lives
  CheckpointRecord record_;
  std::vector<int64_t> best_;
};

}  // namespace stratagem
