// SPDX-License-Identifier: Apache-2.0
//
// A model table for tests, without LibTorch: parameters are plain host memory, and a lambda is the step. What a test wants to go
// wrong, its lambda does.
#pragma once

#include <stratagem/model.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "base/value.hpp"

namespace stratagem::test {

struct ToyParameter {
  std::vector<std::string> names;
  std::vector<int64_t> shape;
  std::vector<double> values;
  uint64_t flags = STG_PARAMETER_REQUIRES_GRAD | STG_PARAMETER_PERSISTENT | STG_PARAMETER_PINNED;
  stg_dtype dtype = float32;
};

/// One replica as a step sees it. Parameters may be bound to others' memory.
struct ToyReplica {
  stg_replicate_args args{};
  std::vector<TensorPtr> parameters;
  std::vector<TensorPtr> buffers;
  bool is_training = false;
  int num_times_told = 0;  // parameters_changed

  double value(size_t parameter, int64_t element) const { return read_element(parameters[parameter]->view, element); }

  // What describe lends.
  std::vector<std::vector<stg_string>> names;
  std::vector<stg_parameter> described;
  std::vector<const stg_parameter*> described_parameters, described_buffers;
};

/// A sparse gradient as it is given to the sink; the model scales the values.
struct ToySparse {
  TensorPtr indices;
  TensorPtr values;
  std::vector<int64_t> shape;
};

struct ToyStep {
  Value outputs;
  Value denominator;  ///< none, a number or a tensor
  /// The gradient of the loss, by parameter, in row-major order; empty: none. Scaled by the model.
  std::vector<std::vector<double>> gradients;
  std::map<size_t, ToySparse> sparse_gradients;  ///< by parameter, instead
};

class ToyModel {
 public:
  using StepFunction = std::function<ToyStep(ToyReplica&, const stg_step_context&, const stg_value& batch)>;

  explicit ToyModel(std::vector<ToyParameter> parameters, StepFunction step);
  ToyModel(const ToyModel&) = delete;
  ToyModel& operator=(const ToyModel&) = delete;

  std::vector<ToyParameter> parameters;
  std::vector<ToyParameter> buffers;
  StepFunction on_step;
  std::function<void(ToyReplica&)> on_backward;  ///< before the gradients are reported
  uint64_t loss_kind = STG_LOSS_MEAN;
  bool reads_batch_in_backward = false;  ///< the step is done again there, from the batch as it is then
  std::atomic<int> num_references{0};
  std::atomic<int> num_replicas{0};
  std::atomic<int> num_skipped_inits{0};  ///< replicas that were asked for without initial values, ever
  std::atomic<int> num_graphs{0};
  stg_model table{};
};

/// The element (row-major) of the tensor under `key`, or of the tensor that the batch is.
double element(const stg_value& batch, const char* key, int64_t index);
int64_t num_rows(const stg_value& batch, const char* key);

TensorPtr tensor_of(const std::vector<double>& values, std::vector<int64_t> shape, stg_dtype dtype = float32);
TensorPtr scalar(double value, stg_dtype dtype = float32);

/// Linear(1,1) without bias from w = 0: the loss of a sample is w*x, so its gradient is x. Batch: {"x": (n,)}. Outputs: {"loss"}.
std::unique_ptr<ToyModel> linear_model(double initial = 0, stg_dtype dtype = float32);

}  // namespace stratagem::test
