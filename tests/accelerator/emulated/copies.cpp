// SPDX-License-Identifier: Apache-2.0
//
// Copies, with the rules of CUDA's: between devices on the source's stream, with events both ways; from pageable memory, the source is
// read before the call returns; to pageable memory, or where the caller wants it, the call waits.
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/to_ops.h>
#include <torch/library.h>

#include "accelerator/emulated/event.hpp"
#include "accelerator/emulated/memory.hpp"
#include "accelerator/emulated/plain.hpp"
#include "base/text.hpp"

namespace emulated {

using stratagem::concat;

at::Tensor Plain::tensor() const {
  return at::from_blob(memory, sizes, strides, at::TensorOptions().dtype(dtype).device(at::kCPU));
}

Plain plain(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), "emulated: a lazily conjugated or negated tensor isn't known to kernels");
  return {memory_of(tensor.data_ptr()), tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

Span span(const at::Tensor& tensor, bool is_write) {
  if (tensor.numel() == 0) return {nullptr, 0, is_write};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {tensor.data_ptr(), static_cast<size_t>(last + 1) * tensor.element_size(), is_write};
}

void wait_for(Queue& queue) { synchronize(queue); }

namespace {

void copy_within(const at::Tensor& from, const at::Tensor& to, Queue& queue, const char* name) {
  launch(queue, name, {span(from, false), span(to, true)},
         [from = plain(from), to = plain(to)] { to.tensor().copy_(from.tensor()); });
}

void copy_between(const at::Tensor& from, const at::Tensor& to) {
  Queue& source = current_queue(from.get_device());
  Queue& target = current_queue(to.get_device());
  if (&source == &target) return copy_within(from, to, source, "copy");
  order_after(source, record(target));
  copy_within(from, to, source, "copy to another device");
  order_after(target, record(source));
}

void copy_from_host(const at::Tensor& from, const at::Tensor& to, bool may_return) {
  Queue& queue = current_queue(to.get_device());
  const bool is_direct = is_pinned(from.data_ptr()) && from.scalar_type() == to.scalar_type();
  if (is_direct || !may_return) {
    copy_within(from, to, queue, is_direct ? "copy from pinned memory" : "copy from the host");
    if (!may_return) wait_for(queue);
    return;
  }
  launch(queue, "copy from the host", {span(to, true)}, [from = from.clone(), to = plain(to)] { to.tensor().copy_(from); });
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool may_return) {
  Queue& queue = current_queue(from.get_device());
  const bool is_direct = is_pinned(to.data_ptr());
  copy_within(from, to, queue, is_direct ? "copy to pinned memory" : "copy to the host");
  if (!may_return || !is_direct) wait_for(queue);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool may_return) {
  if (to.numel() == 0) return to;
  const at::Tensor source = from.expand_as(to);
  if (is_on_device(from) && is_on_device(to)) {
    copy_between(source, to);
  } else if (is_on_device(to)) {
    copy_from_host(source, to, may_return);
  } else {
    copy_to_host(source, to, may_return);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
}

}  // namespace

}  // namespace emulated
