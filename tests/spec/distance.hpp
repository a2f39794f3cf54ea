// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Equality".
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "spec/instance.hpp"

namespace stratagem::test {

/// The largest over all tensors of |a-b| / max(|b|, 1e-3 x the norm of all), in the 2-norm; infinity where they aren't alike, or NaN.
inline double distance(const stg_value& a, const stg_value& b) {
  constexpr double unlike = std::numeric_limits<double>::infinity();
  std::vector<double> differences, norms;
  double whole = 0;
  for (uint32_t e = 0; e < b.count; ++e) {
    const stg_value* other = find(a, text_of(b.as.entries[e].key));
    if (other == nullptr || other->type != b.as.entries[e].value.type) return unlike;
    if (other->type != STG_TENSOR) continue;
    const std::vector<double> x = numbers(*other);
    const std::vector<double> y = numbers(b.as.entries[e].value);
    if (x.size() != y.size()) return unlike;
    double difference = 0;
    double norm = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      difference += (x[i] - y[i]) * (x[i] - y[i]);
      norm += y[i] * y[i];
    }
    if (std::isnan(difference)) return unlike;
    differences.push_back(std::sqrt(difference));
    norms.push_back(std::sqrt(norm));
    whole += norm;
  }
  double largest = 0;
  for (size_t i = 0; i < norms.size(); ++i) {
    if (differences[i] != 0) largest = std::max(largest, differences[i] / std::max(norms[i], 1e-3 * std::sqrt(whole)));
  }
  return largest;
}

}  // namespace stratagem::test
