// SPDX-License-Identifier: Apache-2.0
//
// Operators that make tensors and views, and the few whose CPU kernel goes by another name.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "accelerator/emulated/fallback.hpp"
#include "accelerator/emulated/memory.hpp"
#include "accelerator/emulated/plain.hpp"

namespace emulated {

namespace {

constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

at::Device device_or_current(std::optional<at::Device> device) {
  return device && device->index() >= 0 ? *device : device_of(current_device());
}

void refuse_pinned(std::optional<bool> pin) { TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned"); }

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  refuse_pinned(pin);
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, &device_allocator(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin) {
  refuse_pinned(pin);
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), keys, c10::dtype_or_default(dtype));
}

// LibTorch's own takes the storage for the CPU's.
void grow(const at::Tensor& self, size_t bytes) {
  c10::StorageImpl* storage = self.storage().unsafeGetStorageImpl();
  if (bytes <= storage->nbytes()) return;
  TORCH_CHECK(storage->resizable(), "emulated: the storage can't be resized");
  TORCH_CHECK(storage->nbytes() == 0, "emulated: a tensor with contents can't grow");
  const c10::DeviceGuard guard(self.device());
  storage->set_data_ptr_noswap(device_allocator().allocate(bytes));
  storage->set_nbytes(bytes);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == size && !format) return self;
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Contiguous) impl->empty_tensor_restride(*format);
  const auto elements = static_cast<size_t>(self.numel() + self.storage_offset());
  grow(self, elements * self.element_size());
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(storage), offset, size, stride);
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage(self, std::move(storage), 0, {numel}, {});
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_storage(self, at::Storage(at::Storage::use_byte_size_t(), 0, &device_allocator(), true), 0, {0}, {});
}

at::Tensor view_of(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }

void record_stream(at::Tensor& self, at::Stream stream) { record_use(self.storage().data(), queue_of(stream)); }

at::Scalar local_scalar_dense(const at::Tensor& self) {
  Queue& queue = current_queue(self.get_device());
  launch(queue, "item", {span(self, false)}, [] {});
  wait_for(queue);
  {
    const std::lock_guard lock(world());
    ++count.host_reads;
  }
  const at::Tensor there = plain(self).tensor();
  return at::_local_scalar_dense(there);
}

// The CPU's, written out: it takes its numbers from the device's generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0) return {input, at::empty_like(input, input.options())};
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

at::Tensor native_dropout_backward(const at::Tensor& grad, const at::Tensor& mask, double scale) {
  return grad.mul(mask).mul_(scale);
}

c10::OperatorHandle find_operator(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const c10::OperatorHandle same = find_operator("aten::convolution");
  run_on_device(same, *stack);
}

void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const c10::OperatorHandle same = find_operator("aten::convolution_backward");
  constexpr size_t num_arguments = 10;
  constexpr size_t bias_sizes = 3;  // where it is wanted
  const auto first = stack->end() - num_arguments;
  const at::Tensor weight = first[2].toTensor();
  const bool is_transposed = first[6].toBool();
  const int64_t groups = first[8].toInt();
  const int64_t channels = is_transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(first + bias_sizes, c10::IValue(c10::List<int64_t>({channels})));
  run_on_device(same, *stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &view_of);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_", &set_nothing);
  library.impl("record_stream", &record_stream);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("native_dropout", &native_dropout);
  library.impl("native_dropout_backward", &native_dropout_backward);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace

}  // namespace emulated
