// SPDX-License-Identifier: Apache-2.0
#include "torch/bridge.hpp"

#include <ATen/dlpack.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resolve_conj.h>
#include <ATen/ops/resolve_neg.h>
#include <c10/util/DimVector.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "torch/dtypes.hpp"

namespace stratagem {

// "Layout-compatible" is checked where both can be seen.
static_assert(sizeof(stg_tensor) == sizeof(DLManagedTensorVersioned));
static_assert(offsetof(stg_tensor, dlpack_major) == offsetof(DLManagedTensorVersioned, version.major));
static_assert(offsetof(stg_tensor, dlpack_minor) == offsetof(DLManagedTensorVersioned, version.minor));
static_assert(offsetof(stg_tensor, owner) == offsetof(DLManagedTensorVersioned, manager_ctx));
static_assert(offsetof(stg_tensor, deleter) == offsetof(DLManagedTensorVersioned, deleter));
static_assert(offsetof(stg_tensor, flags) == offsetof(DLManagedTensorVersioned, flags));
static_assert(offsetof(stg_tensor, view) == offsetof(DLManagedTensorVersioned, dl_tensor));
static_assert(sizeof(stg_tensor_view) == sizeof(DLTensor));
static_assert(offsetof(stg_tensor_view, data) == offsetof(DLTensor, data));
static_assert(offsetof(stg_tensor_view, device) == offsetof(DLTensor, device));
static_assert(offsetof(stg_tensor_view, num_dims) == offsetof(DLTensor, ndim));
static_assert(offsetof(stg_tensor_view, dtype) == offsetof(DLTensor, dtype));
static_assert(offsetof(stg_tensor_view, shape) == offsetof(DLTensor, shape));
static_assert(offsetof(stg_tensor_view, strides) == offsetof(DLTensor, strides));
static_assert(offsetof(stg_tensor_view, byte_offset) == offsetof(DLTensor, byte_offset));
static_assert(sizeof(stg_device) == sizeof(DLDevice) && sizeof(stg_dtype) == sizeof(DLDataType));
static_assert(STG_TENSOR_READ_ONLY == DLPACK_FLAG_BITMASK_READ_ONLY && STG_TENSOR_IS_COPIED == DLPACK_FLAG_BITMASK_IS_COPIED);
static_assert(STG_DEVICE_CPU == kDLCPU && STG_DEVICE_CUDA == kDLCUDA && STG_DEVICE_CUDA_HOST == kDLCUDAHost);
static_assert(STG_DEVICE_EXTENSION == kDLExtDev);
static_assert(STG_DTYPE_INT == kDLInt && STG_DTYPE_UINT == kDLUInt && STG_DTYPE_FLOAT == kDLFloat);
static_assert(STG_DTYPE_BFLOAT == kDLBfloat && STG_DTYPE_COMPLEX == kDLComplex && STG_DTYPE_BOOL == kDLBool);

namespace {

// A LibTorch tensor over a checked view. `context` and `release` own it; the maker releases them if this throws.
at::Tensor import_view(const stg_tensor_view& view, void* context, void (*release)(void*)) {
  std::unique_ptr<void, void (*)(void*)> owner(context, release);
  const at::Device device = to_device(view.device);
  const at::IntArrayRef shape(view.shape, static_cast<size_t>(view.num_dims));
  // A null pointer plus an offset would be neither null nor memory; check_tensor lets null pass for empty tensors only.
  void* data = view.data == nullptr ? nullptr : first_element(view);
  at::TensorMaker maker = at::for_blob(data, shape);
  if (view.strides != nullptr) maker.strides(at::IntArrayRef(view.strides, static_cast<size_t>(view.num_dims)));
  maker.options(at::TensorOptions(to_scalar_type(view.dtype)).device(device)).target_device(device);
  maker.context(owner.release(), release);
  return maker.make_tensor();
}

// What keeps an exported tensor's memory. Shape and strides are copies: LibTorch can change a tensor's in place.
struct ExportedTensor {
  stg_tensor abi{};
  c10::Storage storage;
  c10::DimVector shape;
  c10::DimVector strides;
};

at::Tensor resolve(const at::Tensor& tensor) {
  return tensor.is_conj() || tensor.is_neg() ? at::resolve_neg(at::resolve_conj(tensor)) : tensor;
}

}  // namespace

at::Tensor to_tensor(TensorPtr tensor, const std::string& where) {
  check_tensor(*tensor, where);
  const stg_tensor_view& view = tensor->view;
  return import_view(view, tensor.release(), [](void* owned) { TensorRelease{}(static_cast<stg_tensor*>(owned)); });
}

at::Tensor view_tensor(const stg_tensor& tensor, const std::string& where) {
  check_tensor(tensor, where);
  return import_view(tensor.view, nullptr, [](void*) {});
}

TensorPtr to_dlpack(const at::Tensor& given) {
  if (!given.defined()) throw invalid_argument("an undefined tensor can't be exported");
  if (given.layout() != at::kStrided) {
    throw unimplemented("a tensor of layout ", c10::str(given.layout()), " has no DLPack form; make it dense first");
  }
  const stg_dtype dtype = from_scalar_type(given.scalar_type());
  const stg_device device = from_device(given.device());
  const at::Tensor tensor = resolve(given);
  auto exported = std::make_unique<ExportedTensor>();
  exported->storage = tensor.storage();
  exported->shape = tensor.sizes();
  exported->strides = tensor.strides();
  exported->abi.dlpack_major = STG_DLPACK_MAJOR;
  exported->abi.dlpack_minor = STG_DLPACK_MINOR;
  exported->abi.owner = exported.get();
  exported->abi.deleter = [](stg_tensor* self) { delete static_cast<ExportedTensor*>(self->owner); };
  exported->abi.view = {tensor.data_ptr(),        device, static_cast<int32_t>(tensor.dim()), dtype, exported->shape.data(),
                        exported->strides.data(), 0};
  return TensorPtr{&exported.release()->abi};
}

}  // namespace stratagem
