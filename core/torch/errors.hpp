// SPDX-License-Identifier: Apache-2.0
//
// LibTorch's exceptions as errors of the ABI: the right code, the message without the C++ backtrace.
#pragma once

namespace stratagem {

/// Makes describe_exception (base/error.hpp) know LibTorch's exceptions. Every way into code that uses LibTorch calls it first (the
/// SDKs do); any number of times, from any thread. It calls nothing of LibTorch.
void initialise_torch() noexcept;

}  // namespace stratagem
