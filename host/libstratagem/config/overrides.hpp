// SPDX-License-Identifier: Apache-2.0
//
// `--set a.b=value`: the command line wins over the file, a later one over an earlier one.
#pragma once

#include <string>
#include <vector>

#include "libstratagem/config/json_text.hpp"

namespace stratagem {

/// Applies "a.b=value" texts in order. The value is read as JSON where it is valid JSON, else as text; null removes the key. Throws
/// Error{INVALID_ARGUMENT} with the text itself for one that is malformed.
void apply_overrides(Json& config, const std::vector<std::string>& overrides);

}  // namespace stratagem
