// SPDX-License-Identifier: Apache-2.0
//
// A device tensor as a job has it: an address and a shape, nothing that keeps the memory. So an operation that is late finds what a
// GPU's would: whatever is there by then.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "accelerator/emulated/detector.hpp"

namespace emulated {

struct Plain {
  void* memory = nullptr;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType dtype = at::kFloat;

  /// A tensor on the CPU over the jobs' view.
  at::Tensor tensor() const;
};

Plain plain(const at::Tensor& tensor);

/// From its first to its last element, whatever lies between.
Span span(const at::Tensor& tensor, bool is_write);

inline bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

/// The host waits for what was just queued.
void wait_for(Queue& queue);

}  // namespace emulated
