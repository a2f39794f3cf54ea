// SPDX-License-Identifier: Apache-2.0
//
// SGD, Adam, AdamW and Adagrad through LibTorch's fused kernels, RMSprop (which has none) through its operators. On the CPU each worker has
// its own ranges of parameters, gradients and state. The slices are made once; an update of the fused ones makes no tensor while the same
// parameters have gradients. Of a parameter with a sparse gradient the rows that it names are gathered, updated by the same kernels, and
// put back.
//
// State is kept by parameter, in the parameter's layout, and has PyTorch's slot names: momentum_buffer; exp_avg, exp_avg_sq,
// max_exp_avg_sq; square_avg, momentum_buffer, grad_avg; sum; and step. A parameter has none before its first gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "strategy/gradients.hpp"

namespace stratagem {

class Optimizer {
 public:
  /// All references must outlive the optimizer.
  Optimizer(const OptimizerOptions& options, const ReplicaSlot& root, const Gradients& gradients);
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  virtual ~Optimizer() = default;

  const std::string& name() const { return options_.name; }
  /// Refuses sparse gradients where the optimizer has no rule for them.
  virtual void check_gradients() const {}
  /// Serial, after all workers' updates.
  void finish_update();

  /// The slots that a parameter of this optimizer has ("step" apart, which all but SGD have as a 0-dim float32).
  const std::vector<std::string>& slots() const { return slot_names_; }
  bool has_step() const { return options_.name != "sgd"; }
  /// Whether the parameter's state was begun.
  bool is_begun(size_t parameter) const { return steps_[parameter] > 0; }
  int64_t steps(size_t parameter) const { return steps_[parameter]; }
  /// The root's, of the parameter's shape, type and layout. Null: it is in no one memory.
  virtual const stg_tensor* state(size_t parameter, size_t slot) const = 0;
  /// In host memory.
  virtual TensorPtr copy_state(size_t parameter, size_t slot) const;
  /// `values`: in host memory, of the parameter's shape and type.
  virtual void write_state(size_t parameter, size_t slot, const stg_tensor& values);
  /// Says that the state of the parameter was written, after `steps` updates; 0: it has none.
  void set_steps(size_t parameter, int64_t steps);

 protected:
  // What the kernels take.
  struct Lists {
    std::vector<at::Tensor> parameters, gradients, steps;
    std::vector<std::vector<at::Tensor>> state;  // by slot
    void add(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<at::Tensor>& slots,
             const at::Tensor& step);
    void clear();
  };
  /// `found_overflow`: a 0-dim float on the device; where it isn't 0 nothing is updated. Undefined: all is.
  void run(Lists& lists, bool is_first, double lr, const at::Tensor& found_overflow = {}) const;
  /// Gives the state its values before the first update; or, with `is_begun`, the root's to whoever else has one.
  virtual void spread_state(size_t parameter, bool is_begun) = 0;

  const OptimizerOptions options_;
  const ReplicaSlot& root_;

 private:
  void run_rmsprop(Lists& lists, double lr) const;

  const Gradients& present_;
  std::vector<std::string> slot_names_;
  std::vector<int64_t> steps_;  // updates so far, by parameter
};

/// Of replicas on the CPU: each worker updates its ranges of the root's parameters.
class HostOptimizer final : public Optimizer {
 public:
  HostOptimizer(const OptimizerOptions& options, const ReplicaSlot& root, const ReducedGradients& gradients);

  void check_gradients() const override;
  /// The worker's ranges of all parameters that have a gradient.
  void update(size_t worker, double lr);
  const stg_tensor* state(size_t parameter, size_t slot) const override { return state_[slot][parameter].get(); }

 private:
  struct Slice {
    FlatRange range;
    at::Tensor parameter;
    at::Tensor gradient;
    std::vector<at::Tensor> state;  // by slot
    at::Tensor step;                // the worker's own, since kernels read it while others go on
  };
  struct WorkerSlices {
    std::vector<Slice> slices;
    Lists lists;               // of the slices that are `listed`
    std::vector<char> listed;  // 0: no gradient, 1: begun, 2: first gradient
    Lists first;               // those of the first gradient (SGD's kernel treats them otherwise)
  };

  void spread_state(size_t parameter, bool is_begun) override;
  void fill_initial(const stg_tensor& zeros) const;
  void choose(WorkerSlices& mine) const;
  void update_sparse(const FlatRange& range, double lr) const;

  const ReducedGradients& gradients_;
  std::vector<std::vector<TensorPtr>> state_;  // by slot, by parameter
  std::vector<WorkerSlices> workers_;
};

}  // namespace stratagem
