// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/config/overrides.hpp"

#include "base/error.hpp"
#include "base/json.hpp"

namespace stratagem {
namespace {

Json value_of(const std::string& text, const std::string& source) {
  if (!Json::accept(text)) return text;
  return parse_json(text, source);
}

bool is_utf8(const std::string& text) {
  try {
    static_cast<void>(Json(text).dump());
    return true;
  } catch (const Json::type_error&) {
    return false;
  }
}

void apply_override(Json& config, const std::string& text) {
  if (!is_utf8(text)) throw invalid_argument("the override ", shown(text), ": this text is not UTF-8");
  const std::string source = concat("the override ", shown(text));
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) {
    throw invalid_argument(source, ": write it as key.key=value, as in optimizer.lr=0.01");
  }
  const std::string path = text.substr(0, equals);
  Json* place = &config;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const std::string key = path.substr(begin, end - begin);
    if (key.empty()) throw invalid_argument(source, ": an empty key in \"", path, "\"");
    if (place->is_null()) *place = Json::object();
    if (!place->is_object()) {
      throw invalid_argument(source, ": \"", path.substr(0, begin - 1), "\" is ", shown(*place),
                             ", which has no keys; set it as a whole, in JSON");
    }
    place = &(*place)[key];
    begin = end + 1;
  }
  *place = value_of(text.substr(equals + 1), source);
}

}  // namespace

void apply_overrides(Json& config, const std::vector<std::string>& overrides) {
  for (const std::string& text : overrides) apply_override(config, text);
}

}  // namespace stratagem
