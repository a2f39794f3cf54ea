// SPDX-License-Identifier: Apache-2.0
//
// A process that ends with everything in flight: late kernels, a stream that is held, ranks that wait, tensors that live as long as the
// process. It must end, at once and with 0.
#include "accelerator/emulated_support.hpp"

namespace {

std::vector<at::Tensor> kept;  // destroyed after main

}  // namespace

int main() {
  emulated::set_delays(1, std::chrono::microseconds(2000));
  for (int i = 0; i < 2; ++i) {
    for (int k = 0; k < 100; ++k) kept.push_back(at::ones({100, 100}, on(i)).mm(at::ones({100, 100}, on(i))));
  }
  kept.push_back(at::zeros({100}, at::TensorOptions().pinned_memory(true)));
  kept.back().copy_(kept[0].flatten().narrow(0, 0, 100), true);
  static emulated::Gate* const gate = new emulated::Gate(new_stream(2));
  gate->await_reached();
  stratagem::TransportGroup* group = nullptr;
  const stg_device devices[] = {{STG_DEVICE_EXTENSION, 0}, {STG_DEVICE_EXTENSION, 1}};
  const stratagem::TransportApi& api = emulated::transport();
  if (api.open(devices, 2, "{}", 0, &group) != nullptr) return 1;
  emulated::hold_rank(1);
  if (api.begin(group) != nullptr) return 1;
  for (int i = 0; i < 2; ++i) {
    const stratagem::TransportBuffer buffer{kept[100 * i].data_ptr(), 10, {STG_DTYPE_FLOAT, 32, 1}};
    if (api.all_reduce(group, i, &buffer, 1, default_stream(i).pack3()) != nullptr) return 1;
  }
  return api.end(group) == nullptr ? 0 : 1;
}
