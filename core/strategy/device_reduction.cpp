// SPDX-License-Identifier: Apache-2.0
#include "strategy/device_reduction.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "accelerator/order.hpp"
#include "torch/dtypes.hpp"

namespace stratagem {

DeviceBucket::DeviceBucket(const Lanes& lanes, at::ScalarType type, int64_t numel) : dtype(type), factors(lanes.size()) {
  for (size_t i = 0; i < lanes.size(); ++i) {
    const Lanes::Scope scope(lanes, i);
    flat.push_back(at::empty({numel}, at::TensorOptions().dtype(type).device(lanes[i].device)));
    full.emplace_back(lanes[i].device.type());
    reduced.emplace_back(lanes[i].device.type());
  }
}

void DeviceReduction::launch(DeviceBucket& bucket) {
  const std::lock_guard lock(mutex_);
  const c10::InferenceMode normal(false);  // autograd's threads come in modes of their own
  const c10::AutoGradMode no_gradient(false);
  for (const size_t leader : lanes_.leaders()) add_on_device(bucket, leader);
  if (lanes_.group() != nullptr) {
    try {
      all_reduce(bucket);
    } catch (const Error& error) {
      throw lanes_.broken(error);
    }
  }
  for (const size_t leader : lanes_.leaders()) bucket.reduced[leader].record(lanes_[leader].comm);
}

bool DeviceReduction::is_alone(size_t leader) const {
  for (size_t i = leader + 1; i < lanes_.size(); ++i) {
    if (lanes_[i].leader == leader) return false;
  }
  return true;
}

// A single replica's factor is left to the transport, where there is one.
void DeviceReduction::add_on_device(DeviceBucket& bucket, size_t leader) const {
  const c10::Stream& comm = lanes_[leader].comm;
  const c10::StreamGuard guard(comm);
  at::Tensor& sum = bucket.flat[leader];
  order::wait("bucket full before its reduction", comm, bucket.full[leader]);
  if (lanes_.group() != nullptr && is_alone(leader)) return;
  if (bucket.factors[leader] == 0) {
    sum.zero_();
  } else if (bucket.factors[leader] != 1) {
    sum.mul_(bucket.factors[leader]);
  }
  for (size_t i = leader + 1; i < lanes_.size(); ++i) {
    if (lanes_[i].leader != leader) continue;
    order::wait("bucket of a device's other replica full before it is added", comm, bucket.full[i]);
    if (bucket.factors[i] != 0) sum.add_(bucket.flat[i], bucket.factors[i]);
  }
}

void DeviceReduction::all_reduce(DeviceBucket& bucket) const {
  const TransportApi& transport = lanes_.transport();
  const std::vector<size_t>& leaders = lanes_.leaders();
  const bool is_compressed = compresses_ && bucket.dtype == at::kFloat;
  const bool takes_factor = (bucket.dtype == at::kFloat || bucket.dtype == at::kDouble) && !is_compressed;
  std::vector<at::Tensor> sent;
  std::vector<double> factors(leaders.size(), 1);
  for (size_t rank = 0; rank < leaders.size(); ++rank) {
    const size_t leader = leaders[rank];
    const c10::StreamGuard guard(lanes_[leader].comm);
    at::Tensor flat = bucket.flat[leader];
    if (is_alone(leader)) {
      factors[rank] = bucket.factors[leader];
      if (factors[rank] == 0) flat.zero_();  // so that what isn't finite there isn't read
      if (!takes_factor && factors[rank] != 0) flat.mul_(factors[rank]);
      if (!takes_factor || factors[rank] == 0) factors[rank] = 1;
    }
    sent.push_back(is_compressed ? flat.to(at::kBFloat16) : flat);
  }
  check(transport.begin(lanes_.group()));
  for (size_t rank = 0; rank < leaders.size(); ++rank) {
    const TransportBuffer buffer{sent[rank].mutable_data_ptr(), sent[rank].numel(), from_scalar_type(sent[rank].scalar_type())};
    check(transport.all_reduce(lanes_.group(), rank, &buffer, factors[rank], lanes_[leaders[rank]].comm.pack3()));
  }
  check(transport.end(lanes_.group()));
  for (size_t rank = 0; is_compressed && rank < leaders.size(); ++rank) {
    const c10::StreamGuard guard(lanes_[leaders[rank]].comm);
    bucket.flat[leaders[rank]].copy_(sent[rank]);
  }
}

void DeviceReduction::receive(const DeviceBucket& bucket, size_t lane) const {
  order::wait("bucket reduced before its use", lanes_[lane].compute, bucket.reduced[lanes_[lane].leader]);
}

}  // namespace stratagem
