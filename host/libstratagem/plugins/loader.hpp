// SPDX-License-Identifier: Apache-2.0
//
// Loading a plugin: its note is read and judged before any of its code runs, then it is opened by its absolute path, probed, and its
// table is checked against the note. A plugin is never unloaded: what it gave out may live anywhere (thread-local destructors, tensors,
// a registered kernel), so its handle is kept for the life of the process, on purpose.
#pragma once

#include <stratagem/plugin.h>

#include <filesystem>
#include <string>
#include <vector>

#include "libstratagem/plugins/search.hpp"

namespace stratagem {

/// A loaded plugin. Lives as long as the process.
struct Plugin {
  std::filesystem::path path;
  Json note;
  stg_plugin table{};                   // slots that the plugin's headers lack are null
  const stg_plugin* address = nullptr;  // the plugin's own
};

/// Loads the file, once per process. Throws Error{FAILED_PRECONDITION} with the file and the reason: not ELF, no plugin, another ABI,
/// another LibTorch, a missing dependency, a table that is not as its note says; PERMISSION_DENIED where others can write it.
const Plugin& load_plugin(const std::filesystem::path& file);

/// What a plugin offers, by name; an empty name means the only one. Throws INVALID_ARGUMENT with the names that there are.
const stg_strategy_factory& find_strategy(const Plugin& plugin, const std::string& name);
const stg_model_factory& find_model(const Plugin& plugin, const std::string& name);

/// The options schema of a factory as JSON; an empty one allows no options.
Json options_schema(stg_string text, const std::string& owner);

}  // namespace stratagem
