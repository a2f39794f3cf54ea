// SPDX-License-Identifier: Apache-2.0
//
// What a run writes must not be what it reads, nor what it writes elsewhere.
#pragma once

#include <filesystem>

#include "libstratagem/config/config.hpp"
#include "libstratagem/config/problems.hpp"

namespace stratagem {

/// Adds a problem where a file of the config would be overwritten by metrics or checkpoints. Throws Error{INVALID_ARGUMENT} where it would be
/// by `predictions` (empty: none).
void check_overwrites(const Config& config, Command command, const std::filesystem::path& predictions, Problems& problems);

}  // namespace stratagem
