// SPDX-License-Identifier: Apache-2.0
//
// The rig on the emulated accelerator, for tests of what only that shows.
#pragma once

#include "accelerator/emulated/emulated.hpp"
#include "accelerator/path/left_out.hpp"
#include "accelerator/path/rig.hpp"
