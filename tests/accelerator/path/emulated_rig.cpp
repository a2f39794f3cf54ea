// SPDX-License-Identifier: Apache-2.0
//
// The plugins' own sources on the emulated accelerator, whose kernels are the CPU's.
#include "accelerator/path/emulated_rig.hpp"

#include "support/plugin.hpp"

namespace stratagem::test {

std::unique_ptr<Instance> on_accelerator(const std::string& strategy, const std::string& devices, const std::string& more,
                                         uint64_t flags) {
  const stg_plugin& plugin = load_plugin(EMULATED_PLUGINS "/emulated_" + strategy + ".so");
  return std::make_unique<Instance>(strategy_api(plugin, strategy),
                                    concat(R"({"accelerator": "emulated", "devices": )", devices, more, "}"), nullptr, flags);
}

stg_device accelerator_device(int32_t index) { return {STG_DEVICE_EXTENSION, index}; }

Tolerances tolerances() { return {2e-5, 1e-12}; }

void begin_test(uint64_t delays) {
  emulated::drain();
  emulated::take_reports();
  emulated::set_delays(delays, std::chrono::microseconds(delays == 0 ? 0 : 100));
  emulated::release_ranks();
  emulated::heal();
  emulated::fail_transport_call(0, "");
  leave_out("");
  take_places();
}

std::string reports() {
  std::string all;
  for (const std::string& report : emulated::take_reports()) all += report + "\n";
  return all;
}

}  // namespace stratagem::test
