// SPDX-License-Identifier: Apache-2.0
#include "torch/warnings.hpp"

namespace stratagem {

void WarningScope::Handler::process(const c10::Warning& warning) { host_.warn("LibTorch: " + warning.msg()); }

}  // namespace stratagem
