// SPDX-License-Identifier: Apache-2.0
//
// The interface's `reduce` of metrics: every tensor leaf becomes one number. Without LibTorch: its operators lack the unsigned types,
// and a metric is small.
#pragma once

#include "base/value.hpp"

namespace stratagem {

/// `op` is STG_REDUCE_*. With `lightning` everything is a mean that goes through float32 and back to its own type.
Tree reduce_leaves(Tree object, uint32_t op, bool lightning);

}  // namespace stratagem
