// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/loop/metrics.hpp"

#include <fcntl.h>

#include <chrono>
#include <cstring>
#include <sstream>

#include "base/disk.hpp"
#include "base/error.hpp"

namespace stratagem {
namespace fs = std::filesystem;
namespace {

/// Whether a run that goes on from `position` would write this line again. A line that can't be read is the half of a killed run.
bool told_again(const std::string& line, const Position& position) {
  try {
    const Json json = Json::parse(line);
    const auto step = json.at("step").get<int64_t>();
    if (step != position.step) return step > position.step;
    // A checkpoint is written before a swap that falls on its step.
    if (json.at("stage") == "swap") return position.planned_swap < position.step;
    return json.at("stage") == "validate" && position.validation_pending;
  } catch (const Json::exception&) {
    return true;
  }
}

fs::path previous(const fs::path& path) { return path.string() + ".previous"; }

/// What is dropped stays in the previous file: the checkpoint may be an old one, and the lines after it all that is left of days.
void keep_until(const fs::path& path, const Position& position) {
  const disk::OpenFile file = disk::open_for_reading(path);
  std::string before(file.size_bytes, '\0'), kept;
  disk::read_exactly(file, 0, before.data(), before.size());
  std::istringstream in(before);
  for (std::string line; std::getline(in, line);) {
    if (!told_again(line, position)) kept += line + '\n';
  }
  if (kept == before) return;
  disk::replace_file(previous(path), {before});
  disk::replace_file(path, {kept});
}

/// Of anything else (a pipe, /dev/null, a link to them) nothing can be kept, and its name is not ours to give away.
bool is_plain_file(const fs::path& path) { return fs::symlink_status(path).type() == fs::file_type::regular; }

}  // namespace

std::string metrics_line(int64_t step, int64_t epoch, const std::string& stage, const nlohmann::ordered_json& values,
                         double time_s) {
  nlohmann::ordered_json line = {{"step", step}, {"epoch", epoch}, {"stage", stage}};
  for (const auto& [name, value] : values.items()) {
    // A model's metric may have the name of one of ours.
    const std::string key = line.contains(name) || name == "time" ? "model/" + name : name;
    line[key] = value;  // the library writes null for what is not finite
  }
  line["time"] = time_s;
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

void MetricsFile::check(const fs::path& path) {
  // A pipe's reader would take the closing for the end.
  if (fs::is_fifo(path)) return;
  const disk::FileDescriptor file(open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_NOCTTY | O_CLOEXEC, 0666));
  if (file.number() < 0) throw disk::errno_error(errno, "write", path);
}

MetricsFile::MetricsFile(const std::optional<fs::path>& path, const std::optional<Position>& resumed_from,
                         std::function<void(const std::string& line)> listener)
    : path_(path), listener_(std::move(listener)) {
  if (!path_) return;
  fs::create_directories(path_->parent_path());
  if (is_plain_file(*path_)) {
    if (resumed_from) {
      keep_until(*path_, *resumed_from);
    } else if (fs::file_size(*path_) != 0) {
      fs::rename(*path_, previous(*path_));
    }
  }
  out_.open(*path_, std::ios::app);
  if (!out_) throw invalid_argument("/metrics/path: can't write ", path_->string(), ": ", std::strerror(errno));
}

void MetricsFile::write(const Position& position, const std::string& stage, const nlohmann::ordered_json& values) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const double time_s = static_cast<double>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count()) / 1000;
  const std::string line = metrics_line(position.step, position.epoch, stage, values, time_s);
  if (listener_) listener_(line);
  if (!path_) return;
  out_ << line << '\n' << std::flush;
  if (!out_) throw Error(STG_RESOURCE_EXHAUSTED, concat("can't write to ", path_->string(), ": ", std::strerror(errno)));
}

}  // namespace stratagem
