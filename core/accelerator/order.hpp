// SPDX-License-Identifier: Apache-2.0
//
// Where the work of one stream is ordered after another's, and where memory is kept for a stream that didn't allocate it. Everything of
// the sort goes through here, under a name of its own that stands at one place of the code: so a test, which links another file in
// place of order.cpp, can leave each of them out once and see that it is missed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace stratagem::order {

/// What is queued on `stream` from here on begins after what was queued before `event` was recorded. Returns at once. An event that
/// was never recorded is not waited for.
void wait(const char* name, const c10::Stream& stream, const c10::Event& event);

/// The allocator gives the tensor's memory to nobody before what is queued on `stream` by then is done. For a tensor that was made on
/// another stream and may be dropped before.
void keep(const char* name, const at::Tensor& tensor, const c10::Stream& stream);

}  // namespace stratagem::order
