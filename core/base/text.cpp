// SPDX-License-Identifier: Apache-2.0
#include "base/text.hpp"

#include <algorithm>
#include <numeric>

namespace stratagem {

namespace {

size_t levenshtein(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
    }
  }
  return row.back();
}

}  // namespace

std::string join(const std::vector<std::string>& items, std::string_view separator) {
  if (items.empty()) return "(none)";
  std::string out = items.front();
  for (size_t i = 1; i < items.size(); ++i) out.append(separator).append(items[i]);
  return out;
}

std::string nearest(std::string_view name, const std::vector<std::string>& candidates) {
  size_t best_distance = std::max<size_t>(2, name.size() / 3) + 1;
  std::string best;
  for (const std::string& candidate : candidates) {
    const size_t distance = levenshtein(name, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace stratagem
