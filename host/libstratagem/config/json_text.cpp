// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/config/json_text.hpp"

#include "base/json.hpp"

namespace stratagem {

void drop_nulls(Json& value) {
  if (value.is_object()) {
    for (auto member = value.begin(); member != value.end();) {
      if (member->is_null()) {
        member = value.erase(member);
      } else {
        drop_nulls(*member++);
      }
    }
  } else if (value.is_array()) {
    for (Json& item : value) drop_nulls(item);
  }
}

std::string pointer_to(const std::string& parent, const std::string& key) {
  std::string pointer = parent + "/";
  for (const char c : key) {
    if (c == '~') {
      pointer += "~0";
    } else if (c == '/') {
      pointer += "~1";
    } else {
      pointer += c;
    }
  }
  return pointer;
}

std::string shown(const Json& value) { return shortened(value.dump(-1, ' ', false, Json::error_handler_t::replace)); }

}  // namespace stratagem
