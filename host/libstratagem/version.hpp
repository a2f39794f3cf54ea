// SPDX-License-Identifier: Apache-2.0
//
// What this library calls itself; the number comes from the build.
#pragma once

namespace stratagem {
inline constexpr const char* version_text = STRATAGEM_VERSION;
}  // namespace stratagem
