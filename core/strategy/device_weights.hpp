// SPDX-License-Identifier: Apache-2.0
//
// What the shares of a micro-batch weigh, where a step says so by a tensor on its device. Every device gets the weights of all, and works
// with them; the host gets a copy, which it reads when all else of the step is queued:
//
//   compute   [forward][its weight]──┐            ┌──[backward ...]
//   comm                             └─[sum]─[copy to the host]
//
// A vector has a place for each replica; each fills its own, and the sum of all of them has all.
#pragma once

#include <ATen/core/Tensor.h>

#include <variant>
#include <vector>

#include "strategy/device_reduction.hpp"

namespace stratagem {

class DeviceWeights {
 public:
  /// A number, or a tensor of one element.
  using Weight = std::variant<double, at::Tensor>;

  DeviceWeights(const Lanes& lanes, DeviceReduction& reduction);

  /// Serial: by share. A tensor was made on its replica's compute stream.
  void send(const std::vector<Weight>& weights);
  /// The doubles of all replicas, on the lane's device, for what it does next. In the lane.
  const at::Tensor& receive(size_t lane) const;
  /// On the host. Blocks until all shares' forward is done.
  std::vector<double> read(const Call& call) const;

 private:
  const Lanes& lanes_;
  DeviceReduction& reduction_;
  DeviceBucket bucket_;
  at::Tensor in_host_memory_;  // pinned: from the copy's launch until read
  c10::Event is_in_host_memory_;
};

/// The mean of 0-dim tensors, of those that weigh something, in the type of the first. On the current device.
at::Tensor weighted_mean(const std::vector<at::Tensor>& numbers, const at::Tensor& weights);

}  // namespace stratagem
