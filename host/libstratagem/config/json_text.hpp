// SPDX-License-Identifier: Apache-2.0
//
// Small things about the JSON of a config: null counts as absent, everywhere; places are JSON pointers.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace stratagem {

using Json = nlohmann::json;

/// Removes the members of objects that are null; nulls in arrays stay, and fail their type.
void drop_nulls(Json& value);

/// One more step of a JSON pointer, with ~ and / escaped.
std::string pointer_to(const std::string& parent, const std::string& key);

/// The value as it stands in the text, cut to what fits a message.
std::string shown(const Json& value);

}  // namespace stratagem
