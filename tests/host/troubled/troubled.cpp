// SPDX-License-Identifier: Apache-2.0
//
// A strategy like single_device that gets into the trouble which its options name, for the tests of swaps:
//
//   create     refuses to be made
//   setup      fails when it is set up already: it has read its state and started its thread
//   memory     has no memory for its setup
//   crowded    says that its device is cuda:0, which can hold one such instance
//   full       says the same, and the device has no room at all
//   once       as crowded, and can be set up a single time
#include <stdexcept>

#include "strategy/engine.hpp"

namespace stratagem {
namespace {

int num_on_device = 0;  // of the instances that say that they are on cuda:0

CreateArgs without_trouble(CreateArgs args) {
  args.config.erase("options");
  return args;
}

class Troubled final : public Engine {
 public:
  explicit Troubled(const CreateArgs& args)
      : Engine(without_trouble(args), Topology::single_device),
        trouble_(args.config.value("options", nlohmann::json::object()).value("trouble", "")),
        is_on_device_(trouble_ == "crowded" || trouble_ == "full" || trouble_ == "once") {
    if (trouble_ == "create") throw failed_precondition("there is no such device");
  }
  ~Troubled() override { leave_device(); }

  static StrategyInfo info() {
    return {"gets into trouble",
            R"({"type": "object", "additionalProperties": false, "properties": {"trouble": {"type": "string"}}})",
            {STG_DEVICE_CPU}};
  }

  const std::vector<stg_device>& devices() const override { return is_on_device_ ? device_ : Engine::devices(); }

  void setup(const Call& call, Model model, Tree state, uint32_t stage) override {
    if (trouble_ == "memory") throw std::bad_alloc();
    const bool has_room = !is_on_device_ || (num_on_device == 0 && trouble_ != "full" && !(trouble_ == "once" && was_set_up_));
    if (!has_room) throw Error(STG_RESOURCE_EXHAUSTED, "cuda:0 is full");
    Engine::setup(call, std::move(model), std::move(state), stage);
    if (trouble_ == "setup") {
      Engine::teardown(call);
      throw std::runtime_error("this strategy was told to fail");
    }
    was_set_up_ = true;
    if (is_on_device_) {
      ++num_on_device;
      holds_memory_ = true;
    }
  }
  void teardown(const Call& call) override {
    Engine::teardown(call);
    leave_device();
  }

 private:
  void leave_device() {
    if (std::exchange(holds_memory_, false)) --num_on_device;
  }

  std::string trouble_;
  bool is_on_device_;
  bool holds_memory_ = false;
  bool was_set_up_ = false;
  std::vector<stg_device> device_{{STG_DEVICE_CUDA, 0}};
};

}  // namespace
}  // namespace stratagem

STRATAGEM_STRATEGY_PLUGIN("troubled", "1.0.0", stratagem::Troubled);
