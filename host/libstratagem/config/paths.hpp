// SPDX-License-Identifier: Apache-2.0
//
// Paths of a config: relative to the config's folder (data: to data.root), never to the working directory, and with no `~`: a shell
// expands that, JSON doesn't, and a folder named `~` is not what anybody wants.
#pragma once

#include <filesystem>
#include <string>

#include "libstratagem/config/problems.hpp"

namespace stratagem {

/// `text`, which stands at `pointer`, as an absolute path without "." and "..".
std::filesystem::path config_path(const std::string& text, const std::filesystem::path& base, const std::string& pointer,
                                  Problems& problems);

/// Adds a problem unless `file` can be opened for reading and is no folder.
void require_readable(const std::filesystem::path& file, const std::string& pointer, Problems& problems);

}  // namespace stratagem
