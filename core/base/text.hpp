// SPDX-License-Identifier: Apache-2.0
//
// Putting messages together. GCC 12 has no std::format; concat(...) is what we use in its place.
#pragma once

#include <locale>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace stratagem {

/// The arguments, written one after the other as an ostream of the classic locale would, whatever the process's is.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  out.precision(17);
  (out << ... << parts);
  return std::move(out).str();
}

/// "a, b, c"; "(none)" for an empty list.
std::string join(const std::vector<std::string>& items, std::string_view separator = ", ");

/// The candidate with the smallest Levenshtein distance to `name`; empty if none is near enough to be what was meant (more than a
/// third of the name's length, and more than 2, edits away).
std::string nearest(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace stratagem
