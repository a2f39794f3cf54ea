// SPDX-License-Identifier: Apache-2.0
//
// Weighted means: over replicas and over batches, by the weights that the steps report (rows, or the model's own denominators). So a
// last, smaller batch counts as what it is, and the numbers are those of one device.
#pragma once

#include <limits>

namespace stratagem {

struct WeightedMean {
  double sum = 0;
  double weight = 0;

  /// A value of weight 0 is not read: it may be NaN where nothing counted.
  void add(double value, double value_weight) {
    if (value_weight == 0) return;
    sum += value * value_weight;
    weight += value_weight;
  }
  /// NaN when nothing was added.
  double mean() const { return weight == 0 ? std::numeric_limits<double>::quiet_NaN() : sum / weight; }
};

}  // namespace stratagem
