// SPDX-License-Identifier: Apache-2.0
//
// In place of core/accelerator/order.cpp: the same, but for the place that a test has left out.
#include "accelerator/order.hpp"

#include "accelerator/path/left_out.hpp"

namespace stratagem::order {

void wait(const char* name, const c10::Stream& stream, const c10::Event& event) {
  if (!test::is_left_out(name)) event.block(stream);
}

void keep(const char* name, const at::Tensor& tensor, const c10::Stream& stream) {
  if (!test::is_left_out(name)) tensor.record_stream(stream);
}

}  // namespace stratagem::order
