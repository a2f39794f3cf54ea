// SPDX-License-Identifier: Apache-2.0
//
// A model of whoever's making, as a strategy sees it: absent slots read as null, errors as exceptions, replicas and graphs owned. How
// to make a model on LibTorch is in core/model.
#pragma once

#include <stratagem/model.h>

#include <functional>
#include <memory>

#include "base/structs.hpp"
#include "base/value.hpp"

namespace stratagem {

/// A reference to a model. Copies share.
class Model {
 public:
  Model() = default;
  /// Checks the table (slots through release_graph must be there) and retains it.
  explicit Model(const stg_model* model);
  explicit operator bool() const { return table_ != nullptr; }
  const stg_model& table() const { return *table_; }
  void* self() const { return table_->self; }

 private:
  std::shared_ptr<const stg_model> table_;
};

struct GraphRelease {
  Model model;
  stg_replica* replica = nullptr;
  void operator()(stg_graph* graph) const noexcept { model.table().release_graph(model.self(), replica, graph); }
};
/// Must not outlive its replica.
using GraphPtr = std::unique_ptr<stg_graph, GraphRelease>;

/// What a step of a replica gave.
struct ModelStep {
  Tree outputs;
  stg_value denominator{};  ///< none, a number, or a tensor that `denominator_owner` owns
  TensorPtr denominator_owner;
  GraphPtr graph;
};

/// A sparse gradient as a model gives it (stg_gradient_sink.ready_sparse), unchecked. `shape` is borrowed for the call.
struct SparseGradient {
  TensorPtr indices;
  TensorPtr values;
  const int64_t* shape = nullptr;
  uint64_t num_dims = 0;
};

/// One replica. Its functions are for one thread at a time.
class Replica {
 public:
  /// Takes a gradient: the parameter's index, and the gradient or null.
  using Ready = std::function<void(uint64_t index, TensorPtr gradient)>;
  /// The same on an accelerator: the stream orders the gradient; null: the step's does.
  using ReadyOnStream = std::function<void(uint64_t index, TensorPtr gradient, const stg_stream* stream)>;
  using ReadySparse = std::function<void(uint64_t index, SparseGradient gradient)>;

  Replica() = default;
  Replica(Model model, stg_replicate_args args);
  const Model& model() const { return replica_.get_deleter().model; }
  stg_replica* get() const { return replica_.get(); }

  /// Valid until the next describe.
  stg_model_description describe() const;
  void set_mode(bool train) const;
  ModelStep step(stg_step_context context, Tree batch) const;
  /// Runs backward from the loss times `scale`; `ready` is called once for each parameter that requires a gradient, or more. Without
  /// `ready_sparse` the model makes sparse gradients dense.
  void backward(GraphPtr graph, double scale, const Ready& ready, const ReadySparse& ready_sparse = {}) const;
  void backward(GraphPtr graph, double scale, const ReadyOnStream& ready, const ReadySparse& ready_sparse = {}) const;

 private:
  struct Destroy {
    Model model;
    void operator()(stg_replica* replica) const noexcept { model.table().destroy_replica(model.self(), replica); }
  };
  std::unique_ptr<stg_replica, Destroy> replica_;
};

}  // namespace stratagem
