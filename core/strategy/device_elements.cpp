// SPDX-License-Identifier: Apache-2.0
//
// The functions of elements.hpp for tensors of an accelerator: LibTorch's own.
#include "strategy/device_elements.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "strategy/elements.hpp"
#include "torch/bridge.hpp"
#include "torch/dtypes.hpp"

namespace stratagem {

namespace {

at::Tensor as_torch(const stg_tensor_view& view) {
  stg_tensor tensor{STG_DLPACK_MAJOR, STG_DLPACK_MINOR, nullptr, nullptr, 0, view};
  return view_tensor(tensor);
}

void copy(const stg_tensor_view& destination, const stg_tensor_view& source) { as_torch(destination).copy_(as_torch(source)); }

TensorPtr clone(const stg_tensor_view& source) { return to_dlpack(as_torch(source).clone(at::MemoryFormat::Contiguous)); }

TensorPtr to_host(const stg_tensor_view& source) {
  TensorPtr result = allocate_tensor(source.dtype, {source.shape, source.shape + source.num_dims});
  if (numel(source) > 0) copy(result->view, source);
  return result;
}

bool any_nan(const stg_tensor_view& view) { return at::isnan(as_torch(view)).any().item<bool>(); }

TensorPtr join(const std::vector<const stg_tensor_view*>& parts) {
  std::vector<at::Tensor> tensors;
  for (const stg_tensor_view* part : parts) tensors.push_back(as_torch(*part).to(to_device(parts[0]->device)));
  return to_dlpack(parts[0]->num_dims == 0 ? at::stack(tensors) : at::cat(tensors));
}

TensorPtr combine(const std::vector<const stg_tensor_view*>& numbers, const std::vector<double>& weights, double divisor) {
  const at::Tensor first = as_torch(*numbers[0]);
  at::Tensor sum = at::zeros({}, first.options().dtype(at::kDouble));
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (weights[i] != 0) sum.add_(as_torch(*numbers[i]).to(first.device()).to(at::kDouble), weights[i]);
  }
  return to_dlpack(sum.div_(divisor).to(first.scalar_type()));
}

}  // namespace

void use_device_elements() {
  static constexpr DeviceElements functions{&copy, &clone, &to_host, &any_nan, &join, &combine};
  set_device_elements(functions);
}

}  // namespace stratagem
