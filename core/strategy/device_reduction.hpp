// SPDX-License-Identifier: Apache-2.0
//
// Flat memory of several replicas on an accelerator becomes its weighted sum, on their communication streams: replicas on one device are
// added up into their leader's memory there, and the leaders' are all-reduced by the transport, so that all have the same bits. Of a sharded
// bucket each leader gets its part of the sum alone; parts become whole again, on every leader, by `gather`.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <vector>

#include "accelerator/lanes.hpp"

namespace stratagem {

/// values *= factor, a 0-dim tensor on their device that may have more digits.
void multiply(const at::Tensor& values, const at::Tensor& factor);

/// What is reduced at once. Events are recorded anew each time.
struct DeviceBucket {
  /// A sharded one's `numel` is a multiple of the number of devices; its memory begins as zeros.
  DeviceBucket(const Lanes& lanes, at::ScalarType type, int64_t numel, bool sharded = false);
  /// Of lane i: what it gives is in its memory.
  void mark_full(const Lanes& lanes, size_t lane) { full[lane].record(lanes[lane].compute); }

  at::ScalarType dtype;
  bool is_sharded;
  std::vector<at::Tensor> flat;            ///< by lane, on its device
  std::vector<double> factors;             ///< by lane: what its memory counts in the sum; 0: it isn't read
  std::vector<at::Tensor> device_factors;  ///< by lane: the same, 0-dim on its device, instead; undefined: there is none
  std::vector<c10::Event> full;            ///< by lane
  std::vector<c10::Event> reduced;         ///< by lane, of leaders: they have the sum, and have read the others of their device
  std::vector<c10::Event> gathered;        ///< by lane, of leaders: they have the parts of all
};

class DeviceReduction {
 public:
  /// `compress`: float32 crosses between devices as bfloat16, its factor applied before.
  DeviceReduction(const Lanes& lanes, bool compress) : lanes_(lanes), compresses_(compress) {}

  /// Queues the sum, once all lanes have marked theirs full. Any thread.
  void launch(DeviceBucket& bucket);
  /// What is queued on the lane's compute stream from here on comes after it.
  void receive(const DeviceBucket& bucket, size_t lane) const;
  /// Queues that every leader gets the parts of the others, once all leaders have marked theirs full. Any thread.
  void gather(DeviceBucket& bucket);
  /// What is queued on the leader's compute stream from here on comes after it.
  void receive_gathered(const DeviceBucket& bucket, size_t leader) const;

 private:
  void add_on_device(DeviceBucket& bucket, size_t leader) const;
  void sum_over_devices(DeviceBucket& bucket) const;
  void gather_over_devices(DeviceBucket& bucket) const;
  template <class Body>
  void in_transport(Body&& body) const;
  bool is_alone(size_t leader) const;

  const Lanes& lanes_;
  bool compresses_;
  std::mutex mutex_;  // no two threads are in the transport
};

}  // namespace stratagem
