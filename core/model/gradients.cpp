// SPDX-License-Identifier: Apache-2.0
#include "model/gradients.hpp"

#include <ATen/ops/isnan.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/variable.h>

#include "base/error.hpp"
#include "torch/bridge.hpp"

namespace stratagem::sdk {

namespace {

class Hook : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(GradientReporter& reporter, uint64_t index) : reporter_(reporter), index_(index) {}
  void operator()(const at::Tensor&) override { reporter_.accumulated(index_); }

 private:
  GradientReporter& reporter_;
  uint64_t index_;
};

}  // namespace

GradientReporter::GradientReporter(ModelReplica& replica) : replica_(replica), reported_(replica.parameters().size()) {
  for (uint64_t i = 0; i < reported_.size(); ++i) {
    const at::Tensor& parameter = replica_.parameters()[i].tensor;
    if (!parameter.requires_grad()) continue;
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Hook>(*this, i));
  }
}

GradientReporter::~GradientReporter() {
  for (const ReplicaTensor& entry : replica_.parameters()) {
    if (entry.tensor.requires_grad()) torch::autograd::impl::set_post_acc_grad_hooks(entry.tensor, nullptr);
  }
}

void GradientReporter::run(const at::Tensor& loss, double scale, const stg_gradient_sink& sink, bool detect_anomaly) {
  sink_ = &sink;
  detect_anomaly_ = detect_anomaly;
  std::fill(reported_.begin(), reported_.end(), uint8_t{0});
  handed_over_.clear();
  drop_gradients();  // of a backward of the model's own, inside a step
  try {
    // Autograd rounds the scale to the loss's own type: to infinity where float16 can't hold it, which is an overflow like others.
    const bool is_half = loss.scalar_type() == at::kHalf || loss.scalar_type() == at::kBFloat16;
    const at::ScalarType dtype = is_half ? at::kFloat : loss.scalar_type();
    loss.backward(at::scalar_tensor(scale, loss.options().dtype(dtype).requires_grad(false)));
    for (uint64_t i = 0; i < reported_.size(); ++i) {
      if (reported_[i] == 0 && replica_.parameters()[i].tensor.requires_grad()) report_late(i);
    }
  } catch (...) {
    sink_ = nullptr;
    drop_gradients();
    throw;
  }
  sink_ = nullptr;
}

void GradientReporter::accumulated(uint64_t index) {
  if (sink_ == nullptr) return;  // a backward of the model's own, inside a step
  try {
    at::Tensor gradient = std::move(replica_.parameters()[index].tensor.mutable_grad());
    reported_[index] = 1;
    report(index, std::move(gradient));
  } catch (...) {
    // Autograd passes on exceptions that derive from std::exception, and only those.
    throw Error(describe_exception(std::current_exception()));
  }
}

// No hook came: there is no gradient, or the parameter was frozen when hooks were set.
void GradientReporter::report_late(uint64_t index) {
  if (replica_.parameters()[index].tensor.grad().defined()) {
    accumulated(index);
  } else {
    taken(index, sink_->ready(sink_->self, index, nullptr, nullptr));
  }
}

void GradientReporter::taken(uint64_t index, stg_error* error) {
  try {
    check(error);
  } catch (const Error& cause) {
    throw cause.within(concat("the gradient of '", replica_.parameters()[index].names.front(), "' was not taken"),
                       replica_.index(), replica_.abi_device());
  }
}

void GradientReporter::report(uint64_t index, at::Tensor gradient) {
  const ReplicaTensor& entry = replica_.parameters()[index];
  if (gradient.is_sparse() && STG_HAS(stg_gradient_sink, sink_, ready_sparse) && !entry.bound_gradient.defined()) {
    report_sparse(index, gradient.coalesce());
    return;
  }
  if (gradient.layout() != at::kStrided) gradient = gradient.to_dense();
  if (detect_anomaly_ && at::isnan(gradient).any().item<bool>()) {
    throw Error{STG_OUT_OF_RANGE, concat("the gradient of '", entry.names.front(), "' has a NaN")};
  }
  if (entry.bound_gradient.defined()) {
    entry.bound_gradient.copy_(gradient);
    gradient = entry.bound_gradient;
  }
  // Who receives a gradient may write to it, so no two have one memory, as those of a + b would.
  if (!handed_over_.insert(gradient.storage().unsafeGetStorageImpl()).second) gradient = gradient.clone();
  TensorPtr handle = to_dlpack(gradient);
  gradient = at::Tensor();  // now the handle is the only one that refers to the memory
  taken(index, sink_->ready(sink_->self, index, handle.release(), nullptr));
}

void GradientReporter::report_sparse(uint64_t index, const at::Tensor& gradient) {
  if (detect_anomaly_ && at::isnan(gradient._values()).any().item<bool>()) {
    throw Error{STG_OUT_OF_RANGE, concat("the gradient of '", replica_.parameters()[index].names.front(), "' has a NaN")};
  }
  TensorPtr indices = to_dlpack(gradient._indices());
  TensorPtr values = to_dlpack(gradient._values());
  const std::vector<int64_t> shape = gradient.sizes().vec();
  taken(index, sink_->ready_sparse(sink_->self, index, indices.release(), values.release(), shape.data(), shape.size(), nullptr));
}

// After an error nothing of the half-done backward may be added to the next one.
void GradientReporter::drop_gradients() {
  for (ReplicaTensor& entry : replica_.parameters()) {
    if (entry.tensor.requires_grad()) entry.tensor.mutable_grad() = at::Tensor();
  }
}

}  // namespace stratagem::sdk
