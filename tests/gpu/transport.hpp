// SPDX-License-Identifier: Apache-2.0
//
// The CUDA transport beside this program, by its table.
#pragma once

#include <c10/core/Stream.h>

#include "accelerator/transport.hpp"

namespace stratagem::test {

/// The one that the plugins have opened, or opened now: before LibTorch is used (begin_test sees to that).
const TransportApi& cuda_transport();
/// A stream of LibTorch's for the ABI.
stg_stream abi_stream(const c10::Stream& stream);

}  // namespace stratagem::test
