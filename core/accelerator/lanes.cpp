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
  for (const size_t leader : lanes.leaders()) streams.push_back(lanes[leader == lanes[lane].leader ? lane : leader].compute);
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
    if (leader == i) entries_.emplace_back(device.type());
    returns_.emplace_back(device.type());
  }
}

Lanes::~Lanes() {
  try {
    for (InFlight& source : in_flight_) {
      if (is_broken()) break;
      source.copied->synchronize();
    }
  } catch (...) {
    is_broken_.store(true, std::memory_order_release);
  }
  // A device that has failed may never say that it has read them: better kept for ever than given to somebody else.
  if (is_broken()) {
    static std::mutex kept_mutex;
    static auto& kept = *new std::deque<std::deque<InFlight>>;
    const std::lock_guard lock(kept_mutex);
    kept.push_back(std::exchange(in_flight_, {}));
  }
  if (group_ != nullptr) transport_.close(group_);
}

Lanes::Scope::Scope(const Lanes& lanes, size_t lane) : streams_(current_streams(lanes, lane)), device_(lanes[lane].device) {}

// ---- the caller's streams

c10::Stream Lanes::wrap(const stg_stream& stream) const {
  c10::StreamData3 wrapped{};
  check(transport_.wrap_stream(&stream, &wrapped));
  return c10::Stream::unpack3(wrapped.stream_id, wrapped.device_index, wrapped.device_type);
}

c10::Stream Lanes::default_stream(const Lane& lane) {
  return c10::impl::VirtualGuardImpl(lane.device.type()).getDefaultStream(lane.device);
}

c10::Stream Lanes::host_stream(const Call& call, const Lane& lane) const {
  for (const stg_stream& given : call.streams()) {
    if (given.device.kind == lane.abi_device.kind && given.device.index == lane.abi_device.index) return wrap(given);
  }
  return default_stream(lane);
}

void Lanes::enter(const Call& call) {
  for (size_t device = 0; device < leaders_.size(); ++device) {
    c10::Event& queued = entries_[device];
    queued.record(host_stream(call, lanes_[leaders_[device]]));
    for (const Lane& lane : lanes_) {
      if (lane.leader != leaders_[device]) continue;
      order::wait("entry of the caller's work into compute", lane.compute, queued);
      order::wait("entry of the caller's work into copy", lane.copy, queued);
    }
  }
}

void Lanes::leave(const Call& call) {
  for (size_t i = 0; i < lanes_.size(); ++i) {
    returns_[i].record(lanes_[i].compute);
    order::wait("return of compute to the caller", host_stream(call, lanes_[i]), returns_[i]);
  }
}

// The tree with every tensor on a device in a handle that calls the function before it lets the tensor go.
Tree Lanes::rewrap(Tree tree, const std::function<Release(const Lane& leader)>& release_on) const {
  for_each_leaf(tree.root(), [&](const KeyPath&, stg_value& leaf) {
    if (leaf.type != STG_TENSOR || is_in_host_memory(leaf.as.tensor->view.device)) return;
    const stg_device device = leaf.as.tensor->view.device;
    const auto lane = std::find_if(lanes_.begin(), lanes_.end(), [&](const Lane& one) {
      return one.abi_device.kind == device.kind && one.abi_device.index == device.index;
    });
    if (lane == lanes_.end()) return;
    stg_tensor* made = std::exchange(leaf, {}).as.tensor;
    const auto release = [before = release_on(*lane), its = *lane](const stg_tensor* tensor) noexcept {
      try {
        before(its);
      } catch (...) {  // the streams are gone, and with them what ran there
      }
      TensorRelease{}(const_cast<stg_tensor*>(tensor));
    };
    const stg_tensor_view& view = made->view;
    TensorPtr wrapped = make_strided_tensor(std::shared_ptr<const stg_tensor>(made, release), view.data, view.dtype,
                                            {view.shape, view.shape + view.num_dims}, strides_of(view), made->flags, device);
    wrapped->view.byte_offset = view.byte_offset;
    leaf.type = STG_TENSOR;
    leaf.as.tensor = wrapped.release();
  });
  return tree;
}

// The memory is a compute stream's: whoever gets it next there comes after the caller's last use.
Tree Lanes::lend(const Call& call, Tree outputs) const {
  return rewrap(std::move(outputs), [&](const Lane& leader) -> Release {
    return [its = host_stream(call, leader)](const Lane& lane) {
      c10::Event used(lane.device.type());
      used.record(its);
      order::wait("release of outputs by the caller", lane.compute, used);
    };
  });
}

Tree Lanes::hold(const Call* call, Tree batch) const {
  return rewrap(std::move(batch), [&](const Lane& leader) -> Release {
    std::vector<c10::Stream> users;
    for (const Lane& lane : lanes_) {
      if (lane.device == leader.device) users.push_back(lane.compute);
    }
    return [users, its = call == nullptr ? leader.compute : host_stream(*call, leader)](const Lane& lane) {
      for (const c10::Stream& user : users) {
        c10::Event used(lane.device.type());
        used.record(user);
        order::wait("release of a batch by whoever computed with it", its, used);
      }
    };
  });
}

// ---- shares

Arrival Lanes::send(size_t index, Tree share) {
  const Lane& lane = lanes_[index];
  forget_arrived();  // first: their memory is wanted again
  InFlight source;
  Arrival arrival;
  const c10::StreamGuard guard(lane.copy);
  for_each_leaf(share.root(), [&](const KeyPath&, stg_value& leaf) {
    if (leaf.type != STG_TENSOR || !is_in_host_memory(leaf.as.tensor->view.device)) return;
    at::Tensor from = view_tensor(*leaf.as.tensor);
    // Not every exporter says so: PyTorch's pinned tensors may come as the CPU's.
    const bool is_pinned = leaf.as.tensor->view.device.kind == STG_DEVICE_CUDA_HOST || from.is_pinned();
    if (!is_pinned) {
      at::Tensor staged = at::empty_like(from, from.options().pinned_memory(true));
      staged.copy_(from);
      from = staged;
      source.staged.push_back(std::move(staged));
    }
    const at::Tensor to = at::empty_like(from, from.options().device(lane.device).pinned_memory(false));
    to.copy_(from, /*non_blocking=*/true);
    TensorPtr given{std::exchange(leaf.as.tensor, to_dlpack(to).release())};
    if (is_pinned) source.given.push_back(std::move(given));
    arrival.made.push_back(to);
  });
  arrival.tree = std::move(share);
  if (arrival.made.empty()) return arrival;
  source.copied = std::make_shared<c10::Event>(lane.device.type());
  source.copied->record(lane.copy);
  arrival.copied = source.copied;
  const std::lock_guard lock(mutex_);
  in_flight_.push_back(std::move(source));
  return arrival;
}

Tree Lanes::receive(size_t index, Arrival arrival) const {
  const Lane& lane = lanes_[index];
  if (arrival.copied) order::wait("share copied before compute", lane.compute, *arrival.copied);
  for (const at::Tensor& tensor : arrival.made) order::keep("share until computed with", tensor, lane.compute);
  for_each_leaf(arrival.tree.root(), [&](const KeyPath&, stg_value& leaf) {
    if (leaf.type != STG_TENSOR || view_tensor(*leaf.as.tensor).device() == lane.device) return;
    const TensorPtr elsewhere{std::exchange(leaf.as.tensor, nullptr)};
    leaf.as.tensor = to_dlpack(view_tensor(*elsewhere).to(lane.device)).release();
  });
  return std::move(arrival.tree);
}

void Lanes::forget_arrived() {
  const std::lock_guard lock(mutex_);
  while (!in_flight_.empty() && in_flight_.front().copied->query()) in_flight_.pop_front();
}

// ---- waiting

void Lanes::finish() const noexcept {
  if (is_broken() || is_aborted_.load(std::memory_order_acquire)) return;  // they may never be done
  for (const Lane& lane : lanes_) {
    for (const c10::Stream& stream : {lane.copy, lane.comm, lane.compute}) {
      try {
        stream.synchronize();
      } catch (...) {
      }
    }
  }
}

void Lanes::await(const Call& call, size_t lane, const char* waiting_for) const {
  c10::Event done(lanes_[lane].device.type());
  done.record(lanes_[lane].compute);
  await(call, lane, done, waiting_for);
}

void Lanes::await(const Call& call, size_t lane, const c10::Event& done, const char* waiting_for) const {
  for (auto pause = 1us; !done.query(); pause = std::min<std::chrono::microseconds>(2 * pause, longest_pause)) {
    try {
      if (is_aborted_.load(std::memory_order_acquire)) throw Error{STG_ABORTED, "aborted"};
      if (group_ != nullptr) check(transport_.poll(group_));
      call.check(concat(waiting_for, " of replica ", lane, " on ", device_name(lanes_[lane].abi_device)));
    } catch (const Error& error) {
      throw broken(error);
    }
    std::this_thread::sleep_for(pause);
  }
}

Error Lanes::broken(const Error& error) const {
  is_broken_.store(true, std::memory_order_release);
  if (group_ != nullptr) transport_.abort(group_);
  Error draining = error;
  // The transport says nothing of an instance: these flags are our own.
  if (draining.origin != nullptr) draining.cause = std::exchange(draining.origin, nullptr);
  draining.flags = STG_ERROR_INSTANCE_DRAINING;
  return draining;
}

void Lanes::abort() noexcept {
  is_aborted_.store(true, std::memory_order_release);
  if (group_ != nullptr) transport_.abort(group_);
}

}  // namespace stratagem
