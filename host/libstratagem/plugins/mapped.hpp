// SPDX-License-Identifier: Apache-2.0
//
// A process holds one LibTorch: glibc binds a second plugin to the copy that is mapped, by name, whatever the plugin was built with.
// So before a plugin is opened, the LibTorch of its note is compared with the one that is there.
#pragma once

#include <filesystem>
#include <string>

#include "libstratagem/config/json_text.hpp"

namespace stratagem {

/// Throws Error{FAILED_PRECONDITION} naming both, if another LibTorch (another minor) is mapped than the note's "libtorch".
void check_libtorch(const std::filesystem::path& plugin, const Json& note);

/// What a plugin that has just been loaded was built with is what is mapped from now on.
void remember_libtorch(const std::filesystem::path& plugin, const Json& note);

/// The version of the LibTorch that the file `libtorch_cpu` belongs to, from the files beside it; empty if they don't say.
std::string libtorch_version_beside(const std::filesystem::path& libtorch_cpu);

/// "2.15" of "2.15.0+cu132".
std::string minor_of(const std::string& version);

}  // namespace stratagem
