// SPDX-License-Identifier: Apache-2.0
//
// One replica of a LibTorch model: its tensors, each once with all its names, and what the ABI is shown of them.
#pragma once

#include <stratagem/model.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/generators.hpp"
#include "model/tensor_model.hpp"

namespace stratagem::sdk {

/// A parameter or buffer of a replica.
struct ReplicaTensor {
  std::vector<std::string> names;  ///< the first is the main one
  at::Tensor tensor;
  bool persistent = true;
  at::Tensor bound_gradient;  ///< where the strategy wants the gradient; undefined: as autograd made it

  // What describe shows; made anew by each.
  std::vector<stg_string> shown_names;
  TensorPtr shown_tensor;
  stg_parameter shown{};
};

class ModelReplica {
 public:
  /// Constructs the model with random numbers from `seed` alone, then converts and moves its tensors.
  ModelReplica(const char* model_name, ConstructModel construct, const nlohmann::json& options, const Host& host,
               const stg_replicate_args& args);

  TensorModel& model() { return *model_; }
  const Host& host() const { return host_; }
  at::Device device() const { return device_; }
  stg_device abi_device() const { return args_.device; }
  int32_t index() const { return args_.replica; }
  bool is_alone() const { return args_.num_replicas <= 1; }
  int num_threads() const { return static_cast<int>(args_.num_threads); }
  std::optional<at::ScalarType> floating_dtype() const { return floating_dtype_; }
  std::vector<ReplicaTensor>& parameters() { return parameters_; }
  ReplicaGenerators& generators() { return *generators_; }

  stg_model_description describe();
  void bind(uint64_t index, const stg_tensor& storage, const stg_tensor* gradient);
  void set_training(bool training);

 private:
  bool construct_without_values(ConstructModel construct, const nlohmann::json& options, at::Generator generator);
  void collect(const char* model_name);
  void convert(at::Tensor& tensor) const;

  Host host_;
  stg_replicate_args args_;
  at::Device device_;
  std::optional<at::ScalarType> floating_dtype_;
  std::optional<ReplicaGenerators> generators_;
  std::unique_ptr<TensorModel> model_;
  std::vector<ReplicaTensor> parameters_;
  std::vector<ReplicaTensor> buffers_;
  std::vector<const stg_parameter*> shown_parameters_;
  std::vector<const stg_parameter*> shown_buffers_;
};

}  // namespace stratagem::sdk
