// SPDX-License-Identifier: Apache-2.0
//
// JSON from files of others: nlohmann's parser with three rules more: a limit on the depth, no key twice in one object (the parser
// would keep the last without a word), and no zero byte (which it takes for the end).
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace stratagem {

struct JsonRules {
  size_t max_depth = 64;
  bool allow_comments = false;
};

/// Takes an entry of the outermost object, which then doesn't get it.
template <class Json>
using TakeEntry = std::function<void(const std::string& key, const Json& value)>;

/// Json: nlohmann::json, or nlohmann::ordered_json to keep the order of keys. An error starts with `where` and says the line and
/// column, or the JSON pointer of a key that is there twice (STG_INVALID_ARGUMENT). With `take`, the outermost object's entries are
/// handed over one by one as they are read: the parser looks at all of an object again after each nested one, which for hundreds of
/// thousands takes minutes.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, const std::string& where, JsonRules rules = {}, const TakeEntry<Json>& take = nullptr);

extern template nlohmann::json parse_json(std::string_view, const std::string&, JsonRules, const TakeEntry<nlohmann::json>&);
extern template nlohmann::ordered_json parse_json(std::string_view, const std::string&, JsonRules,
                                                  const TakeEntry<nlohmann::ordered_json>&);

/// `text` for a message: of a long one its beginning, of valid UTF-8 whole characters.
std::string shortened(std::string text);

}  // namespace stratagem
