// SPDX-License-Identifier: Apache-2.0
//
// From the replicas' gradients to one: summed in the order of the replicas, divided by the total weight once, written to memory that
// is kept from setup on (so that optimizers see the same tensors at each step).
//
// The work is cut into blocks of 4096 elements of a parameter, and each worker has a run of blocks. Whoever works on an element, its
// result is the same; the squares for the norm are summed by block and the blocks in order. So neither depends on the number of workers.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dlpack.hpp"
#include "strategy/replicas.hpp"

namespace stratagem {

/// How a parameter's elements are walked flat: in its own memory order where it has no gaps, row-major otherwise.
struct FlatLayout {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  stg_dtype dtype{};

  bool fits(const stg_tensor_view& view) const;
  /// New memory of this layout; of zeros.
  TensorPtr allocate() const;
  TensorPtr copy(const stg_tensor_view& source) const;
};
FlatLayout flat_layout(const stg_tensor_view& parameter);

/// sum += values, both of one layout without gaps.
void add_flat(const stg_tensor_view& sum, const stg_tensor_view& values);
/// values *= factor, without gaps.
void scale_flat(const stg_tensor_view& values, double factor);

/// Elements [begin, end) of a parameter, in flat order; complex ones count twice.
struct FlatRange {
  size_t parameter;
  int64_t begin;
  int64_t end;
};

/// A share of the elements of all trainable parameters for each worker. Cuts are at multiples of 4096 elements of a parameter.
std::vector<std::vector<FlatRange>> partition(const std::vector<int64_t>& numels, size_t num_workers);

class ReducedGradients {
 public:
  ReducedGradients(const ReplicaSlot& root, size_t num_workers);

  const std::vector<std::vector<FlatRange>>& ranges() const { return ranges_; }
  /// By parameter; null for those without a gradient.
  const stg_tensor* tensor(size_t parameter) const { return is_present_[parameter] ? tensors_[parameter].get() : nullptr; }
  /// The memory, whether or not there is a gradient in it. Null for frozen parameters.
  const stg_tensor* memory(size_t parameter) const { return tensors_[parameter].get(); }
  bool is_present(size_t parameter) const { return is_present_[parameter]; }
  bool are_complete() const { return are_complete_; }

  /// Serial: looks up which replica has a gradient for what.
  void begin(Replicas& replicas, double divisor);
  /// The worker's share. With `measure`, also its blocks' squares.
  void reduce(size_t worker, bool measure);
  /// Serial, after all have reduced: the 2-norm of the whole gradient.
  double norm() const;
  /// The worker's share, times a factor or cut to [-limit, limit].
  void scale(size_t worker, double factor);
  void clamp(size_t worker, double limit);
  void measure(size_t worker);
  /// The worker's share: looks for infinities and NaNs.
  void look_for_overflow(size_t worker);
  /// Serial, after all have looked.
  bool have_overflow() const;
  void mark_complete() { are_complete_ = true; }
  /// Forgets the gradients; keeps the memory.
  void clear();

 private:
  void reduce_range(const FlatRange& range);
  double* block_squares(const FlatRange& range);

  std::vector<TensorPtr> tensors_;
  std::vector<std::vector<FlatRange>> ranges_;
  std::vector<int64_t> first_block_;  // of each parameter, in block_squares_
  std::vector<double> block_squares_;
  std::vector<bool> is_present_;
  std::vector<std::vector<const void*>> sources_;  // by parameter, in the order of the replicas
  std::vector<std::vector<double>> weights_;       // of the sources; empty: all are 1
  std::vector<char> have_overflow_;                // by worker
  double divisor_ = 1;
  bool are_complete_ = false;
};

}  // namespace stratagem
