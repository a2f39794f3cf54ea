// SPDX-License-Identifier: Apache-2.0
//
// From the replicas' gradients to one: summed in the order of the replicas, divided by the total weight once, written to memory that
// is kept from setup on (so that optimizers see the same tensors at each step). A parameter whose gradients are all sparse has a sparse
// one, of the rows that any of them has, in memory of its own; where one replica's is dense, it is dense.
//
// The work is cut into blocks of 4096 elements of a parameter, and each worker has a run of blocks. Whoever works on an element, its
// result is the same; the squares for the norm are summed by block and the blocks in order. So neither depends on the number of workers.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dlpack.hpp"
#include "strategy/replicas.hpp"
#include "strategy/sparse.hpp"

namespace stratagem {

/// Elements; complex ones count twice.
int64_t flat_numel(const stg_tensor_view& view);

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

/// values *= factor, without gaps.
void scale_flat(const stg_tensor_view& values, double factor);
/// sum += values, elements of `dtype` one after the other; complex ones count twice.
void add_elements(stg_dtype dtype, void* sum, const void* values, int64_t count);

/// Elements [begin, end) of a parameter, in flat order; complex ones count twice.
struct FlatRange {
  size_t parameter;
  int64_t begin;
  int64_t end;
};

/// A share of the elements of all trainable parameters for each worker. Cuts are at multiples of 4096 elements of a parameter.
std::vector<std::vector<FlatRange>> partition(const std::vector<int64_t>& numels, size_t num_workers);

/// The gradients of a window, by parameter, and whether they are reduced.
class Gradients {
 public:
  Gradients() = default;
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;
  virtual ~Gradients() = default;

  /// Whether any replica had one for this parameter.
  virtual bool is_present(size_t parameter) const = 0;
  /// Null for those without a gradient. Valid until the next call of this.
  virtual const stg_tensor* tensor(size_t parameter) = 0;
  bool are_complete() const { return are_complete_; }
  void mark_complete() { are_complete_ = true; }
  /// Forgets the gradients; keeps the memory.
  virtual void clear() { are_complete_ = false; }

 private:
  bool are_complete_ = false;
};

class ReducedGradients final : public Gradients {
 public:
  /// `makes_dense`: sparse gradients are reduced to dense ones, for an optimizer that moves all rows at each step.
  ReducedGradients(const ReplicaSlot& root, size_t num_workers, bool makes_dense);

  /// By worker, of the dense memory of all trainable parameters.
  const std::vector<std::vector<FlatRange>>& ranges() const { return ranges_; }
  /// By worker, of the values of those that are sparse this time.
  const std::vector<std::vector<FlatRange>>& sparse_ranges() const { return sparse_ranges_; }
  /// A sparse one is written out, into the dense memory.
  const stg_tensor* tensor(size_t parameter) override;
  /// Null: it is dense, or there is none.
  const SparseRows* sparse(size_t parameter) const {
    return sparse_[parameter].values != nullptr ? &sparse_[parameter] : nullptr;
  }
  /// The memory, whether or not there is a gradient in it. Null for frozen parameters.
  const stg_tensor* memory(size_t parameter) const { return tensors_[parameter].get(); }
  bool is_present(size_t parameter) const override { return is_present_[parameter]; }
  /// Also where it was reduced to a dense one.
  bool comes_sparse(size_t parameter) const { return is_present_[parameter] && !sparse_sources_[parameter].empty(); }

  /// Serial: looks up which replica has a gradient for what. Sums are divided by `divisor`, and by the scale of the losses.
  void begin(Replicas& replicas, double divisor, double loss_scale);
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
  void clear() override;

 private:
  void begin_parameter(Replicas& replicas, size_t p);
  void normalise(std::vector<double>& weights) const;
  double divisor(size_t parameter) const;
  void begin_sparse(size_t p);
  const stg_tensor_view& values(size_t parameter) const {
    return sparse(parameter) != nullptr ? sparse_[parameter].values->view : tensors_[parameter]->view;
  }
  /// The worker's ranges of `values` of all that have a gradient.
  template <class Body>
  void for_each_range(size_t worker, Body&& body) const;
  void reduce_range(const FlatRange& range);
  void reduce_rows(const FlatRange& range);

  std::vector<TensorPtr> tensors_;
  std::vector<std::vector<FlatRange>> ranges_;
  std::vector<int64_t> first_block_;  // of each parameter, in block_squares_
  std::vector<double> block_squares_;
  std::vector<bool> is_present_;
  std::vector<std::vector<const void*>> sources_;  // by parameter, in the order of the replicas; of dense gradients
  std::vector<std::vector<double>> weights_;       // of the sources, or the sparse ones; empty: all are 1
  std::vector<char> have_overflow_;                // by worker
  bool makes_dense_;
  std::vector<SparseRows> sparse_;  // by parameter: the result; without values: it is dense
  std::vector<std::vector<const SparseRows*>> sparse_sources_;
  std::vector<std::vector<FlatRange>> sparse_ranges_;
  double divisor_ = 1;
  double loss_scale_ = 1;
  int exponent_ = 0;  // weights are divided by this power of two
};

}  // namespace stratagem
