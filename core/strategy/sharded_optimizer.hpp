// SPDX-License-Identifier: Apache-2.0
//
// An optimizer that is sharded over devices. Each bucket of gradients is cut into as many parts as there are devices, wherever the cuts
// fall in parameters. A device has its part of the reduced gradient, and state for that part alone; it updates these elements of its
// parameters, and the other devices get them from it:
//
//   compute   [update part of bucket 0]──[of 1]──[of 2]───┬──┬──┬─[copy what the others updated]
//                    │ part written         │        │    │  │  │ gathered
//   comm             └─[gather 0]───────────└[1]─────└[2]─┴──┴──┘
//
// Weights cross in the memory of the gradients, which nobody wants any more, so the model's parameters stay where they are. Gaps between
// parameters, and what a bucket was rounded up by, are zeros. Of a device that is listed several times the first replica has the part.
#pragma once

#include <atomic>
#include <deque>
#include <vector>

#include "strategy/device_optimizer.hpp"

namespace stratagem {

class ShardedOptimizer final : public DeviceOptimizer {
 public:
  /// All references must outlive the optimizer; the gradients are sharded.
  ShardedOptimizer(const OptimizerOptions& options, Replicas& replicas, const Lanes& lanes, DeviceGradients& gradients);

  bool is_sharded() const override { return true; }
  void begin_update() override;
  void measure(size_t leader, const Wish& wish) override;
  Found update(size_t leader, const Wish& wish) override;
  void receive(size_t leader) override;

  const stg_tensor* state(size_t, size_t) const override { return nullptr; }
  TensorPtr copy_state(size_t parameter, size_t slot) const override;
  void write_state(size_t parameter, size_t slot, const stg_tensor& values) override;

 private:
  // Elements of a parameter that lie in one part of a bucket.
  struct Cut {
    size_t parameter;
    int64_t begin;  // of the parameter's elements
    int64_t numel;
    int64_t place;  // in the bucket's flat memory
  };
  struct OwnPiece : Piece {
    int64_t begin;  // of the parameter's elements
  };
  // Elements that another device updates: its values come in `arrived`.
  struct OtherPiece {
    size_t parameter;
    at::Tensor values;
    at::Tensor arrived;
  };
  struct Shard {
    std::vector<OwnPiece> own;
    std::vector<OtherPiece> others;
  };
  // The memory of one leader.
  struct Device {
    size_t lane;
    std::vector<Shard> shards;  // by bucket
  };
  using Bucket = DeviceGradients::Bucket;

  std::vector<std::vector<Cut>> cut(const Bucket& bucket) const;
  Shard make_shard(const Bucket& bucket, const ReplicaSlot& replica, size_t rank) const;
  const Device& device_of(size_t leader) const;
  std::vector<const Piece*> present_pieces(const Shard& shard) const;
  bool is_any_present(const Bucket& bucket) const;
  template <class Body>
  void for_each_piece(size_t parameter, Body&& body) const;
  void spread_state(size_t parameter, bool is_begun) override;

  DeviceReduction& reduction_;
  const std::vector<std::unique_ptr<Bucket>>& buckets_;
  std::vector<Device> devices_;                    // by leader
  DeviceBucket totals_;                            // of all devices: the square of the norm, and how many have an overflow
  std::atomic<size_t> num_measured_{0};            // leaders
  std::deque<std::atomic<size_t>> num_updated_{};  // by bucket: leaders
};

}  // namespace stratagem
