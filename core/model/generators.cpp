// SPDX-License-Identifier: Apache-2.0
#include "model/generators.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/AcceleratorHooksInterface.h>
#include <ATen/ops/empty.h>

#include <cstring>

#include "base/error.hpp"

namespace stratagem::sdk {

namespace {

// SplitMix64 (Steele, Lea, Flood 2014). LibTorch's CPU generator reads only the low 32 bits of a seed; these depend on all of both.
uint64_t mix(uint64_t seed, int32_t replica) {
  uint64_t z = seed + (static_cast<uint64_t>(replica) + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

void append_state(const at::Generator& generator, std::vector<uint8_t>& out) {
  const at::Tensor state = generator.get_state();
  const auto* bytes = state.const_data_ptr<uint8_t>();
  out.insert(out.end(), bytes, bytes + state.numel());
}

uint64_t state_size_bytes(const at::Generator& generator) { return static_cast<uint64_t>(generator.get_state().numel()); }

void restore(at::Generator& generator, std::span<const uint8_t> bytes) {
  at::Tensor state = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(state.mutable_data_ptr(), bytes.data(), bytes.size());
  generator.set_state(state);
}

}  // namespace

at::Generator make_generator(at::Device device, uint64_t seed) {
  if (device.is_cpu()) return at::make_generator<at::CPUGeneratorImpl>(seed);
  at::Generator generator = at::globalContext().getAcceleratorHooksInterface(device.type()).getNewGenerator(device.index());
  generator.set_current_seed(seed);
  return generator;
}

ReplicaGenerators::ReplicaGenerators(at::Device device, uint64_t seed, int32_t replica)
    : cpu_(make_generator(at::Device(at::kCPU), mix(seed, replica))) {
  if (!device.is_cpu()) device_ = make_generator(device, mix(seed, replica));
}

std::vector<uint8_t> ReplicaGenerators::state() const {
  std::vector<uint8_t> out;
  append_state(cpu_, out);
  if (device_.has_value()) append_state(*device_, out);
  return out;
}

void ReplicaGenerators::set_state(std::span<const uint8_t> state) {
  const uint64_t cpu_bytes = state_size_bytes(cpu_);
  const uint64_t device_bytes = device_.has_value() ? state_size_bytes(*device_) : 0;
  if (state.size() < cpu_bytes || (device_bytes != 0 && state.size() != cpu_bytes && state.size() != cpu_bytes + device_bytes)) {
    throw invalid_argument("a generator state of ", state.size(), " bytes; expected ", cpu_bytes, " for the CPU",
                           device_bytes == 0 ? std::string() : concat(", or ", cpu_bytes + device_bytes, " with this device's"));
  }
  restore(cpu_, state.first(cpu_bytes));
  if (device_bytes != 0 && state.size() != cpu_bytes) restore(*device_, state.subspan(cpu_bytes));
}

}  // namespace stratagem::sdk
