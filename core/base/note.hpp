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
/// What the dynamic loader goes by when it looks for what a library needs.
struct DynamicSection {
  std::vector<std::string> needed;              ///< names, as "libc.so.6"
  std::vector<std::filesystem::path> run_path;  ///< folders (DT_RUNPATH, else DT_RPATH), $ORIGIN replaced
  bool is_run_path_first = false;               ///< DT_RPATH alone: it comes before LD_LIBRARY_PATH
};
DynamicSection read_dynamic_section(const std::filesystem::path& path);
/// Its run_path.
std::vector<std::filesystem::path> read_run_path(const std::filesystem::path& path);
/// The note's parts.
PluginNote read_plugin_note(const std::filesystem::path& path);

}  // namespace stratagem
