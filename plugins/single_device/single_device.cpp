// SPDX-License-Identifier: Apache-2.0
//
// single_device: the whole model on one device, which has all the threads. Outputs are the model's own.
#include "strategy/engine.hpp"

namespace stratagem {
namespace {

class SingleDevice final : public Engine {
 public:
  explicit SingleDevice(const CreateArgs& args) : Engine(args, Topology::single_device) {}

  static StrategyInfo info() {
    return {"Trains on one device.",
            R"json({
  "type": "object",
  "additionalProperties": false,
  "properties": {
    "compat": {
      "description": "lightning: micro-batches of a window weigh the same, whatever their size, as in PyTorch Lightning",
      "enum": ["lightning"]
    }
  }
})json",
            device_kinds(), STG_CAPABILITY_CALLER_THREAD_ONLY | STG_CAPABILITY_STREAMS};
  }
};

}  // namespace
}  // namespace stratagem

STRATAGEM_STRATEGY_PLUGIN("single_device", "1.0.0", stratagem::SingleDevice);
