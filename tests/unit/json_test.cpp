// SPDX-License-Identifier: Apache-2.0
#include "base/json.hpp"

#include "unit/support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

Error refusal(const std::string& text, JsonRules rules = {}) {
  return error_of([&] { parse_json(text, "the file x", rules); });
}

}  // namespace

TEST_CASE("JSON is read, in the order of its keys where that is wanted") {
  CHECK(parse_json(R"({"b": [1, 2.5, null, true], "a": {"é": "ü"}})", "x").dump() == R"({"a":{"é":"ü"},"b":[1,2.5,null,true]})");
  CHECK(parse_json<nlohmann::ordered_json>(R"({"b": 1, "a": 2})", "x").dump() == R"({"b":1,"a":2})");
}

TEST_CASE("what is no JSON is refused with its place") {
  check_error(refusal("{\"a\": 1,\n \"b\": }"), STG_INVALID_ARGUMENT, {"the file x", "line 2", "column 7"});
  for (const char* text : {"", "{", "{\"a\":1} x", "nan", "{'a': 1}", "[1,]", "\"\xFF\"", "\"\\ud800\""}) {
    check_error(refusal(text), STG_INVALID_ARGUMENT, {"the file x: not JSON"});
  }
}

TEST_CASE("a key that is there twice is refused by its JSON pointer") {
  check_error(refusal(R"({"seed": 1, "seed": 2})"), STG_INVALID_ARGUMENT, {"the key /seed is there twice"});
  check_error(refusal(R"({"a": {"b": 1, "c": {}, "b": 1}})"), STG_INVALID_ARGUMENT, {"the key /a/b is there twice"});
  check_error(refusal(R"({"l": [0, [], {"x": 1}, {"y": 1, "y": 2}]})"), STG_INVALID_ARGUMENT, {"the key /l/3/y is there twice"});
  check_error(refusal(R"([[1, {"a/b~": 1, "a/b~": 2}]])"), STG_INVALID_ARGUMENT, {"the key /0/1/a~1b~0 is there twice"});
  check_error(refusal("{\"a\": 1, \"\\u0061\": 2}"), STG_INVALID_ARGUMENT, {"the key /a is there twice"});
}

TEST_CASE("the entries of the outermost object can be taken one by one, in their order, and are not kept") {
  using Json = nlohmann::ordered_json;
  std::vector<std::string> taken;
  const auto take = [&](const std::string& key, const Json& value) { taken.push_back(key + value.dump()); };
  const Json rest = parse_json<Json>(R"({"b": {"x": [1]}, "a": 2, "c": [[], {}]})", "x", {}, take);
  CHECK(taken == std::vector<std::string>{R"(b{"x":[1]})", "a2", "c[[],{}]"});
  CHECK(rest.is_object());
  CHECK_FALSE(rest.contains("b"));
  taken.clear();
  CHECK(parse_json<Json>("[{\"a\": 1}]", "x", {}, take).dump() == R"([{"a":1}])");
  CHECK(taken.empty());
  check_error(error_of([&] { parse_json<Json>(R"({"a": {}, "b": 1, "a": {}})", "x", {}, take); }), STG_INVALID_ARGUMENT,
              {"the key /a is there twice"});
}

TEST_CASE("the same key in different objects is no duplicate") {
  CHECK(parse_json(R"({"a": {"a": {"a": 1}}, "b": [{"a": 1}, {"a": 2}]})", "x")["b"][1]["a"] == 2);
}

TEST_CASE("a text nested deeper than allowed is refused before it takes memory for all of it") {
  CHECK(parse_json(std::string(64, '[') + std::string(64, ']'), "x").is_array());
  check_error(refusal(std::string(65, '[') + std::string(65, ']')), STG_INVALID_ARGUMENT, {"deeper than 64 levels"});
  check_error(refusal(std::string(10'000'000, '[')), STG_INVALID_ARGUMENT, {"deeper than 64 levels"});
  check_error(refusal(R"({"a": [{}]})", {.max_depth = 2}), STG_INVALID_ARGUMENT, {"deeper than 2 levels"});
}

TEST_CASE("comments are refused unless allowed") {
  const std::string text = "{ // why\n \"a\": /* how */ 1 }";
  check_error(refusal(text), STG_INVALID_ARGUMENT, {"not JSON"});
  CHECK(parse_json(text, "x", {.allow_comments = true})["a"] == 1);
}

TEST_CASE("a zero byte is no end of the text") {
  using namespace std::string_literals;
  check_error(refusal("{\"a\": 1}\0garbage"s), STG_INVALID_ARGUMENT, {"the file x: not JSON", "zero byte", "after 8 others"});
  for (const std::string& text : {"\0{}"s, "{}\0"s, "\0"s, "{\"a\": \"\0\"}"s, "{} // \0"s})
    check_error(refusal(text, {.allow_comments = true}), STG_INVALID_ARGUMENT, {"zero byte"});
  CHECK(parse_json(R"({"a": "\u0000"})", "x")["a"] == "\0"s);  // as an escape it is a character like others
}

TEST_CASE("an error tells the place of a long text, not all of it") {
  const Error error = refusal("{\"state\": \"" + std::string(10000, 'f') + "\n\"}");
  check_error(error, STG_INVALID_ARGUMENT, {"line 2, column 0", "last read: '\"ffff", "...'"});
  CHECK(error.message.size() < 400);
  CHECK(shortened("short") == "short");
  CHECK(shortened(std::string(80, 'x')) == std::string(80, 'x'));
  CHECK(shortened(std::string(81, 'x')) == std::string(77, 'x') + "...");
  CHECK(shortened(std::string(76, 'x') + "\u00e9" + std::string(9, 'x')) == std::string(76, 'x') + "...");
}
