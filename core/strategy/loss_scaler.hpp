// SPDX-License-Identifier: Apache-2.0
//
// The loss scale of 16-mixed: gradients too small for float16 are lifted into its range by a factor in backward, and divided by it in
// the reduction. An update whose gradient overflowed is not made, and the scale halved; after many good ones it is doubled. Numbers and
// rules are those of torch.amp.GradScaler (https://docs.pytorch.org/docs/stable/amp.html), and a floor, which that lacks.
#pragma once

#include <algorithm>
#include <cstdint>

namespace stratagem {

struct LossScaler {
  static constexpr double initial = 65536;
  static constexpr double growth_factor = 2;
  static constexpr double backoff_factor = 0.5;
  static constexpr int64_t growth_interval = 2000;
  static constexpr double smallest = 0x1p-24;  ///< float16 has nothing smaller
  static constexpr double largest = 0x1p127;   ///< float32 has no larger power of two

  double scale = initial;
  int64_t good_steps = 0;  ///< updates in a row without an overflow, since the scale last changed

  void count_good() {
    if (++good_steps < growth_interval) return;
    scale = std::min(scale * growth_factor, largest);
    good_steps = 0;
  }
  void back_off() {
    scale = std::max(scale * backoff_factor, smallest);
    good_steps = 0;
  }
};

}  // namespace stratagem
