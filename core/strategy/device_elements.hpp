// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace stratagem {

/// From here on elements.hpp takes tensors of accelerators.
void use_device_elements();

}  // namespace stratagem
