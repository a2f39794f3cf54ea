// SPDX-License-Identifier: Apache-2.0
//
// Device memory and pinned memory. Both have two views of the same size: one that tensors know and one that jobs use. A device's first
// view can't be touched at all; the host's view of pinned memory is protected while a stream may still use it.
#pragma once

#include <c10/core/Allocator.h>

#include "accelerator/emulated/detector.hpp"

namespace emulated {

c10::Allocator& device_allocator();
c10::Allocator& pinned_allocator();

bool is_pinned(const void* address);
/// -1: of no device.
int device_of_address(const void* address);
/// The jobs' view; of an address that is neither a device's nor pinned, itself.
void* memory_of(const void* address);

/// record_stream. An address that is not ours: nothing.
void record_use(const void* address, Queue& queue);

// Under the world's lock:
Block* find_block(const void* address);
void guard(Block& block);  ///< from what its traces say
void unguard_done();

}  // namespace emulated
