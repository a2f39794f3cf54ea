// SPDX-License-Identifier: Apache-2.0
//
// The loss scale as a state holds it.
#pragma once

#include "spec/instance.hpp"

namespace stratagem::test {

const std::string mixed = R"(, "precision": "16-mixed")";

inline double scale_in(const Tree& state) { return find(*find(state.root(), "scaler"), "scale")->as.f64; }
inline int64_t good_steps_in(const Tree& state) { return find(*find(state.root(), "scaler"), "good_steps")->as.i64; }

}  // namespace stratagem::test
