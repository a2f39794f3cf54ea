// SPDX-License-Identifier: Apache-2.0
//
// A replica's generators of random numbers: one for the CPU, and one for its device where that is another.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>
#include <span>
#include <vector>

#include "torch/runtime/thread_generator.hpp"

namespace stratagem::sdk {

at::Generator make_generator(at::Device device, uint64_t seed);

class ReplicaGenerators {
 public:
  /// Seeded by (seed, replica), so that replicas differ and each is reproducible.
  ReplicaGenerators(at::Device device, uint64_t seed, int32_t replica);

  /// While it lives, the calling thread draws from them.
  class Scope {
   public:
    explicit Scope(const ReplicaGenerators& generators) : cpu_(generators.cpu_) {
      if (generators.device_.has_value()) device_.emplace(*generators.device_);
    }

   private:
    ThreadGenerator cpu_;
    std::optional<ThreadGenerator> device_;
  };

  /// The CPU's state, then the device's.
  std::vector<uint8_t> state() const;
  /// A state without the device's part (of a replica on the CPU) leaves the device's generator as it is.
  void set_state(std::span<const uint8_t> state);

 private:
  at::Generator cpu_;
  std::optional<at::Generator> device_;
};

}  // namespace stratagem::sdk
