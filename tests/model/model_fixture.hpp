// SPDX-License-Identifier: Apache-2.0
//
// Models, batches and replicas for the tests of the model SDK.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <dlfcn.h>
#include <stratagem/plugin.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "base/model.hpp"
#include "model/tensor_model.hpp"
#include "torch/bridge.hpp"

// Last, since LibTorch has a CHECK, too.
#include "support/catch.hpp"

namespace stratagem::test {

/// The model of a test's own class.
template <class M>
Model own_model(const std::string& options = "{}", const stg_host* host = nullptr) {
  const stg_model* made = nullptr;
  check(sdk::create_model("own", sdk::model_class<M>, to_abi(options), host, &made));
  Model model(made);
  made->release(made->self);  // the caller's reference
  return model;
}

inline const stg_plugin& load_plugin(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  INFO((library == nullptr ? dlerror() : path));
  REQUIRE(library != nullptr);
  const auto probe = reinterpret_cast<stg_plugin_probe_fn>(dlsym(library, STG_PLUGIN_PROBE_SYMBOL));
  REQUIRE(probe != nullptr);
  const stg_probe_request request{STG_ABI_MAJOR, STG_ABI_MINOR, STG_ABI_MINOR, 0, {"test", 4}};
  stg_probe_reply reply{};
  REQUIRE(probe(&request, &reply) == STG_PROBE_ACCEPTED);
  return *static_cast<const stg_plugin*>(reply.plugin);
}

/// The model of a model library, as a host makes it.
inline Model library_model(const std::string& path, const std::string& options = "{}", const stg_host* host = nullptr) {
  const stg_plugin& plugin = load_plugin(path);
  REQUIRE(plugin.num_models == 1);
  const stg_model* made = nullptr;
  check(plugin.models[0]->create(to_abi(options), host, &made));
  Model model(made);
  made->release(made->self);
  return model;
}

inline stg_replicate_args replicate_args(int32_t index = 0, int32_t num_replicas = 1, uint64_t seed = 1) {
  auto args = sized<stg_replicate_args>();
  args.device = {STG_DEVICE_CPU, index};
  args.replica = index;
  args.num_replicas = num_replicas;
  args.seed = seed;
  return args;
}

inline stg_step_context step_context(uint32_t stage, uint32_t flags, int32_t index = 0) {
  auto context = sized<stg_step_context>();
  context.device = {STG_DEVICE_CPU, index};
  context.replica = index;
  context.num_replicas = 1;
  context.stage = stage;
  context.flags = flags;
  return context;
}

inline Tree batch_of(const at::Tensor& inputs, const at::Tensor& targets) {
  Dict dict;
  dict.emplace_back("inputs", to_dlpack(inputs));
  if (targets.defined()) dict.emplace_back("targets", to_dlpack(targets));
  return make_tree(std::move(dict));
}

inline at::Generator seeded(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

/// The rows that the default mlp takes.
struct Rows {
  at::Tensor inputs = at::randn({6, 4}, seeded(11));
  at::Tensor targets = at::randint(0, 3, {6}, seeded(12), at::kLong);
  Tree batch() const { return batch_of(inputs, targets); }
};

/// The error's message, code in front: "INVALID_ARGUMENT: ...".
inline std::string failure(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return code_name(error.code) + ": " + error.message;
  }
  return "no error";
}

/// What one output of a step is.
inline at::Tensor output(const ModelStep& step, std::string_view key) {
  const stg_value* value = find(step.outputs.root(), key);
  REQUIRE(value != nullptr);
  REQUIRE(value->type == STG_TENSOR);
  return view_tensor(*value->as.tensor).clone();
}

/// Views of a replica's parameters by main name.
inline std::map<std::string, at::Tensor> parameters_of(const Replica& replica) {
  std::map<std::string, at::Tensor> found;
  const stg_model_description description = replica.describe();
  for (uint64_t i = 0; i < description.num_parameters; ++i) {
    const stg_parameter& parameter = *description.parameters[i];
    found[std::string(text_of(parameter.names[0]))] = view_tensor(*parameter.tensor);
  }
  return found;
}

/// Gradients of one training step by index; undefined where the model reported null. Each may come once.
inline std::map<uint64_t, at::Tensor> gradients_of(const Replica& replica, GraphPtr graph, double scale = 1) {
  std::map<uint64_t, at::Tensor> found;
  replica.backward(std::move(graph), scale, [&](uint64_t index, TensorPtr gradient) {
    REQUIRE(found.count(index) == 0);
    found[index] = gradient == nullptr ? at::Tensor() : to_tensor(std::move(gradient));
  });
  return found;
}

inline ModelStep train(const Replica& replica, Tree batch) {
  return replica.step(step_context(STG_STAGE_FIT, STG_STEP_GRADIENT), std::move(batch));
}

}  // namespace stratagem::test
