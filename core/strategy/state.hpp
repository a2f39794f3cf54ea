// SPDX-License-Identifier: Apache-2.0
//
// The state as a tree, in the layout of abi/stratagem/strategy.h: out of a Training and into one.
#pragma once

#include <memory>

#include "base/strategy.hpp"
#include "strategy/training.hpp"

namespace stratagem {

/// Views that keep `training` alive, or copies.
Tree export_training_state(const std::shared_ptr<Training>& training, bool copies);

/// Looks at everything before it writes anything. With `strict` whatever is missing, unexpected or of another shape is one error that
/// lists all of it; else such parts are left out and reported. Floating types are converted. Replicas are refreshed.
ImportReport import_training_state(Training& training, const stg_value& state, bool strict);

}  // namespace stratagem
