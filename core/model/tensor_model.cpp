// SPDX-License-Identifier: Apache-2.0
#include "model/tensor_model.hpp"

#include "base/error.hpp"

namespace stratagem {

StepOutput TensorModel::validation_step(const Batch&, const StepContext&) {
  throw unimplemented("this model has no validation_step");
}

StepOutput TensorModel::test_step(const Batch& batch, const StepContext& context) { return validation_step(batch, context); }

StepOutput TensorModel::predict_step(const Batch&, const StepContext&) { throw unimplemented("this model has no predict_step"); }

// Called by nobody: the table has these functions only for a class that overrides them.
std::vector<TensorTree> TensorModel::split(const Batch&, size_t) { throw unimplemented("this model has no split"); }

TensorTree TensorModel::transfer(const Batch&, at::Device, int64_t) { throw unimplemented("this model has no transfer"); }

at::Tensor TensorModel::register_parameter(std::string name, at::Tensor tensor, bool requires_grad) {
  if (tensor.defined()) tensor.set_requires_grad(requires_grad);
  registered_.push_back({std::move(name), tensor, true});
  return tensor;
}

at::Tensor TensorModel::register_buffer(std::string name, at::Tensor tensor, bool persistent) {
  registered_.push_back({std::move(name), tensor, false, persistent});
  return tensor;
}

}  // namespace stratagem
