// SPDX-License-Identifier: Apache-2.0
//
// What a run would ask of the machine. Read from a config without checking the rest of it: a config is looked at here because it
// doesn't run yet.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "libstratagem/config/json_text.hpp"

namespace stratagem {

struct Wanted {
  std::string strategy, model;  // names to look for in the folders; empty: a path, or none
  std::vector<std::filesystem::path> plugin_path;
  std::vector<std::filesystem::path> plugin_files;  // named by their paths
  std::string accelerator = "auto";
  std::optional<int64_t> num_devices;
  std::vector<int64_t> devices;  // indices, where they are listed
  std::optional<int64_t> threads;
  std::vector<std::filesystem::path> outputs;  // folders to write to

  bool needs_gpu() const { return accelerator == "cuda"; }
};

/// Throws where the file can't be read, is no JSON, or has a path that can't be one.
Wanted read_wanted(const std::string& config_path);

}  // namespace stratagem
