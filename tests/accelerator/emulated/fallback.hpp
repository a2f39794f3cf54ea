// SPDX-License-Identifier: Apache-2.0
//
// Every operator without a kernel of its own: the CPU's kernel, queued on the current stream of its tensors' device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace emulated {

/// Takes the operator's arguments from the stack and leaves its results there.
void run_on_device(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace emulated
