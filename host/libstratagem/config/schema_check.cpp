// SPDX-License-Identifier: Apache-2.0
//
// Valijson finds where a config breaks its schema; its texts don't say what would be right. So only its places are taken, and each
// place is explained from the schema: the unknown keys with the nearest known one, the type or the values that are wanted.
#include <algorithm>
#include <limits>
#include <valijson/adapters/nlohmann_json_adapter.hpp>
#include <valijson/schema.hpp>
#include <valijson/schema_parser.hpp>
#include <valijson/validator.hpp>

#include "base/error.hpp"
#include "libstratagem/config/problems.hpp"

namespace stratagem {
namespace {

using Keys = std::vector<std::string>;

const Json& resolve(const Json& schema, const Json& root) {
  const auto ref = schema.find("$ref");
  if (ref == schema.end()) return schema;
  const auto target = ref->get<std::string>();
  return resolve(root.at(Json::json_pointer(target.substr(target.find('#') + 1))), root);
}

/// The subschema of a member or item; null where the schema says nothing about it.
const Json* subschema(const Json& schema, const Json& root, const Json& value, const std::string& key) {
  const Json* next = nullptr;
  if (value.is_array()) {
    if (const auto items = schema.find("items"); items != schema.end() && items->is_object()) next = &*items;
  } else if (const auto properties = schema.find("properties"); properties != schema.end() && properties->contains(key)) {
    next = &(*properties)[key];
  }
  return next == nullptr ? nullptr : &resolve(*next, root);
}

std::string join_with_or(const std::vector<std::string>& items) {
  std::string text;
  for (size_t i = 0; i < items.size(); ++i) text += concat(i == 0 ? "" : i + 1 == items.size() ? " or " : ", ", items[i]);
  return text;
}

std::string type_words(const Json& type) {
  const auto words = [](const Json& name) -> std::string {
    if (name == "string") return "a text";
    if (name == "integer") return "a whole number";
    if (name == "number") return "a number";
    if (name == "boolean") return "true or false";
    if (name == "array") return "a list";
    if (name == "object") return "an object";
    return name.get<std::string>();
  };
  if (!type.is_array()) return words(type);
  std::vector<std::string> all;
  for (const Json& name : type) all.push_back(words(name));
  return join_with_or(all);
}

/// What the schema wants, in words: "a whole number, at least 1".
std::string wanted(const Json& schema, const Json& root) {
  if (schema.contains("const")) return shown(schema["const"]);
  std::vector<std::string> alternatives;
  if (schema.contains("enum")) {
    for (const Json& value : schema["enum"]) alternatives.push_back(shown(value));
    return join_with_or(alternatives);
  }
  for (const char* keyword : {"anyOf", "oneOf"}) {
    if (!schema.contains(keyword)) continue;
    for (const Json& child : schema[keyword]) alternatives.push_back(wanted(resolve(child, root), root));
    return join_with_or(alternatives);
  }
  std::string text = schema.contains("type") ? type_words(schema["type"]) : "something else";
  if (schema.contains("items") && schema["items"].is_object())
    text += concat(" (each: ", wanted(resolve(schema["items"], root), root), ")");
  const auto bound = [&](const char* keyword, const char* words, const char* unit = "") {
    if (schema.contains(keyword)) text += concat(words, shown(schema[keyword]), unit);
  };
  bound("minimum", ", at least ");
  bound("exclusiveMinimum", ", above ");
  bound("maximum", ", at most ");
  bound("exclusiveMaximum", ", below ");
  bound("minItems", ", at least ", " long");
  bound("maxItems", ", at most ", " long");
  bound("minLength", ", at least ", " characters long");
  bound("pattern", ", matching ");
  return text;
}

std::vector<std::string> keys_of(const Json& object) {
  std::vector<std::string> keys;
  for (const auto& member : object.items()) keys.push_back(member.key());
  return keys;
}

/// Unknown and missing keys of an object. Returns whether any was found.
bool explain_keys(const Json& schema, const Json& root, const Json& value, const std::string& pointer, const std::string& owner,
                  Problems& problems) {
  const size_t before = problems.all().size();
  const Json properties = schema.value("properties", Json::object());
  if (schema.contains("additionalProperties") && schema["additionalProperties"] == false) {
    for (const std::string& key : keys_of(value)) {
      if (properties.contains(key)) continue;
      problems.add(pointer_to(pointer, key), concat("unknown key", owner, suggestion(key, keys_of(properties))));
    }
  }
  for (const Json& key : schema.value("required", Json::array())) {
    const auto name = key.get<std::string>();
    if (value.contains(name)) continue;
    const Json of_key = properties.contains(name) ? resolve(properties[name], root) : Json::object();
    const std::string is = of_key.contains("type") ? concat(", ", type_words(of_key["type"]), ",") : "";
    problems.add(pointer_to(pointer, name), concat("this key", is, " is required", owner));
  }
  return problems.all().size() != before;
}

/// A text that is near one of an enum's.
std::string enum_suggestion(const Json& schema, const Json& value) {
  if (!schema.contains("enum") || !value.is_string()) return {};
  std::vector<std::string> names;
  for (const Json& name : schema["enum"]) {
    if (name.is_string()) names.push_back(name.get<std::string>());
  }
  const std::string best = nearest(value.get<std::string>(), names);
  return best.empty() ? "" : concat("; did you mean \"", best, "\"?");
}

/// Explains the place `keys` below `value`, found to be wrong. `description` is Valijson's, for keywords that this doesn't know.
void explain(const Json& root, const Json& value, const Keys& keys, const std::string& start, const std::string& owner,
             const std::string& description, Problems& problems) {
  const Json* schema = &resolve(root, root);
  const Json* place = &value;
  std::string pointer = start;
  for (const std::string& key : keys) {
    schema = schema == nullptr ? nullptr : subschema(*schema, root, *place, key);
    place = place->is_array() ? &(*place)[std::stoul(key)] : &(*place)[key];
    pointer = pointer_to(pointer, key);
  }
  if (schema == nullptr) return problems.add(pointer, concat(shown(*place), ": ", description));
  if (place->is_object() && explain_keys(*schema, root, *place, pointer, owner, problems)) return;
  // Valijson takes a number past int64 for a negative one.
  const bool too_large = place->is_number_unsigned() && place->get<uint64_t>() > std::numeric_limits<int64_t>::max();
  problems.add(pointer, concat(shown(*place), " is not allowed", owner, "; wanted: ", wanted(*schema, root),
                               too_large ? ", at most 9223372036854775807" : "", enum_suggestion(*schema, *place)));
}

/// "<root>" and "[key]" to plain keys.
Keys keys_of_context(const std::vector<std::string>& context) {
  Keys keys;
  for (size_t i = 1; i < context.size(); ++i) keys.push_back(context[i].substr(1, context[i].size() - 2));
  return keys;
}

bool is_prefix(const Keys& shorter, const Keys& longer) {
  return shorter.size() < longer.size() && std::equal(shorter.begin(), shorter.end(), longer.begin());
}

struct Place {
  Keys keys;
  std::string description;
};

/// The places that are wrong themselves. A parent is reported because of its child, and below an anyOf every alternative complains,
/// where the place of the anyOf itself says it all: both are left out.
std::vector<Place> places_of(const valijson::ValidationResults& results) {
  std::vector<Place> places;
  std::vector<Keys> alternatives;
  for (const auto& error : results) {
    const std::string& text = error.description;
    const auto starts_with = [&](const char* start) { return text.rfind(start, 0) == 0; };
    const Keys keys = keys_of_context(error.context);
    if (text.find("anyOf") != std::string::npos) alternatives.push_back(keys);
    const bool about_child = starts_with("Failed to validate against schema associated") ||
                             starts_with("Failed to validate item") || starts_with("Failed to validate against additional");
    const bool known = std::any_of(places.begin(), places.end(), [&](const Place& place) { return place.keys == keys; });
    if (!about_child && !known) places.push_back({keys, text});
  }
  std::erase_if(places, [&](const Place& place) {
    return std::any_of(alternatives.begin(), alternatives.end(), [&](const Keys& keys) { return is_prefix(keys, place.keys); });
  });
  return places;
}

void parse_schema(const Json& text, const std::string& owner, valijson::Schema& schema) {
  valijson::SchemaParser parser(valijson::SchemaParser::kDraft7);
  try {
    parser.populateSchema(valijson::adapters::NlohmannJsonAdapter(text), schema);
  } catch (const std::exception& error) {
    throw failed_precondition("the schema", owner, " is not valid: ", error.what());
  }
}

}  // namespace

void check_schema(const Json& schema_text, const Json& value, const std::string& pointer, const std::string& owner,
                  Problems& problems) {
  valijson::Schema schema;
  parse_schema(schema_text, owner, schema);
  valijson::Validator validator(valijson::Validator::kStrongTypes);
  valijson::ValidationResults results;
  if (validator.validate(schema, valijson::adapters::NlohmannJsonAdapter(value), &results)) return;

  try {
    for (const Place& place : places_of(results))
      explain(schema_text, value, place.keys, pointer, owner, place.description, problems);
  } catch (const Json::exception& error) {
    throw failed_precondition("the schema", owner, " is not valid: ", error.what());
  }
}

}  // namespace stratagem
