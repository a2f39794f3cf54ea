// SPDX-License-Identifier: Apache-2.0
//
// The model's replicas, one per device, kept from setup to teardown.
//
//   root         replica 0: its parameters and buffers are the model's; state is read from and written to it
//   leader       the first replica in a memory: the root on a CPU, the first on each device of an accelerator. It is what is updated
//   sharing      the other replicas' parameters live in their leader's memory: the model shares them itself or has `bind`. Where it
//                can't, what an update wrote on the leader is copied to them
//   buffers      each replica has its own; between calls they are equal, the root's being the ones kept
//   gradients    of one replica, not normalised: the sum over micro-batches of denominator x gradient
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "base/model.hpp"
#include "strategy/options.hpp"
#include "strategy/sparse.hpp"

namespace stratagem {

/// One parameter or buffer, as all replicas have it.
struct ParameterInfo {
  std::vector<std::string> names;  ///< the first is the main one
  stg_dtype dtype{};
  std::vector<int64_t> shape;
  bool requires_grad = false;
  bool persistent = false;
};

inline bool same_device(stg_device a, stg_device b) { return a.kind == b.kind && a.index == b.index; }

class ReplicaSlot {
 public:
  ReplicaSlot(const Model& model, const stg_replicate_args& args, size_t its_leader);

  int32_t index() const { return index_; }
  stg_device device() const { return device_; }
  const Replica& model() const { return model_; }

  /// Runs `body`; what it throws is told as this replica's error.
  template <class Body>
  void guarded(const char* phase, Body&& body) const {
    try {
      body();
    } catch (...) {
      throw describe_exception(std::current_exception())
          .within(concat("replica ", index_, " on ", device_name(device_), ", in ", phase), index_, device_);
    }
  }

  /// Reads the description again: after bind, memory has moved.
  void describe();
  /// Forward on a share; keeps the graph. The share is on this replica's device afterwards.
  void forward(stg_step_context context, Tree share);
  /// Backward from the latest graph times `scale`, added to `gradients` times `weight`. One of 0 drops the graph unread.
  void backward(double scale, double weight, bool detect_anomaly);
  /// The same for a replica on an accelerator: each gradient is handed on as it is ready, sparse ones as dense ones.
  void backward(double scale, const Replica::ReadyOnStream& take);
  void drop_graph() { step.graph.reset(); }
  /// Bytes; none where the model has no generator.
  Tree generator_state() const;
  void set_generator_state(const uint8_t* state, uint64_t size_bytes) const;
  void drop_gradients();
  /// A sparse gradient of the parameter becomes a dense one.
  void make_dense(size_t parameter);

  std::vector<TensorPtr> parameters;  ///< views with shapes of their own over the model's memory
  std::vector<TensorPtr> buffers;
  std::vector<ParameterInfo> parameter_infos;
  std::vector<ParameterInfo> buffer_infos;
  std::vector<bool> pinned;         ///< by parameter: may be written in place
  std::vector<bool> buffer_pinned;  ///< by buffer; others are the model's own affair
  stg_model_description description{};
  ModelStep step;                                           ///< of the latest forward
  std::vector<TensorPtr> gradients;                         ///< by parameter; null: none yet, or a sparse one
  std::vector<std::optional<SparseRows>> sparse_gradients;  ///< by parameter
  Tree saved_generator;            ///< its state before the step that is under way; none: there is no such step
  double gradients_weight = 1;     ///< they are yet to be multiplied by it
  const size_t leader;             ///< the first replica in the same memory: the root for all on the CPU
  bool shares_parameters = false;  ///< with the leader
  bool parameters_dirty = false;   ///< written since the model was last told

 private:
  // What one backward brings.
  struct Incoming {
    std::vector<bool> seen;
    std::vector<TensorPtr> gradients;
    std::vector<std::optional<SparseRows>> sparse_gradients;
  };
  const ParameterInfo& first_seen(uint64_t index, Incoming& incoming) const;
  void check_seen(const Incoming& incoming) const;
  void check_trained(const ParameterInfo& info) const;
  void collect(uint64_t index, TensorPtr gradient, Incoming& incoming) const;
  void accumulate(uint64_t index, TensorPtr gradient, double weight);
  void accumulate(uint64_t index, SparseRows rows, double weight);
  bool has_gradients() const;
  void apply_weight();
  TensorPtr& own_sum(uint64_t index);
  void tell_changes();

  int32_t index_;
  stg_device device_;
  Replica model_;
  std::vector<bool> is_sum_own_;  // by parameter: its entry of `gradients` may be written
  bool is_described_ = false;
  int mode_ = -1;  // 1: training, 0: evaluation, -1: not told yet
};

class Replicas {
 public:
  /// Makes one per device, compares them, and puts all on the root's memory or values. `state_follows`: a whole state is imported next,
  /// so the root needs no initial values either.
  Replicas(const Model& model, const Options& options, uint32_t threads_per_replica, bool needs_writable_parameters,
           bool state_follows);
  Replicas(const Replicas&) = delete;
  Replicas& operator=(const Replicas&) = delete;
  /// In reverse order: the root's memory outlives those bound to it.
  ~Replicas();

  size_t size() const { return slots_.size(); }
  ReplicaSlot& operator[](size_t i) { return *slots_[i]; }
  ReplicaSlot& root() { return *slots_.front(); }
  const ReplicaSlot& root() const { return *slots_.front(); }
  bool has_buffers() const { return !slots_.front()->buffers.empty(); }
  /// Whether each replica that is no leader has its leader's memory, so that none needs to be refreshed after an update.
  bool all_follow() const { return all_follow_; }

  /// Copies the root's parameters to replica i, where they aren't shared.
  void copy_parameters(size_t i);
  /// Copies the leader's parameters to replica i, where they aren't shared.
  void refresh_parameters(size_t i);
  void copy_buffers(size_t i);
  void mark_parameters_dirty();
  /// Before its forward: replica i's generator, and the root's buffers, to put back after a failed step.
  void save(size_t i);
  void restore() noexcept;
  /// The step went well: what was saved is not put back any more.
  void forget_saved();
  void drop_graphs();
  void drop_gradients();
  /// All that is the model's and was lent for a step. Before the end: it may not outlive the model.
  void drop_all();

 private:
  void copy_parameters(size_t i, const ReplicaSlot& from);
  void compare(const ReplicaSlot& other) const;
  void share(ReplicaSlot& slot);

  std::vector<std::unique_ptr<ReplicaSlot>> slots_;
  std::vector<TensorPtr> saved_buffers_;
  bool buffers_are_saved_ = false;
  bool all_follow_ = true;
};

}  // namespace stratagem
