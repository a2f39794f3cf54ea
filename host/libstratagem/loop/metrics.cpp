// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/loop/metrics.hpp"

#include <chrono>
#include <cstring>

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
    return json.at("stage") == "validate" && position.validation_pending;
  } catch (const Json::exception&) {
    return true;
  }
}

void keep_until(const fs::path& path, const Position& position) {
  std::ifstream in(path);
  const fs::path temporary = path.string() + ".tmp";
  std::ofstream out(temporary);
  for (std::string line; std::getline(in, line);) {
    if (!told_again(line, position)) out << line << '\n';
  }
  out.close();
  if (!out) throw Error(STG_RESOURCE_EXHAUSTED, concat("can't write ", temporary.string()));
  fs::rename(temporary, path);
}

}  // namespace

std::string metrics_line(int64_t step, int64_t epoch, const std::string& stage, const std::map<std::string, double>& values,
                         double time_s) {
  nlohmann::ordered_json line = {{"step", step}, {"epoch", epoch}, {"stage", stage}};
  for (const auto& [name, value] : values) {
    // A model's metric may have the name of one of ours.
    const std::string key = line.contains(name) || name == "time" ? "model/" + name : name;
    line[key] = value;  // the library writes null for what is not finite
  }
  line["time"] = time_s;
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

MetricsFile::MetricsFile(const std::optional<fs::path>& path, const std::optional<Position>& resumed_from,
                         std::function<void(const std::string& line)> listener)
    : path_(path), listener_(std::move(listener)) {
  if (!path_) return;
  fs::create_directories(path_->parent_path());
  if (fs::exists(*path_)) {
    if (resumed_from) {
      keep_until(*path_, *resumed_from);
    } else {
      fs::rename(*path_, path_->string() + ".previous");
    }
  }
  out_.open(*path_, std::ios::app);
  if (!out_) throw invalid_argument("/metrics/path: can't write ", path_->string(), ": ", std::strerror(errno));
}

void MetricsFile::write(const Position& position, const std::string& stage, const std::map<std::string, double>& values) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const double time_s = static_cast<double>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count()) / 1000;
  const std::string line = metrics_line(position.step, position.epoch, stage, values, time_s);
  if (listener_) listener_(line);
  if (!path_) return;
  out_ << line << '\n' << std::flush;
  if (!out_) throw Error(STG_RESOURCE_EXHAUSTED, concat("can't write to ", path_->string(), ": ", std::strerror(errno)));
}

}  // namespace stratagem
