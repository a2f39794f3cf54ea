// SPDX-License-Identifier: Apache-2.0
//
// The metrics file: JSON Lines, strict JSON. Each line holds step, epoch, stage, the values by name, and time (seconds since 1970). A
// value that is not finite is null.
#pragma once

#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>

#include "libstratagem/loop/position.hpp"

namespace stratagem {

/// The line without its newline.
std::string metrics_line(int64_t step, int64_t epoch, const std::string& stage, const nlohmann::ordered_json& values,
                         double time_s);

class MetricsFile {
 public:
  /// Throws where the file can't be opened for writing. Creates it.
  static void check(const std::filesystem::path& path);

  /// Without a path, nothing is written. A new run puts an existing file aside as `<name>.previous`; a resumed one keeps the lines up
  /// to its position, since those after it are told again, and puts the whole aside if it drops any. What is no regular file is
  /// appended to.
  MetricsFile(const std::optional<std::filesystem::path>& path, const std::optional<Position>& resumed_from,
              std::function<void(const std::string& line)> listener);

  void write(const Position& position, const std::string& stage, const nlohmann::ordered_json& values);

 private:
  std::optional<std::filesystem::path> path_;
  std::ofstream out_;
  std::function<void(const std::string& line)> listener_;
};

}  // namespace stratagem
