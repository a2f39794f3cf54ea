// SPDX-License-Identifier: Apache-2.0
//
// The plugins on an accelerator, and on the CPU beside it, with models on LibTorch. Which accelerator is a matter of the program:
// emulated_rig.cpp is linked into one, cuda_rig.cpp into another, and what a test says of both stands once.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

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

/// A strategy on devices of the accelerator; `devices` is a list of indices below 4, where there are fewer devices modulo their number.
/// `more` begins with a comma.
std::unique_ptr<Instance> on_accelerator(const std::string& strategy, const std::string& devices, const std::string& more,
                                         uint64_t flags = 0);
/// The same on as many logical CPU devices.
std::unique_ptr<Instance> on_cpu(const std::string& strategy, size_t num_devices, const std::string& more);
/// What the device of such a list is to the ABI.
stg_device accelerator_device(int32_t index);
/// How far float32 and float64 may be from the CPU's, after a few steps of Net.
struct Tolerances {
  double float32, float64;
};
Tolerances tolerances();

/// Its tensors in host memory.
Tree on_host(Instance& instance, Tree tree);
double loss_of(Instance& instance, StepOutcome step);

/// The largest |a - b| / max(1, |b|) over all tensors of the states' models, or of their optimizers'.
double distance(const Tree& a, const Tree& b, const char* part = "model");

/// CLOCK_MONOTONIC, so many milliseconds from now.
uint64_t in_ms(uint64_t milliseconds);
/// A step that reads its gradient's norm, and so waits for the devices, until `deadline_ns`. The error is the caller's.
stg_error* train_until(Instance& instance, uint64_t deadline_ns);
/// The ticket of a batch that is announced.
uint64_t announce(Instance& instance, Tree batch);
/// Clipped by norm to 0.5, at 0.05, as train_until does.
void train_announced(Instance& instance, uint64_t ticket);

/// At the beginning of a test: nothing is left of the one before. Ends the program where there is no accelerator. `delays`: where the
/// accelerator can be late on purpose, it is, in another way for each number; 0: it isn't.
void begin_test(uint64_t delays = 0);
/// What the accelerator has found wrong since, at the end of a test; empty where it can't know.
std::string reports();

}  // namespace stratagem::test
