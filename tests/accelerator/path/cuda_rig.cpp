// SPDX-License-Identifier: Apache-2.0
//
// The plugins as they are shipped, on GPUs. With STRATAGEM_TEST_ACCELERATOR=cpu they are on the CPU: that shows that this program, and
// whoever runs it, work on a machine without one.
#include "accelerator/path/cuda_rig.hpp"

#include <cstdlib>
#include <iostream>

namespace stratagem::test {

namespace {

std::vector<int32_t> indices(const std::string& devices) {
  std::vector<int32_t> there;
  const auto count = static_cast<int32_t>(is_on_gpus() ? num_gpus() : 4);
  for (const nlohmann::json& index : nlohmann::json::parse(devices)) there.push_back(index.get<int32_t>() % count);
  return there;
}

}  // namespace

bool is_on_gpus() {
  static const bool is = [] {
    const char* accelerator = std::getenv("STRATAGEM_TEST_ACCELERATOR");
    return accelerator == nullptr || std::string_view(accelerator) != "cpu";
  }();
  return is;
}

size_t num_gpus() {
  static const Gpus gpus = find_gpus();
  return gpus.names.size();
}

std::unique_ptr<Instance> on_accelerator(const std::string& strategy, const std::string& devices, const std::string& more,
                                         uint64_t flags) {
  const std::vector<int32_t> list = indices(devices);
  const std::string config = is_on_gpus() ? concat(R"({"accelerator": "cuda", "devices": )", nlohmann::json(list).dump())
                                          : concat(R"({"accelerator": "cpu", "devices": )", list.size());
  return std::make_unique<Instance>(strategy, concat(config, more, "}"), nullptr, flags);
}

stg_device accelerator_device(int32_t index) {
  if (!is_on_gpus()) return {STG_DEVICE_CPU, 0};
  return {STG_DEVICE_CUDA, index % static_cast<int32_t>(num_gpus())};
}

// Kernels of another kind than the CPU's: sums are made in another order.
Tolerances tolerances() { return {2e-4, 1e-11}; }

void begin_test(uint64_t) {
  [[maybe_unused]] static const bool is_ready = [] {
    if (!is_on_gpus()) return true;
    if (const std::string missing = find_gpus().missing; !missing.empty()) {
      std::cout << "skipped, for want of a GPU: " << missing << std::endl;
      std::exit(77);
    }
    on_accelerator("single_device", "[0]",
                   R"(, "optimizer": {"name": "sgd"})");  // LibTorch must not be used before its CUDA part is there
    return true;
  }();
}

std::string reports() { return ""; }

}  // namespace stratagem::test
