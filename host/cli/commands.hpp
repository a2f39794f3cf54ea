// SPDX-License-Identifier: Apache-2.0
//
// The commands. Each returns the exit code.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace stratagem::cli {

struct RunOptions {
  std::string config;
  std::string checkpoint;
  std::string output;
  std::vector<std::string> overrides;
  bool json = false;
};

/// fit, validate, test, predict: `stage` is STG_STAGE_*.
int run(uint64_t stage, const RunOptions& options);
int plugins(const std::string& config, bool json);
/// What is wrong with this machine for a run; `failed` where something is.
int doctor(const std::string& config, bool json);
int inspect(const std::string& file, bool json);
/// Of the config, or of the options of a strategy or a model.
int schema(const std::string& strategy, const std::string& model);

}  // namespace stratagem::cli
