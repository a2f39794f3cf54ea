// SPDX-License-Identifier: Apache-2.0
//
// The test build of core/accelerator/order.hpp: each of its places can be left out by name, so that a test sees whether it is missed.
#pragma once

#include <string>
#include <vector>

namespace stratagem::test {

/// From here on the place of this name orders nothing; empty: all do again. While nothing runs.
[[gnu::visibility("default")]] void leave_out(const std::string& name);
/// Whether it is left out; notes that it was come by. Any thread.
[[gnu::visibility("default")]] bool is_left_out(const char* name);
/// The places that were come by since, each once.
[[gnu::visibility("default")]] std::vector<std::string> take_places();

}  // namespace stratagem::test
