// SPDX-License-Identifier: Apache-2.0
#include "strategy/sharded_optimizer.hpp"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>

#include <algorithm>

#include "strategy/device_clipping.hpp"
#include "strategy/elements.hpp"
#include "torch/bridge.hpp"
#include "torch/dtypes.hpp"

namespace stratagem {

namespace {

constexpr int64_t square_of_norm = 0, num_overflows = 1;  // in totals_

// Elements in memory order: the parameters have no gaps.
at::Tensor flat_part(const at::Tensor& tensor, int64_t begin, int64_t numel) {
  return tensor.as_strided({numel}, {1}, tensor.storage_offset() + begin);
}

// All of a tensor in host memory that has no gaps.
at::Tensor flat_view(const stg_tensor& tensor) {
  return at::from_blob(first_element<>(tensor.view), {numel(tensor.view)},
                       at::TensorOptions().dtype(to_scalar_type(tensor.view.dtype)));
}

}  // namespace

// ---- setup

ShardedOptimizer::ShardedOptimizer(const OptimizerOptions& options, Replicas& replicas, const Lanes& lanes,
                                   DeviceGradients& gradients)
    : DeviceOptimizer(options, replicas, lanes, gradients),
      reduction_(gradients.reduction()),
      buckets_(gradients.buckets()),
      totals_(lanes, at::kDouble, 2),
      num_updated_(gradients.buckets().size()) {
  for (size_t rank = 0; rank < lanes.leaders().size(); ++rank) {
    const size_t leader = lanes.leaders()[rank];
    const Lanes::Scope scope(lanes, leader);
    totals_.factors[leader] = 1;
    Device& device = devices_.emplace_back();
    device.lane = leader;
    for (const auto& bucket : buckets_) device.shards.push_back(make_shard(*bucket, replicas[leader], rank));
  }
}

// What each part of the bucket has of its parameters.
std::vector<std::vector<ShardedOptimizer::Cut>> ShardedOptimizer::cut(const Bucket& bucket) const {
  std::vector<std::vector<Cut>> parts(lanes_.leaders().size());
  const int64_t part_numel = bucket.flat[0].numel() / static_cast<int64_t>(parts.size());
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const size_t p = bucket.parameters[i];
    const int64_t first = bucket.begins[i];
    const int64_t last = first + numel(root_.parameters[p]->view);
    for (size_t part = 0; part < parts.size(); ++part) {
      const int64_t begin = std::max(first, static_cast<int64_t>(part) * part_numel);
      const int64_t end = std::min(last, static_cast<int64_t>(part + 1) * part_numel);
      if (begin < end) parts[part].push_back({p, begin - first, end - begin, begin});
    }
  }
  return parts;
}

ShardedOptimizer::Shard ShardedOptimizer::make_shard(const Bucket& bucket, const ReplicaSlot& replica, size_t rank) const {
  const at::Tensor& flat = bucket.flat[lanes_.leaders()[rank]];
  const std::vector<std::vector<Cut>> parts = cut(bucket);
  Shard shard;
  for (size_t part = 0; part < parts.size(); ++part) {
    for (const Cut& one : parts[part]) {
      const at::Tensor values = flat_part(view_tensor(*replica.parameters[one.parameter]), one.begin, one.numel);
      const at::Tensor place = flat.narrow(0, one.place, one.numel);
      if (part != rank) {
        shard.others.push_back({one.parameter, values, place});
        continue;
      }
      OwnPiece& own = shard.own.emplace_back(OwnPiece{{one.parameter, values, place, {}}, one.begin});
      for (size_t s = 0; s < slots().size(); ++s) {
        own.state.push_back(at::full({one.numel}, options_.initial_accumulator_value, values.options()));
      }
    }
  }
  return shard;
}

// ---- an update

void ShardedOptimizer::begin_update() {
  num_measured_ = 0;
  for (auto& num : num_updated_) num = 0;
}

const ShardedOptimizer::Device& ShardedOptimizer::device_of(size_t leader) const {
  return *std::find_if(devices_.begin(), devices_.end(), [&](const Device& device) { return device.lane == leader; });
}

std::vector<const DeviceOptimizer::Piece*> ShardedOptimizer::present_pieces(const Shard& shard) const {
  std::vector<const Piece*> pieces;
  for (const OwnPiece& piece : shard.own) {
    if (gradients_.is_present(piece.parameter)) pieces.push_back(&piece);
  }
  return pieces;
}

void ShardedOptimizer::measure(size_t leader, const Wish& wish) {
  const at::Device where = lanes_[leader].device;
  std::vector<at::Tensor> gradients;
  for (const Shard& shard : device_of(leader).shards) {
    for (const at::Tensor& gradient : gradients_of(present_pieces(shard))) gradients.push_back(gradient);
  }
  const at::Tensor& mine = totals_.flat[leader];
  if (wish.args.clip == STG_CLIP_NORM) mine[square_of_norm].copy_(norm_of(gradients, where).square());
  if (wish.looks_for_overflow) mine[num_overflows].copy_(find_overflow(gradients, where));
  totals_.mark_full(lanes_, leader);
  if (num_measured_.fetch_add(1, std::memory_order_acq_rel) + 1 == devices_.size()) reduction_.launch(totals_);
}

// Whoever updates a bucket's last part launches its gathering for all, so that the order is the same everywhere.
DeviceOptimizer::Found ShardedOptimizer::update(size_t leader, const Wish& wish) {
  Found found;
  if (wish.measures()) reduction_.receive(totals_, leader);
  if (wish.args.clip == STG_CLIP_NORM) found.norm = totals_.flat[leader][square_of_norm].sqrt();
  if (wish.looks_for_overflow) found.overflow = totals_.flat[leader][num_overflows].gt(0).to(at::kFloat);  // kernels want a 1
  const at::Tensor leaves_out = left_out(leader, found.overflow);
  const bool runs = !host_leaves_out(leaves_out);
  Counts counts;
  const Device& device = device_of(leader);
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (!is_any_present(*buckets_[b])) continue;
    const std::vector<const Piece*> pieces = present_pieces(device.shards[b]);
    const std::vector<at::Tensor> gradients = gradients_of(pieces);
    if (wish.args.clip == STG_CLIP_NORM) clip_by_norm(gradients, found.norm, wish.args.clip_limit);
    if (wish.args.clip == STG_CLIP_VALUE) clip_by_value(gradients, wish.args.clip_limit);
    if (runs) run_all(pieces, wish.args.lr, leaves_out, counts);
    std::vector<at::Tensor> values;
    for (const Piece* piece : pieces) values.push_back(piece->values);
    if (!pieces.empty()) at::_foreach_copy_(gradients, values);
    buckets_[b]->mark_full(lanes_, leader);
    if (num_updated_[b].fetch_add(1, std::memory_order_acq_rel) + 1 == devices_.size()) reduction_.gather(*buckets_[b]);
  }
  return found;
}

void ShardedOptimizer::receive(size_t leader) {
  const Device& device = device_of(leader);
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (!is_any_present(*buckets_[b])) continue;
    reduction_.receive_gathered(*buckets_[b], leader);
    std::vector<at::Tensor> values, arrived;
    for (const OtherPiece& piece : device.shards[b].others) {
      if (!gradients_.is_present(piece.parameter)) continue;
      values.push_back(piece.values);
      arrived.push_back(piece.arrived);
    }
    if (!values.empty()) at::_foreach_copy_(values, arrived);
  }
}

bool ShardedOptimizer::is_any_present(const Bucket& bucket) const {
  return std::any_of(bucket.parameters.begin(), bucket.parameters.end(), [&](size_t p) { return gradients_.is_present(p); });
}

// ---- state: whole in host memory, in parts on the devices

template <class Body>
void ShardedOptimizer::for_each_piece(size_t parameter, Body&& body) const {
  for (const Device& device : devices_) {
    const Lanes::Scope scope(lanes_, device.lane);
    for (const Shard& shard : device.shards) {
      for (const OwnPiece& piece : shard.own) {
        if (piece.parameter == parameter) body(piece);
      }
    }
  }
}

TensorPtr ShardedOptimizer::copy_state(size_t parameter, size_t slot) const {
  TensorPtr whole = flat_layout(root_.parameters[parameter]->view).allocate();
  const at::Tensor flat = flat_view(*whole);
  for_each_piece(parameter,
                 [&](const OwnPiece& piece) { flat.narrow(0, piece.begin, piece.values.numel()).copy_(piece.state[slot]); });
  return whole;
}

void ShardedOptimizer::write_state(size_t parameter, size_t slot, const stg_tensor& values) {
  const TensorPtr whole = flat_layout(root_.parameters[parameter]->view).copy(values.view);
  const at::Tensor flat = flat_view(*whole);
  for_each_piece(parameter,
                 [&](const OwnPiece& piece) { piece.state[slot].copy_(flat.narrow(0, piece.begin, piece.values.numel())); });
}

void ShardedOptimizer::spread_state(size_t parameter, bool is_begun) {
  if (is_begun) return;
  for_each_piece(parameter, [&](const OwnPiece& piece) {
    for (const at::Tensor& slot : piece.state) slot.fill_(options_.initial_accumulator_value);
  });
}

}  // namespace stratagem
