// SPDX-License-Identifier: Apache-2.0
//
// What a plugin says about itself in its ELF note (abi/stratagem/plugin.h), read without running any of it: a folder scan must not
// execute what it finds. So every byte is foreign here, and every error names the file by its absolute path.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace stratagem {

struct PluginNote {
  std::string name;
  std::string version;
  uint32_t abi_major = 0;
  uint32_t min_minor = 0;
  uint32_t max_minor = 0;
  std::vector<std::string> strategies;
  std::vector<std::string> models;
  std::string libtorch;  ///< these three: empty where the plugin doesn't link it
  std::string cuda;
  std::string nccl;
};

/// The note as it stands, keys and types checked. STG_NOT_FOUND for a shared library without one: it may be anything. Keys that this version doesn't know are left in.
nlohmann::json read_note(const std::filesystem::path& path);
/// The folders that the loader searches for what the library needs (DT_RUNPATH, else DT_RPATH), $ORIGIN replaced; empty if it names none.
std::vector<std::filesystem::path> read_run_path(const std::filesystem::path& path);
/// The note's parts.
PluginNote read_plugin_note(const std::filesystem::path& path);

}  // namespace stratagem
