// SPDX-License-Identifier: Apache-2.0
#include "strategy/device_reduction.hpp"

#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "accelerator/order.hpp"
#include "torch/dtypes.hpp"

namespace stratagem {

namespace {

// The rank's part of as many as there are.
at::Tensor part_of(const at::Tensor& flat, size_t rank, size_t num_ranks) {
  const int64_t numel = flat.numel() / static_cast<int64_t>(num_ranks);
  return flat.narrow(0, static_cast<int64_t>(rank) * numel, numel);
}

TransportBuffer buffer_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr(), tensor.numel(), from_scalar_type(tensor.scalar_type())};
}

}  // namespace

void multiply(const at::Tensor& values, const at::Tensor& factor) {
  const at::ScalarType dtype = values.scalar_type();
  if (dtype == at::kHalf || dtype == at::kBFloat16) {
    at::_foreach_mul_({values}, factor.to(at::kFloat));  // the one kernel that doesn't round the factor to their type
  } else {
    values.mul_(factor);
  }
}

DeviceBucket::DeviceBucket(const Lanes& lanes, at::ScalarType type, int64_t numel, bool sharded)
    : dtype(type), is_sharded(sharded), factors(lanes.size()), device_factors(lanes.size()) {
  for (size_t i = 0; i < lanes.size(); ++i) {
    const Lanes::Scope scope(lanes, i);
    flat.push_back(at::empty({numel}, at::TensorOptions().dtype(type).device(lanes[i].device)));
    if (is_sharded) flat.back().zero_();  // the gaps between parameters are in sums, too
    for (auto* events : {&full, &reduced, &gathered}) events->emplace_back(lanes[i].device.type());
  }
}

void DeviceReduction::launch(DeviceBucket& bucket) {
  const std::lock_guard lock(mutex_);
  const c10::InferenceMode normal(false);  // autograd's threads come in modes of their own
  const c10::AutoGradMode no_gradient(false);
  for (const size_t leader : lanes_.leaders()) add_on_device(bucket, leader);
  if (lanes_.group() != nullptr) in_transport([&] { sum_over_devices(bucket); });
  for (const size_t leader : lanes_.leaders()) bucket.reduced[leader].record(lanes_[leader].comm);
}

void DeviceReduction::gather(DeviceBucket& bucket) {
  const std::lock_guard lock(mutex_);
  for (const size_t leader : lanes_.leaders()) {
    order::wait("part of a bucket written before it is gathered", lanes_[leader].comm, bucket.full[leader]);
  }
  in_transport([&] { gather_over_devices(bucket); });
  for (const size_t leader : lanes_.leaders()) bucket.gathered[leader].record(lanes_[leader].comm);
}

template <class Body>
void DeviceReduction::in_transport(Body&& body) const {
  try {
    body();
  } catch (const Error& error) {
    throw lanes_.broken(error);
  }
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
  if (bucket.device_factors[leader].defined()) {
    multiply(sum, bucket.device_factors[leader]);
  } else if (bucket.factors[leader] == 0) {
    sum.zero_();
  } else if (bucket.factors[leader] != 1) {
    sum.mul_(bucket.factors[leader]);
  }
  for (size_t i = leader + 1; i < lanes_.size(); ++i) {
    if (lanes_[i].leader != leader) continue;
    order::wait("bucket of a device's other replica full before it is added", comm, bucket.full[i]);
    if (bucket.device_factors[i].defined()) {
      multiply(bucket.flat[i], bucket.device_factors[i]);
      sum.add_(bucket.flat[i]);
    } else if (bucket.factors[i] != 0) {
      sum.add_(bucket.flat[i], bucket.factors[i]);
    }
  }
}

void DeviceReduction::sum_over_devices(DeviceBucket& bucket) const {
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
    if (is_alone(leader) && bucket.device_factors[leader].defined()) {
      multiply(flat, bucket.device_factors[leader]);
    } else if (is_alone(leader)) {
      factors[rank] = bucket.factors[leader];
      if (factors[rank] == 0) flat.zero_();  // so that what isn't finite there isn't read
      if (!takes_factor && factors[rank] != 0) flat.mul_(factors[rank]);
      if (!takes_factor || factors[rank] == 0) factors[rank] = 1;
    }
    sent.push_back(is_compressed ? flat.to(at::kBFloat16) : flat);
  }
  check(transport.begin(lanes_.group()));
  for (size_t rank = 0; rank < leaders.size(); ++rank) {
    const TransportBuffer whole = buffer_of(sent[rank]);
    const c10::StreamData3 stream = lanes_[leaders[rank]].comm.pack3();
    if (bucket.is_sharded) {
      const TransportBuffer part = buffer_of(part_of(sent[rank], rank, leaders.size()));
      check(transport.reduce_scatter(lanes_.group(), rank, &whole, &part, factors[rank], stream));
    } else {
      check(transport.all_reduce(lanes_.group(), rank, &whole, factors[rank], stream));
    }
  }
  check(transport.end(lanes_.group()));
  for (size_t rank = 0; is_compressed && rank < leaders.size(); ++rank) {
    const c10::StreamGuard guard(lanes_[leaders[rank]].comm);
    const at::Tensor& flat = bucket.flat[leaders[rank]];
    if (bucket.is_sharded) {
      part_of(flat, rank, leaders.size()).copy_(part_of(sent[rank], rank, leaders.size()));
    } else {
      flat.copy_(sent[rank]);
    }
  }
}

void DeviceReduction::gather_over_devices(DeviceBucket& bucket) const {
  const TransportApi& transport = lanes_.transport();
  const std::vector<size_t>& leaders = lanes_.leaders();
  check(transport.begin(lanes_.group()));
  for (size_t rank = 0; rank < leaders.size(); ++rank) {
    const at::Tensor& flat = bucket.flat[leaders[rank]];
    const TransportBuffer part = buffer_of(part_of(flat, rank, leaders.size()));
    const TransportBuffer whole = buffer_of(flat);
    check(transport.all_gather(lanes_.group(), rank, &part, &whole, lanes_[leaders[rank]].comm.pack3()));
  }
  check(transport.end(lanes_.group()));
}

void DeviceReduction::receive(const DeviceBucket& bucket, size_t lane) const {
  order::wait("bucket reduced before its use", lanes_[lane].compute, bucket.reduced[lanes_[lane].leader]);
}

void DeviceReduction::receive_gathered(const DeviceBucket& bucket, size_t leader) const {
  order::wait("bucket gathered before its use", lanes_[leader].compute, bucket.gathered[leader]);
}

}  // namespace stratagem
