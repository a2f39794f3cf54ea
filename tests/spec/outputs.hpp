// SPDX-License-Identifier: Apache-2.0
//
// A model whose steps give the outputs that a test says.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "spec/toy_model.hpp"

namespace stratagem::test {

using Outputs = std::function<Value(int32_t replica)>;

inline std::unique_ptr<ToyModel> model_with(Outputs outputs) {
  std::vector<ToyParameter> parameters{{{"weight"}, {1}, {0}}};
  return std::make_unique<ToyModel>(parameters, [outputs](ToyReplica&, const stg_step_context& context, const stg_value&) {
    ToyStep step;
    step.outputs = outputs(context.replica);
    step.gradients = {{1}};
    return step;
  });
}

}  // namespace stratagem::test
