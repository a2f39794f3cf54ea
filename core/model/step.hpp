// SPDX-License-Identifier: Apache-2.0
//
// One step of a replica: the batch in, the model's step under the right thread-local state, the outputs out.
#pragma once

#include <stratagem/model.h>

#include "model/replica.hpp"

namespace stratagem::sdk {

/// What backward needs. The loss keeps autograd's graph, and that keeps of the batch what it reads.
struct Graph {
  at::Tensor loss;
  uint32_t flags;     ///< of the step, STG_STEP_*
  stg_stream stream;  ///< of the step, too
};

struct StepResult {
  Tree outputs;
  stg_value denominator{};
  TensorPtr denominator_owner;
  std::unique_ptr<Graph> graph;
};

StepResult run_step(ModelReplica& replica, const stg_step_context& context, Tree batch);

}  // namespace stratagem::sdk
