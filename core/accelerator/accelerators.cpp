// SPDX-License-Identifier: Apache-2.0
#include "accelerator/accelerators.hpp"

namespace stratagem {

std::span<const Accelerator> accelerators() { return {}; }

}  // namespace stratagem
