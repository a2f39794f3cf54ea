// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/loop/checkpoints.hpp"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <charconv>
#include <fstream>

#include "base/disk.hpp"
#include "base/error.hpp"
#include "base/safetensors.hpp"

namespace stratagem {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view name_start = "step-";
constexpr size_t num_digits = 8;
constexpr const char* last_name = "last";
constexpr const char* best_name = "best";

/// The numbers of the checkpoints in a folder, ascending.
std::set<int64_t> steps_in(const fs::path& dir) {
  std::set<int64_t> steps;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    const auto step = step_of(entry.path().filename().string());
    if (step && entry.is_directory(error)) steps.insert(*step);
  }
  return steps;
}

/// The checkpoint that `last` or `best` names.
std::optional<int64_t> named_by(const fs::path& pointer) {
  std::ifstream in(pointer);
  std::string name;
  std::getline(in, name);
  return step_of(name);
}

/// Of a strategy of somebody else's, whose files we don't know, it may be one nevertheless.
bool is_like_checkpoint(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename() == "state.json" || entry.path().extension() == ".safetensors") return true;
  }
  return false;
}

}  // namespace

std::string checkpoint_name(int64_t step) {
  std::string digits = std::to_string(step);
  if (digits.size() < num_digits) digits.insert(0, num_digits - digits.size(), '0');
  return std::string(name_start) + digits;
}

std::optional<int64_t> step_of(const std::string& name) {
  if (name.rfind(name_start, 0) != 0) return std::nullopt;
  int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data() + name_start.size(), name.data() + name.size(), step);
  if (error != std::errc() || checkpoint_name(step) != name) return std::nullopt;
  return step;
}

std::vector<fs::path> checkpoint_candidates(const fs::path& given) {
  fs::path dir = fs::absolute(given).lexically_normal();
  if (!dir.has_filename()) dir = dir.parent_path();  // "run/step-00000200/"
  if (fs::is_regular_file(dir)) {
    const auto step = named_by(dir);
    if (!step) throw not_found(dir.string(), " is a file that names no checkpoint");
    const fs::path named = dir.parent_path() / checkpoint_name(*step);
    if (!fs::is_directory(named)) throw not_found(dir.string(), " names ", checkpoint_name(*step), ", which is not there");
    return {named};
  }
  if (!fs::is_directory(dir)) throw not_found("there is no checkpoint folder ", dir.string());
  std::set<int64_t> steps = steps_in(dir);
  const auto last = named_by(dir / last_name);
  if (steps.empty() && !last) {
    if (fs::is_empty(dir)) throw not_found(dir.string(), " holds no checkpoint: it is empty");
    return {dir};
  }
  std::vector<fs::path> candidates;
  if (last && steps.erase(*last) != 0) candidates.push_back(dir / checkpoint_name(*last));
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) candidates.push_back(dir / checkpoint_name(*step));
  if (candidates.empty()) throw not_found(dir.string(), " holds no checkpoint; its file \"last\" names ", checkpoint_name(*last));
  return candidates;
}

std::string damage_of(const fs::path& checkpoint) {
  try {
    bool empty = true;
    for (const auto& entry : fs::directory_iterator(checkpoint)) {
      empty = false;
      // Opening one checks its header against its size.
      if (entry.path().extension() == ".safetensors") const SafetensorsFile file(Storage().open(entry.path().string()));
    }
    return empty ? concat(checkpoint.string(), " is empty") : "";
  } catch (const Error& error) {
    return error.message;
  } catch (const std::exception& error) {
    return concat(checkpoint.string(), ": ", error.what());
  }
}

Checkpoints::Checkpoints(CheckpointConfig config, std::optional<int64_t> resumed_step, Warn warn,
                         const std::optional<CheckpointRecord>& record)
    : config_(std::move(config)), warn_(std::move(warn)) {
  for (const char* pointer : {last_name, best_name}) {
    if (pointer == best_name && !config_.monitor) continue;
    if (fs::is_directory(config_.dir / pointer)) {
      throw failed_precondition((config_.dir / pointer).string(),
                                " is a folder, and a run keeps the name of a checkpoint in a file ",
                                "called so: move it away, or give another /checkpoint/dir");
    }
  }
  // Not on what has no locks (some network file systems), and not to keep anybody out: told is enough.
  folder_ = disk::FileDescriptor(open(config_.dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder_.number() >= 0 && flock(folder_.number(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    warn_(concat("another run writes its checkpoints to ", config_.dir.string(),
                 ", too: those of the same step replace each other; give each run a /checkpoint/dir of its own"));
  }
  size_t num_others = 0;
  for (const int64_t step : steps_in(config_.dir)) {
    const fs::path folder = config_.dir / checkpoint_name(step);
    if (const std::string damage = damage_of(folder); !damage.empty()) {
      warn_(
          concat("the checkpoint ", folder.string(), " can't be read (", damage, "); it stays, and keep_last doesn't count it"));
    } else if (resumed_step && (record ? record->own.contains(step) : step <= *resumed_step)) {
      record_.own.insert(step);
      if (record && record->for_being_best.contains(step)) record_.for_being_best.insert(step);
    } else {
      ++num_others;
      if (!is_like_checkpoint(folder)) {
        warn_(concat(folder.string(), " doesn't look like a checkpoint (no state.json, no .safetensors): a save of step ", step,
                     " may be refused; move it away, or give another /checkpoint/dir"));
      }
    }
  }
  if (num_others != 0) {
    warn_(concat(config_.dir.string(), " holds ", num_others, " checkpoint", num_others == 1 ? "" : "s",
                 " that this run does not continue; they stay until one of the same step replaces them"));
  }
}

std::string Checkpoints::why_not(int64_t step) const {
  const fs::path folder = config_.dir / checkpoint_name(step);
  std::error_code error;
  if (!fs::is_directory(folder, error)) return concat("is not in ", config_.dir.string());
  const std::string damage = damage_of(folder);
  return damage.empty() ? concat("is another run's in ", config_.dir.string()) : concat("can't be read (", damage, ")");
}

bool Checkpoints::due(int64_t step) const { return config_.every_n_steps && step != 0 && step % *config_.every_n_steps == 0; }

void Checkpoints::save(int64_t step, const Save& save, std::vector<int64_t> best, bool for_being_best) {
  disk::make_folders(config_.dir);
  save((config_.dir / checkpoint_name(step)).string());
  record_ = record_with(step, for_being_best);
  best_ = std::move(best);
  // In this order: a run that is killed in between goes on from an older one, which knows the older best.
  if (!best_.empty()) {
    point_to(best_name, best_.front());
  } else if (config_.monitor || named_by(config_.dir / best_name) == step) {
    point_to(best_name, std::nullopt);  // else it is that of a run with a monitor, and stays
  }
  point_to(last_name, step);
  prune();
}

CheckpointRecord Checkpoints::record_with(int64_t step, bool for_being_best) const {
  CheckpointRecord record = record_;
  record.own.insert(step);
  if (for_being_best) {
    record.for_being_best.insert(step);
  } else {
    record.for_being_best.erase(step);
  }
  return record;
}

void Checkpoints::keep_newest() {
  if (!record_.own.empty() && record_.for_being_best.erase(*record_.own.rbegin()) != 0) prune();
}

void Checkpoints::point_to(const char* pointer, std::optional<int64_t> step) const {
  const fs::path file = config_.dir / pointer;
  const auto before = named_by(file);
  if (before == step) return;
  if (!step) return disk::remove(file);
  const std::string text = checkpoint_name(*step) + "\n";
  disk::replace_file(file, {text});
}

void Checkpoints::prune() {
  // The new checkpoint is safe: that an old one stays is no reason to end a run.
  const auto try_to = [&](const auto& remove) {
    try {
      remove();
    } catch (const Error& error) {
      warn_(error.message);
    }
  };
  try_to([&] { disk::remove_leftovers(config_.dir); });
  const int64_t newest = *record_.own.rbegin();
  int64_t num_counted = 0;
  std::vector<int64_t> gone;
  for (auto step = record_.own.rbegin(); step != record_.own.rend(); ++step) {
    const bool counts = !record_.for_being_best.contains(*step) && (!config_.keep_last || num_counted++ < *config_.keep_last);
    if (!counts && *step != newest && !is_best(*step)) gone.push_back(*step);
  }
  for (const int64_t step : gone) {
    try_to([&] { disk::remove(config_.dir / checkpoint_name(step)); });
    record_.own.erase(step);
    record_.for_being_best.erase(step);
  }
}

std::optional<fs::path> Checkpoints::newest() const {
  if (record_.own.empty()) return std::nullopt;
  return config_.dir / checkpoint_name(*record_.own.rbegin());
}

}  // namespace stratagem
