// SPDX-License-Identifier: Apache-2.0
//
// The SDK for models that are made of torch::nn modules. Include the headers of the modules that are used
// (torch/nn/modules/linear.h): torch/torch.h takes twice as long to compile.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "model/tensor_model.hpp"

namespace stratagem {

/// As TensorModel, with modules. Their parameters are called as in the bare model: "conv.weight" for a module registered as "conv".
class TorchModel : public TensorModel {
 public:
  void set_training(bool training) override {
    TensorModel::set_training(training);
    for (const auto& [name, module] : modules_) module->train(training);
  }

  std::vector<NamedTensor> named_tensors() const override {
    std::vector<NamedTensor> all = TensorModel::named_tensors();
    for (const auto& [name, module] : modules_) {
      for (const auto& item : module->named_parameters()) all.push_back({name + "." + item.key(), item.value(), true});
    }
    for (const auto& [name, module] : modules_) {
      for (const auto& item : module->named_buffers()) all.push_back({name + "." + item.key(), item.value(), false});
    }
    return all;
  }

 protected:
  /// Registers a module (torch::nn::Linear(...)) and gives it back.
  template <class Contained>
  Contained register_module(std::string name, Contained holder) {
    modules_.emplace_back(std::move(name), holder.ptr());
    return holder;
  }
  /// The same for a class of one's own.
  template <class Module>
  std::shared_ptr<Module> register_module(std::string name, std::shared_ptr<Module> module) {
    modules_.emplace_back(std::move(name), module);
    return module;
  }

 private:
  std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> modules_;
};

}  // namespace stratagem
