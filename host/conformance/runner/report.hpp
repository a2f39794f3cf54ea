// SPDX-License-Identifier: Apache-2.0
//
// Results as text for people and as JSON for programs.
#pragma once

#include <nlohmann/json.hpp>

#include "conformance/conformance.hpp"
#include "conformance/runner/task.hpp"

namespace stratagem::conformance {

/// Raised when a program that reads the JSON would have to change.
inline constexpr int json_schema_version = 1;

struct Report {
  Options options;
  PluginFacts facts;
  std::vector<Result> results;
  std::string no_plugin;  ///< not empty: why there is nothing to check
  double seconds = 0;
};

bool is_conforming(const Report& report);
/// One line, and what is wrong below it.
std::string text_of(const Result& result);
/// What comes before and after the results.
std::string heading(const Report& report);
std::string summary(const Report& report);
nlohmann::json json_of(const Report& report);
/// All checks there are, as --list shows them.
std::string list_text(const std::vector<const check_entry*>& checks);
nlohmann::json list_json(const std::vector<const check_entry*>& checks);

}  // namespace stratagem::conformance
