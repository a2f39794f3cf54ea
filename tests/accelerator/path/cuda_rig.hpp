// SPDX-License-Identifier: Apache-2.0
//
// The rig on GPUs, for tests of what the emulated accelerator can't show.
#pragma once

#include "accelerator/path/rig.hpp"
#include "base/gpu.hpp"

namespace stratagem::test {

/// Not on the CPU in their place.
bool is_on_gpus();
size_t num_gpus();

}  // namespace stratagem::test
