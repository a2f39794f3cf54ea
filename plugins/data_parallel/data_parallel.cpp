// SPDX-License-Identifier: Apache-2.0
//
// data_parallel: a replica of the model on each device of this process, kept for the run. Each batch is split along dimension 0, every
// replica runs its share at the same time on its own thread, outputs are gathered to the root, gradients are reduced, and one update
// changes all replicas. On one CPU the replicas share the memory of their parameters, and each thread updates a range of it.
#include "strategy/engine.hpp"

namespace stratagem {
namespace {

class DataParallel final : public Engine {
 public:
  explicit DataParallel(const CreateArgs& args) : Engine(args, Topology::data_parallel) {}

  static StrategyInfo info() {
    return {"Splits each batch over the devices of one process and reduces the gradients.",
            R"json({
  "type": "object",
  "additionalProperties": false,
  "properties": {
    "split": {
      "description": "balanced: shares differ by at most one row; chunk: ceil(rows / devices) rows each",
      "enum": ["balanced", "chunk"],
      "default": "balanced"
    },
    "bucket_mib": {
      "description": "accelerators: gradients are reduced in buckets of about this size",
      "type": "number", "minimum": 0, "exclusiveMaximum": 1048576, "default": 25
    },
    "first_bucket_mib": {
      "description": "accelerators: the size of the first one, which backward fills first",
      "type": "number", "minimum": 0, "exclusiveMaximum": 1048576, "default": 1
    },
    "compress": {
      "description": "accelerators: bf16: float32 gradients cross between devices as bfloat16",
      "enum": ["none", "bf16"],
      "default": "none"
    },
    "optimizer_sharding": {
      "description": "accelerators: each device updates a part of the parameters, and has the optimizer's state for that part alone",
      "type": "boolean",
      "default": false
    },
    "nccl": {
      "description": "cuda: settings of NCCL's communicators",
      "type": "object"
    },
    "compat": {
      "description": "lightning: what PyTorch Lightning's strategy does where it differs (implies split: chunk)",
      "enum": ["lightning"]
    }
  }
})json",
            device_kinds(), STG_CAPABILITY_MULTIPLE_DEVICES | STG_CAPABILITY_CALLER_THREAD_ONLY | STG_CAPABILITY_STREAMS};
  }
};

}  // namespace
}  // namespace stratagem

STRATAGEM_STRATEGY_PLUGIN("data_parallel", "1.0.0", stratagem::DataParallel);
