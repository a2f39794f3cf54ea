// SPDX-License-Identifier: Apache-2.0
#include "accelerator/lanes.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "accelerator/order.hpp"
#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "torch/bridge.hpp"
#include "torch/dtypes.hpp"

namespace stratagem {

namespace {

using namespace std::chrono_literals;

constexpr auto longest_pause = 200us;  // between two looks at a stream that the host waits for

std::vector<c10::Stream> current_streams(const Lanes& lanes, size_t lane) {
  std::vector<c10::Stream> streams;
  for (const size_t leader : lanes.leaders())
    streams.push_back(lanes[leader == lanes[lane].leader ? lane : leader].compute);
  return streams;
}

}  // namespace

Lanes::Lanes(const std::vector<stg_device>& devices, const TransportApi& transport) : transport_(transport) {
  const c10::impl::VirtualGuardImpl impl(to_device(devices.front()).type());
  for (size_t i = 0; i < devices.size(); ++i) {
    const c10::Device device = to_device(devices[i]);
    const auto first = std::find_if(lanes_.begin(), lanes_.end(), [&](const Lane& lane) { return lane.device == device; });
    const auto leader = static_cast<size_t>(first - lanes_.begin());
    if (leader == i) leaders_.push_back(i);
    const auto stream = [&] { return impl.getStreamFromGlobalPool(device, false); };
    lanes_.push_back({device, devices[i], leader, stream(), stream(), stream()});
  }
}

Lanes::~Lanes() {
  for (InFlight& source : in_flight_) source.copied->synchronize();
}

Lanes::Scope::Scope(const Lanes& lanes, size_t lane) : streams_(current_streams(lanes, lane)), device_(lanes[lane].device) {}

// ---- the caller's streams

c10::Stream Lanes::host_stream(const Call& call, const Lane& lane) const {
  for (const stg_stream& given : call.streams()) {
    if (given.device.kind != lane.abi_device.kind || given.device.index != lane.abi_device.index) continue;
    c10::StreamData3 wrapped{};
    check(transport_.wrap_stream(&given, &wrapped));
    return c10::Stream::unpack3(wrapped.stream_id, wrapped.device_index, wrapped.device_type);
  }
  return c10::impl::VirtualGuardImpl(lane.device.type()).getDefaultStream(lane.device);
}

void Lanes::enter(const Call& call) {
  for (const size_t leader : leaders_) {
    c10::Event queued(lanes_[leader].device.type());
    queued.record(host_stream(call, lanes_[leader]));
    for (const Lane& lane : lanes_) {
      if (lane.leader != leader) continue;
      order::wait("entry of the caller's work into compute", lane.compute, queued);
      order::wait("entry of the caller's work into copy", lane.copy, queued);
    }
  }
}

void Lanes::leave(const Call& call) {
  for (const Lane& lane : lanes_) {
    c10::Event done(lane.device.type());
    done.record(lane.compute);
    order::wait("return of compute to the caller", host_stream(call, lane), done);
  }
}

Tree Lanes::lend(const Call& call, Tree outputs) const {
  for_each_leaf(outputs.root(), [&](const KeyPath&, stg_value& leaf) {
    if (leaf.type != STG_TENSOR || is_in_host_memory(leaf.as.tensor->view.device)) return;
    const stg_device device = leaf.as.tensor->view.device;
    const auto lane = std::find_if(lanes_.begin(), lanes_.end(), [&](const Lane& one) {
      return one.abi_device.kind == device.kind && one.abi_device.index == device.index;
    });
    if (lane == lanes_.end()) return;
    stg_tensor* made = std::exchange(leaf, {}).as.tensor;
    // The memory is the compute stream's: whoever gets it next comes after the caller's last use.
    const auto release = [compute = lane->compute, its = host_stream(call, *lane)](const stg_tensor* tensor) noexcept {
      try {
        c10::Event used(compute.device_type());
        used.record(its);
        order::wait("release of outputs by the caller", compute, used);
      } catch (...) {  // the caller has ended its stream, and with it what ran there
      }
      TensorRelease{}(const_cast<stg_tensor*>(tensor));
    };
    const stg_tensor_view& view = made->view;
    TensorPtr lent = make_strided_tensor(std::shared_ptr<const stg_tensor>(made, release), view.data, view.dtype,
                                         {view.shape, view.shape + view.num_dims}, strides_of(view), made->flags, device);
    lent->view.byte_offset = view.byte_offset;
    leaf.type = STG_TENSOR;
    leaf.as.tensor = lent.release();
  });
  return outputs;
}

// ---- shares

Arrival Lanes::send(size_t index, Tree share, bool may_keep) {
  const Lane& lane = lanes_[index];
  InFlight source;
  Arrival arrival;
  const c10::StreamGuard guard(lane.copy);
  for_each_leaf(share.root(), [&](const KeyPath&, stg_value& leaf) {
    if (leaf.type != STG_TENSOR || !is_in_host_memory(leaf.as.tensor->view.device)) return;
    at::Tensor from = view_tensor(*leaf.as.tensor);
    const bool is_pinned = leaf.as.tensor->view.device.kind == STG_DEVICE_CUDA_HOST;
    if (!is_pinned || !may_keep) {
      at::Tensor staged = at::empty_like(from, from.options().pinned_memory(true));
      staged.copy_(from);
      from = staged;
      source.staged.push_back(std::move(staged));
    }
    const at::Tensor to = at::empty_like(from, from.options().device(lane.device).pinned_memory(false));
    to.copy_(from, /*non_blocking=*/true);
    TensorPtr given{std::exchange(leaf.as.tensor, to_dlpack(to).release())};
    if (is_pinned && may_keep) source.given.push_back(std::move(given));
    arrival.made.push_back(to);
  });
  arrival.tree = std::move(share);
  if (arrival.made.empty()) return arrival;
  source.copied = std::make_shared<c10::Event>(lane.device.type());
  source.copied->record(lane.copy);
  arrival.copied = source.copied;
  const std::lock_guard lock(mutex_);
  forget_arrived();
  in_flight_.push_back(std::move(source));
  return arrival;
}

Tree Lanes::receive(size_t index, Arrival arrival) const {
  if (!arrival.copied) return std::move(arrival.tree);
  const Lane& lane = lanes_[index];
  order::wait("share copied before compute", lane.compute, *arrival.copied);
  for (const at::Tensor& tensor : arrival.made) order::keep("share until computed with", tensor, lane.compute);
  return std::move(arrival.tree);
}

void Lanes::forget_arrived() {
  while (!in_flight_.empty() && in_flight_.front().copied->query()) in_flight_.pop_front();
}

// ---- waiting

void Lanes::await(const Call& call, size_t lane, const char* waiting_for) const {
  c10::Event done(lanes_[lane].device.type());
  done.record(lanes_[lane].compute);
  for (auto pause = 1us; !done.query(); pause = std::min<std::chrono::microseconds>(2 * pause, longest_pause)) {
    if (group_ != nullptr) check(transport_.poll(group_));
    call.check(concat(waiting_for, " of replica ", lane, " on ", device_name(lanes_[lane].abi_device)));
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace stratagem
