// SPDX-License-Identifier: Apache-2.0
//
// The SDK for authors of models on LibTorch: derive, register parameters, write the steps, export with one macro.
//
//   class Line : public stratagem::TensorModel {
//    public:
//     explicit Line(const nlohmann::json& options) : w_(register_parameter("w", at::zeros({1}))) {}
//     static stratagem::ModelInfo info() { return {"a line through 0", R"({"type": "object"})"}; }
//     stratagem::StepOutput training_step(const stratagem::Batch& batch, const stratagem::StepContext&) override {
//       return batch["x"].tensor().mul(w_).mean();
//     }
//    ...
//   };
//   STRATAGEM_MODEL_PLUGIN("line", "1.0.0", Line);
//
// The SDK makes everything else of stg_model (abi/stratagem/model.h): replicas, precision, autocast, gradient mode, generators,
// backward, errors. This header is quick to compile; with modules of torch::nn, derive from TorchModel (torch_model.hpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <stratagem/plugin.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <vector>

#include "base/host.hpp"
#include "base/strategy.hpp"
#include "model/tensor_tree.hpp"

namespace stratagem {

struct ModelInfo {
  const char* summary = "";           ///< one line
  const char* options_schema = "{}";  ///< JSON Schema of the model's options
};

/// What a step is told.
struct StepContext {
  const Host& host;  ///< for messages
  at::Device device;
  int32_t replica;
  int32_t num_replicas;
  uint32_t stage;  ///< STG_STAGE_*
  int64_t batch_index;
  int64_t dataloader_index;
  int64_t global_step;  ///< optimizer steps done
};

/// One parameter or buffer of a model, under one of its names.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  bool is_parameter;
  bool persistent = true;  ///< belongs in a checkpoint
};

/// A model, one object per replica. Its constructor takes the options and makes all parameters on the CPU, in float32; the SDK
/// converts and moves them. Random numbers drawn there and in the steps come from the replica's own generator. Where all weights will be
/// written over (a replica but the first, a swap, a resume) random fills in place are left out; a constructor that reads what it has
/// filled runs once more, with them. Called by one thread at a time, which may not be the one that made it. Steps must not write to the
/// batch.
class TensorModel {
 public:
  TensorModel() = default;
  TensorModel(const TensorModel&) = delete;
  TensorModel& operator=(const TensorModel&) = delete;
  virtual ~TensorModel() = default;

  /// Gives the loss, a 0-dim tensor: alone, or in a dict under "loss". The share's mean, unless loss_kind says sum or the output says
  /// over what.
  virtual StepOutput training_step(const Batch& batch, const StepContext& context) = 0;
  virtual StepOutput validation_step(const Batch& batch, const StepContext& context);
  /// Not overridden: validation_step.
  virtual StepOutput test_step(const Batch& batch, const StepContext& context);
  virtual StepOutput predict_step(const Batch& batch, const StepContext& context);
  /// Splits a packed or ragged batch into at most `num_shares` shares, in order; called where it is overridden, for one device too. A
  /// share whose tensors disagree about its rows needs a denominator from the step.
  virtual std::vector<TensorTree> split(const Batch& batch, size_t num_shares);
  /// Moves a share to the device, where a model has something better to do than to move every tensor. Must bear being applied twice.
  virtual TensorTree transfer(const Batch& batch, at::Device device, int64_t dataloader_index);
  /// STG_LOSS_MEAN or STG_LOSS_SUM.
  virtual uint64_t loss_kind() const { return STG_LOSS_MEAN; }

  bool is_training() const { return is_training_; }
  virtual void set_training(bool training) { is_training_ = training; }
  /// All parameters and buffers, in order; a tensor that is used twice comes twice, with its names.
  virtual std::vector<NamedTensor> named_tensors() const { return registered_; }

 protected:
  /// Registers a parameter and gives it back. A second name for the same tensor ties them. An undefined tensor is one without a shape
  /// yet, which a replica refuses, naming it.
  at::Tensor register_parameter(std::string name, at::Tensor tensor, bool requires_grad = true);
  at::Tensor register_buffer(std::string name, at::Tensor tensor, bool persistent = true);

 private:
  std::vector<NamedTensor> registered_;
  bool is_training_ = true;
};

namespace sdk {

using ConstructModel = std::unique_ptr<TensorModel> (*)(const nlohmann::json& options);

/// What the SDK is told of a class of models.
struct ModelClass {
  ConstructModel construct;
  bool has_split;
  bool has_transfer;
};

/// A model as the host gets it: one reference, the caller's.
stg_error* create_model(const char* name, ModelClass model_class, stg_string options_json, const stg_host* host,
                        const stg_model** out) noexcept;

/// A plugin of one model. Static and trivially destroyed.
struct ModelPlugin {
  ModelPlugin(const char* name, const char* version, const ModelInfo& info, decltype(stg_model_factory::create) create);

  stg_model_factory factory;
  const stg_model_factory* factories[1];
  stg_plugin plugin;
};

// An override changes the type that a member's address has.
template <class M>
constexpr ModelClass model_class{
    [](const nlohmann::json& options) -> std::unique_ptr<TensorModel> { return std::make_unique<M>(options); },
    !std::is_same_v<decltype(&M::split), decltype(&TensorModel::split)>,
    !std::is_same_v<decltype(&M::transfer), decltype(&TensorModel::transfer)>};

}  // namespace sdk
}  // namespace stratagem

/// Makes a shared library a model library. `name` and `version` are string literals; once per library, outside any namespace.
#define STRATAGEM_MODEL_PLUGIN(name, version, Class)                                                                    \
  STRATAGEM_NOTE(name, version, "", "\"" name "\"");                                                                    \
  extern "C" STG_EXPORT uint32_t stg_plugin_probe(const stg_probe_request* request, stg_probe_reply* reply) {           \
    try {                                                                                                               \
      static const ::stratagem::sdk::ModelPlugin made(                                                                  \
          name, version, Class::info(), [](stg_string options_json, const stg_host* host, const stg_model** out) {      \
            return ::stratagem::sdk::create_model(name, ::stratagem::sdk::model_class<Class>, options_json, host, out); \
          });                                                                                                           \
      return ::stratagem::sdk::answer_probe(request, reply, made.plugin);                                               \
    } catch (...) {                                                                                                     \
      return ::stratagem::sdk::refuse_probe(reply, name);                                                               \
    }                                                                                                                   \
  }                                                                                                                     \
  static_assert(STG_ABI_MAJOR == 1 && STG_ABI_MINOR == 0, "STRATAGEM_NOTE says 1.0")
