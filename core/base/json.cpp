// SPDX-License-Identifier: Apache-2.0
#include "base/json.hpp"

#include <unordered_set>
#include <vector>

#include "base/error.hpp"

namespace stratagem {

namespace {

// Follows the parser from event to event. levels_[d] is the container at depth d, counted from 1.
template <class Json>
class Watcher {
 public:
  using Event = typename Json::parse_event_t;

  Watcher(const std::string& where, size_t max_depth) : where_(where), max_depth_(max_depth) {}

  void see(size_t depth, Event event, const Json& value) {
    if (event == Event::key) return see_key(depth, value.template get_ref<const std::string&>());
    if (event == Event::object_end || event == Event::array_end) return;
    if (depth > 0 && levels_[depth].is_array) ++levels_[depth].num_items;
    if (event == Event::value) return;
    if (depth >= max_depth_) throw invalid_argument(where_, ": nested deeper than ", max_depth_, " levels");
    levels_.resize(depth + 2);
    levels_[depth + 1] = {};
    levels_[depth + 1].is_array = event == Event::array_start;
  }

  /// Whether an entry of the outermost object is complete with this event.
  static bool ends_entry(size_t depth, Event event) {
    return depth == 1 && (event == Event::value || event == Event::object_end || event == Event::array_end);
  }
  bool root_is_object() const { return levels_.size() > 1 && !levels_[1].is_array; }
  const std::string& entry_key() const { return levels_[1].key; }

 private:
  struct Level {
    bool is_array = false;
    size_t num_items = 0;
    std::string key;
    std::unordered_set<std::string> keys;
  };

  void see_key(size_t depth, const std::string& key) {
    levels_[depth].key = key;
    if (!levels_[depth].keys.insert(key).second) throw invalid_argument(where_, ": the key ", pointer(depth), " is there twice");
  }

  std::string pointer(size_t depth) const {
    typename Json::json_pointer path;
    for (size_t d = 1; d <= depth; ++d) {
      if (levels_[d].is_array) {
        path /= levels_[d].num_items - 1;
      } else {
        path /= levels_[d].key;
      }
    }
    return path.to_string();
  }

  const std::string& where_;
  size_t max_depth_;
  std::vector<Level> levels_{1};
};

// The parser tells the token that it stumbled over, and that may be all of the file.
std::string without_long_token(const std::string& message) {
  constexpr std::string_view before = "last read: '", after = "'";
  const size_t begin = message.find(before);
  const size_t end = message.rfind(after);
  if (begin == std::string::npos || end <= begin + before.size()) return message;
  const size_t token = begin + before.size();
  return message.substr(0, token) + shortened(message.substr(token, end - token)) + message.substr(end);
}

}  // namespace

template <class Json>
Json parse_json(std::string_view text, const std::string& where, JsonRules rules, const TakeEntry<Json>& take) {
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos)
    throw invalid_argument(where, ": not JSON: there is a zero byte, after ", zero, " others");
  Watcher<Json> watcher{where, rules.max_depth};
  try {
    return Json::parse(
        text.begin(), text.end(),
        [&](int depth, typename Json::parse_event_t event, Json& value) {
          watcher.see(static_cast<size_t>(depth), event, value);
          if (!take || !watcher.ends_entry(static_cast<size_t>(depth), event) || !watcher.root_is_object()) return true;
          take(watcher.entry_key(), value);
          return false;
        },
        true, rules.allow_comments);
  } catch (const nlohmann::json::exception& error) {
    throw invalid_argument(where, ": not JSON: ", without_long_token(error.what()));
  }
}

std::string shortened(std::string text) {
  constexpr size_t longest = 80;
  if (text.size() <= longest) return text;
  size_t end = longest - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

template nlohmann::json parse_json(std::string_view, const std::string&, JsonRules, const TakeEntry<nlohmann::json>&);
template nlohmann::ordered_json parse_json(std::string_view, const std::string&, JsonRules,
                                           const TakeEntry<nlohmann::ordered_json>&);

}  // namespace stratagem
