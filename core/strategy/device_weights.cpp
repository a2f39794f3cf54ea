// SPDX-License-Identifier: Apache-2.0
#include "strategy/device_weights.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>

namespace stratagem {

DeviceWeights::DeviceWeights(const Lanes& lanes, DeviceReduction& reduction)
    : lanes_(lanes),
      reduction_(reduction),
      bucket_(lanes, at::kDouble, static_cast<int64_t>(lanes.size())),
      is_in_host_memory_(lanes.root().device.type()) {
  bucket_.factors.assign(lanes.size(), 1);
  const Lanes::Scope scope(lanes, 0);
  in_host_memory_ = at::empty({static_cast<int64_t>(lanes.size())},
                              at::TensorOptions().dtype(at::kDouble).device(at::kCPU).pinned_memory(true));
}

void DeviceWeights::send(const std::vector<Weight>& weights) {
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const Lanes::Scope scope(lanes_, i);
    const at::Tensor& all = bucket_.flat[i];
    all.zero_();
    if (i < weights.size()) {
      const at::Tensor own = all.narrow(0, static_cast<int64_t>(i), 1);
      if (const auto* tensor = std::get_if<at::Tensor>(&weights[i])) {
        own.copy_(tensor->reshape({1}), /*non_blocking=*/true);
      } else {
        own.fill_(std::get<double>(weights[i]));
      }
    }
    bucket_.mark_full(lanes_, i);
  }
  reduction_.launch(bucket_);
  const c10::Stream& comm = lanes_.root().comm;
  const c10::StreamGuard guard(comm);
  in_host_memory_.copy_(bucket_.flat[0], /*non_blocking=*/true);
  is_in_host_memory_.record(comm);
  bucket_.reduced[0].record(comm);  // what is written there next comes after the copy
}

const at::Tensor& DeviceWeights::receive(size_t lane) const {
  reduction_.receive(bucket_, lane);
  return bucket_.flat[lanes_[lane].leader];
}

std::vector<double> DeviceWeights::read(const Call& call) const {
  lanes_.await(call, 0, is_in_host_memory_, "the denominators");
  const double* first = in_host_memory_.const_data_ptr<double>();
  return {first, first + in_host_memory_.numel()};
}

at::Tensor weighted_mean(const std::vector<at::Tensor>& numbers, const at::Tensor& weights) {
  std::vector<at::Tensor> doubles;
  for (const at::Tensor& number : numbers) doubles.push_back(number.to(weights.device()).to(at::kDouble));
  const at::Tensor all = at::stack(doubles);
  const at::Tensor own = weights.narrow(0, 0, all.numel());
  const at::Tensor zero = at::zeros({}, own.options());
  return at::where(own.eq(0), zero, all.mul(own)).sum().div(own.sum()).to(numbers[0].scalar_type());
}

}  // namespace stratagem
