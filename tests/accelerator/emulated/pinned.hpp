// SPDX-License-Identifier: Apache-2.0
//
// The two views of pinned memory.
#pragma once

#include <cstddef>

namespace emulated {

struct PinnedViews {
  char* host;
  char* device;
};
/// New pages, under the world's lock.
PinnedViews take_pinned(size_t bytes);
/// Null: not pinned.
void* device_view(const void* host);

}  // namespace emulated
