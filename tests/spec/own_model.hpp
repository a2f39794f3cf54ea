// SPDX-License-Identifier: Apache-2.0
//
// Models on LibTorch that a test writes for itself.
#pragma once

#include <string>

#include "base/structs.hpp"
#include "model/tensor_model.hpp"
#include "spec/instance.hpp"
#include "torch/bridge.hpp"

namespace stratagem::test {

/// A model of the class M.
template <class M>
ModelPtr model_of(const std::string& options = "{}") {
  const stg_model* made = nullptr;
  check(sdk::create_model("own", sdk::model_class<M>, to_abi(options), nullptr, &made));
  return ModelPtr{made};
}

/// {"x": inputs}.
inline Tree batch_with(const at::Tensor& inputs) {
  Dict dict;
  dict.emplace_back("x", to_dlpack(inputs));
  return make_tree(std::move(dict));
}

}  // namespace stratagem::test
