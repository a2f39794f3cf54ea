// SPDX-License-Identifier: Apache-2.0
#include "conformance/runner/report.hpp"

#include <algorithm>
#include <array>
#include <cstdio>

#include "base/text.hpp"

namespace stratagem::conformance {
namespace {

using Json = nlohmann::json;

constexpr std::array all_outcomes{Outcome::passed, Outcome::failed, Outcome::crashed, Outcome::skipped, Outcome::warned};
constexpr size_t max_shown_messages = 8;

auto count(const Report& report, Outcome outcome) {
  return std::count_if(report.results.begin(), report.results.end(), [&](const Result& one) { return one.outcome == outcome; });
}

std::string padded(std::string text, size_t width) {
  text.resize(std::max(text.size() + 1, width), ' ');
  return text;
}

std::string indented(const std::string& text, const std::string& by) {
  std::string out = by;
  for (const char c : text) out += c == '\n' ? "\n" + by : std::string(1, c);
  while (!out.empty() && (out.back() == ' ' || out.back() == '\n')) out.pop_back();
  return out;
}

std::string two_digits(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", number);
  return text;
}

Json json_of(const check_entry& one) {
  const uint32_t kind = one.needs & NEEDS_MASK;
  static const char* const words[] = {"file", "library", "plugin", "strategy"};
  return {{"id", one.id},
          {"sentence", one.sentence},
          {"rule", one.rule},
          {"needs", words[kind]},
          {"needs_several_devices", (one.needs & NEEDS_DEVICES) != 0},
          {"needs_caller_thread_only", (one.needs & NEEDS_CALLER_THREAD) != 0},
          {"is_timed", (one.needs & IS_TIMED) != 0}};
}

Json json_of(const Result& result) {
  Json out{{"id", result.of->id},
           {"rule", result.of->rule},
           {"sentence", result.of->sentence},
           {"result", name_of(result.outcome)},
           {"seconds", result.seconds}};
  out["strategy"] = result.strategy.empty() ? Json() : Json(result.strategy);
  out["kind"] = result.kind.empty() ? Json() : Json(result.kind);
  out["messages"] = result.messages;
  out["output"] = result.output;
  return out;
}

}  // namespace

bool is_conforming(const Report& report) {
  return report.no_plugin.empty() && count(report, Outcome::failed) == 0 && count(report, Outcome::crashed) == 0;
}

std::string text_of(const Result& result) {
  const bool is_bad = result.outcome == Outcome::failed || result.outcome == Outcome::crashed;
  std::string text = padded(name_of(result.outcome), 9) + padded(result.of->rule, 4) + padded(result.of->id, 34) +
                     (result.strategy.empty() ? "" : "  " + result.strategy);
  if (result.outcome == Outcome::passed) return text;
  if (is_bad) text += "\n" + indented(concat("promised: ", result.of->sentence), "    ");
  if (!result.kind.empty()) text += "\n" + indented(result.kind, "    ");
  for (size_t i = 0; i < std::min(result.messages.size(), max_shown_messages); ++i)
    text += "\n" + indented((is_bad ? "not so: " : "") + result.messages[i], "    ");
  if (result.messages.size() > max_shown_messages)
    text += concat("\n    and ", result.messages.size() - max_shown_messages, " more");
  if (is_bad && !result.output.empty()) text += "\n    it wrote:\n" + indented(result.output, "      ");
  return text;
}

std::string heading(const Report& report) {
  std::string text = report.options.file;
  if (!report.facts.name.empty()) text += "\n" + report.facts.name + " " + report.facts.version;
  return text + concat("\nseed ", report.options.seed, report.options.seed == default_seed ? " (the default)" : "");
}

std::string summary(const Report& report) {
  if (!report.no_plugin.empty()) return "no plugin, or none that could be loaded: " + report.no_plugin;
  std::string text = concat(is_conforming(report) ? "it conforms: " : "it does not conform: ", report.results.size(), " checks");
  for (const Outcome outcome : all_outcomes) text += concat(", ", count(report, outcome), " ", name_of(outcome));
  return text + ", in " + two_digits(report.seconds) + " s";
}

Json json_of(const Report& report) {
  Json out{{"schema", json_schema_version},
           {"file", report.options.file},
           {"seed", report.options.seed},
           {"seconds", report.seconds},
           {"conforms", is_conforming(report)}};
  out["no_plugin"] = report.no_plugin.empty() ? Json() : Json(report.no_plugin);
  out["plugin"] = {{"name", report.facts.name}, {"version", report.facts.version}, {"strategies", report.facts.strategies}};
  for (const Outcome outcome : all_outcomes) out["counts"][name_of(outcome)] = count(report, outcome);
  out["checks"] = Json::array();
  for (const Result& result : report.results) out["checks"].push_back(json_of(result));
  return out;
}

std::string list_text(const std::vector<const check_entry*>& checks) {
  std::string text;
  for (const check_entry* one : checks) text += padded(one->id, 34) + padded(one->rule, 4) + one->sentence + "\n";
  return text + concat(checks.size(), " checks");
}

Json list_json(const std::vector<const check_entry*>& checks) {
  Json list = Json::array();
  for (const check_entry* one : checks) list.push_back(json_of(*one));
  return {{"schema", json_schema_version}, {"checks", list}};
}

}  // namespace stratagem::conformance
