// SPDX-License-Identifier: Apache-2.0
//
// The streams of replicas on an accelerator. Each replica has a lane:
//
//   compute   the model's steps and backward, gathering, the optimizer
//   copy      shares of batches on their way to the device: the next one overlaps this one's compute
//   comm      reductions of gradients: they overlap the rest of backward
//
// Nothing here or in what uses it waits for a device while a step is being queued; the host reads only in `await` and what calls it.
// What one stream needs of another's is said at the place, through order.hpp.
//
//   host's stream  --entry-->  compute, copy          what the caller queued before this call
//   copy           --share copied-->  compute         the share has arrived
//   compute        --bucket full-->  comm  --bucket reduced-->  compute
//   compute        --return-->  host's stream         what the caller queues after this call
//   host's stream  --release-->  compute              what the caller did with an output before it let it go
//
// Several lanes may be on one device (a GPU that is listed twice): the first of them is its leader.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "accelerator/transport.hpp"
#include "base/host.hpp"
#include "base/value.hpp"

namespace stratagem {

/// A share on its way to a replica's device.
struct Arrival {
  Tree tree;
  std::vector<at::Tensor> made;        ///< on the copy stream; the tree's handles share their memory
  std::shared_ptr<c10::Event> copied;  ///< null: nothing was copied
};

struct Lane {
  c10::Device device;
  stg_device abi_device;
  size_t leader;  ///< the first lane on this device
  c10::Stream compute;
  c10::Stream copy;
  c10::Stream comm;
};

class Lanes {
 public:
  /// One lane per device of the list, all of one kind.
  Lanes(const std::vector<stg_device>& devices, const TransportApi& transport);
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;
  /// Waits for copies whose sources it keeps; closes the group.
  ~Lanes();

  size_t size() const { return lanes_.size(); }
  const Lane& operator[](size_t i) const { return lanes_[i]; }
  const Lane& root() const { return lanes_.front(); }
  bool is_leader(size_t i) const { return lanes_[i].leader == i; }
  /// By distinct device: its leader.
  const std::vector<size_t>& leaders() const { return leaders_; }
  const TransportApi& transport() const { return transport_; }
  /// A host's or a model's stream as LibTorch's.
  c10::Stream wrap(const stg_stream& stream) const;
  static c10::Stream default_stream(const Lane& lane);

  /// While it lives, the calling thread works in a lane: its device is the current one, and each device's current stream is the compute
  /// stream of this lane or of that device's leader, so that LibTorch's copies between devices are ordered after what both compute.
  class Scope {
   public:
    Scope(const Lanes& lanes, size_t lane);

   private:
    c10::InferenceMode normal_{false};  // tensors made in a host's own could not be written elsewhere
    c10::MultiStreamGuard streams_;
    c10::DeviceGuard device_;
  };

  /// What the caller has queued on its streams comes before what the lanes do from here on.
  void enter(const Call& call);
  /// What the caller queues after the call comes after what the lanes have done.
  void leave(const Call& call);
  /// The outputs of a call as the caller gets them: when it releases a tensor, what it has queued by then may still read it.
  Tree lend(const Call& call, Tree outputs) const;

  /// A batch that is ours: whenever the last share of it is released, by a graph or a model's thread, the stream that made a tensor comes
  /// after what was computed with it. That stream is the caller's, or without a call that of the device's leader.
  Tree hold(const Call* call, Tree batch) const;
  /// Starts to copy a share's tensors in host memory to the lane's device: out of pinned memory at once, else through pinned memory.
  Arrival send(size_t lane, Tree share);
  /// The share, on the lane's device, for what is queued on its compute stream from here on. In the lane.
  Tree receive(size_t lane, Arrival arrival) const;

  /// Blocks until all streams of all lanes are done; whatever is wrong with them by then is nobody's concern any more.
  void finish() const noexcept;
  /// Blocks until the lane's compute stream is done; a deadline, a cancel flag, an abort or an error of the transport ends it, all of which
  /// leave the devices in the midst of something: the instance is draining then. `waiting_for` is told.
  void await(const Call& call, size_t lane, const char* waiting_for) const;
  /// The same until what was queued on a stream of the lane before the event is done.
  void await(const Call& call, size_t lane, const c10::Event& done, const char* waiting_for) const;

  /// The group over the leaders, owned by this from here on.
  void set_group(TransportGroup* group) { group_ = group; }
  /// Null with one device.
  TransportGroup* group() const { return group_; }
  /// After an error of the transport: nothing more goes through it. Gives `error`, with which the instance is draining.
  Error broken(const Error& error) const;
  bool is_broken() const { return is_broken_.load(std::memory_order_acquire); }
  /// Any thread: ends what `await` waits for, and every collective.
  void abort() noexcept;

 private:
  // A source that a copy stream reads.
  struct InFlight {
    std::shared_ptr<c10::Event> copied;
    std::vector<at::Tensor> staged;
    std::vector<TensorPtr> given;
  };
  using Release = std::function<void(const Lane& lane)>;
  Tree rewrap(Tree tree, const std::function<Release(const Lane& leader)>& release_on) const;
  c10::Stream host_stream(const Call& call, const Lane& lane) const;
  void forget_arrived();

  const TransportApi& transport_;
  TransportGroup* group_ = nullptr;
  mutable std::atomic<bool> is_broken_{false};
  std::atomic<bool> is_aborted_{false};
  std::vector<Lane> lanes_;
  // Recorded anew by each call: making one may cost a call of the driver.
  std::vector<c10::Event> entries_;  // by leader
  std::vector<c10::Event> returns_;  // by lane
  std::vector<size_t> leaders_;
  std::mutex mutex_;  // guards in_flight_: the thread of announced batches sends, too
  std::deque<InFlight> in_flight_;
};

}  // namespace stratagem
