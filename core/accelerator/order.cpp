// SPDX-License-Identifier: Apache-2.0
#include "accelerator/order.hpp"

namespace stratagem::order {

void wait(const char*, const c10::Stream& stream, const c10::Event& event) { event.block(stream); }

void keep(const char*, const at::Tensor& tensor, const c10::Stream& stream) { tensor.record_stream(stream); }

}  // namespace stratagem::order
