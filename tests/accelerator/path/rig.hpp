// SPDX-License-Identifier: Apache-2.0
//
// The plugins on the emulated accelerator, and on the CPU beside it, with models on LibTorch.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "accelerator/emulated/emulated.hpp"
#include "accelerator/path/left_out.hpp"
#include "spec/own_model.hpp"

namespace stratagem::test {

/// x (n, 6) -> linear, batch norm if `norm`, gelu, linear -> (n, 3); the loss is the mean square of the distance to y (n, 3).
/// Options: norm, unused (a parameter that has no gradient), input_gradient (the loss has the square of the input's gradient in it).
class Net : public TensorModel {
 public:
  explicit Net(const nlohmann::json& options);
  StepOutput training_step(const Batch& batch, const StepContext& context) override;
  StepOutput validation_step(const Batch& batch, const StepContext& context) override;
  StepOutput predict_step(const Batch& batch, const StepContext& context) override;

 private:
  at::Tensor forward(const at::Tensor& x);
  at::Tensor w1_, b1_, w2_, b2_, mean_, variance_;
  bool has_norm_;
};

/// {"x": (n, 6), "y": (n, 3)}, of numbers that depend on `index` alone. 0 rows are possible.
Tree net_batch(int64_t num_rows, int64_t index, at::ScalarType dtype = at::kFloat);

/// What `emulated_*` plugins make; `more` begins with a comma.
std::unique_ptr<Instance> on_emulated(const std::string& strategy, const std::string& devices, const std::string& more,
                                      uint64_t flags = 0);
/// The same on as many logical CPU devices.
std::unique_ptr<Instance> on_cpu(const std::string& strategy, size_t num_devices, const std::string& more);

/// Its tensors in host memory.
Tree on_host(Instance& instance, Tree tree);
double loss_of(Instance& instance, StepOutcome step);

/// The largest |a - b| / max(1, |b|) over all tensors of the states' models, or of their optimizers'.
double distance(const Tree& a, const Tree& b, const char* part = "model");

/// Nothing queued, nothing reported, nothing left out or held: at the beginning of a test, and its REQUIRE at the end.
void begin_emulation();
std::string reports();

}  // namespace stratagem::test
