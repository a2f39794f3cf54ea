// SPDX-License-Identifier: Apache-2.0
#include "base/model.hpp"

#include <exception>

#include "base/dlpack.hpp"

namespace stratagem {

namespace {

void check_denominator(const stg_tensor* tensor) {
  if (tensor == nullptr) throw invalid_argument("the model's denominator is a null tensor");
  check_tensor(*tensor, "the model's denominator");
}

// What stands behind a stg_gradient_sink.
struct Sink {
  const Replica::ReadyOnStream& ready;
  const Replica::ReadySparse& ready_sparse;
  std::exception_ptr refused = nullptr;  // the first error

  template <class Body>
  stg_error* take(Body&& body) {
    return guard([&] {
      try {
        body();
      } catch (...) {
        if (!refused) refused = std::current_exception();
        throw;
      }
    });
  }
};

}  // namespace

Model::Model(const stg_model* model) {
  auto table = std::make_unique<stg_model>(read_table(model, STG_MODEL_MIN_SIZE, "stg_model"));
  const bool is_complete = table->replicate != nullptr && table->destroy_replica != nullptr && table->describe != nullptr &&
                           table->set_mode != nullptr && table->step != nullptr && table->backward != nullptr &&
                           table->release_graph != nullptr;
  if (!is_complete) {
    throw invalid_argument(
        "a model must have replicate, destroy_replica, describe, set_mode, step, backward and release_graph; one of them is "
        "null");
  }
  check_references(*table, "the model");
  if (table->retain != nullptr) table->retain(table->self);
  table_ = {table.release(), [](const stg_model* owned) {
              if (owned->release != nullptr) owned->release(owned->self);
              delete owned;
            }};
}

Replica::Replica(Model model, stg_replicate_args args) {
  args.struct_size = sizeof args;
  stg_replica* made = nullptr;
  check(model.table().replicate(model.self(), &args, &made));
  replica_ = {made, Destroy{std::move(model)}};
}

stg_model_description Replica::describe() const {
  stg_model_description description = sized<stg_model_description>();
  check(model().table().describe(model().self(), get(), &description));
  return description;
}

void Replica::set_mode(bool train) const { check(model().table().set_mode(model().self(), get(), train ? 1 : 0)); }

ModelStep Replica::step(stg_step_context context, Tree batch) const {
  context.struct_size = sizeof context;
  stg_model_step_result result = sized<stg_model_step_result>();
  check(model().table().step(model().self(), get(), &context, batch.argument(), &result));
  ModelStep step;
  step.outputs = Tree{result.outputs};
  step.graph = GraphPtr{result.graph, GraphRelease{model(), get()}};
  step.denominator = result.denominator;
  if (result.denominator.type == STG_TENSOR) step.denominator_owner.reset(result.denominator.as.tensor);
  // All that the model gave is owned before any of it is looked at.
  if (result.denominator.type == STG_TENSOR) check_denominator(result.denominator.as.tensor);
  validate(step.outputs.root(), "the model's outputs");
  return step;
}

void Replica::backward(GraphPtr graph, double scale, const Ready& ready, const ReadySparse& ready_sparse) const {
  const ReadyOnStream on_stream = [&](uint64_t index, TensorPtr gradient, const stg_stream*) {
    ready(index, std::move(gradient));
  };
  backward(std::move(graph), scale, on_stream, ready_sparse);
}

void Replica::backward(GraphPtr graph, double scale, const ReadyOnStream& ready, const ReadySparse& ready_sparse) const {
  if (graph == nullptr) throw failed_precondition("backward without a graph: a training_step has to come before it");
  Sink own{ready, ready_sparse};
  stg_gradient_sink sink = sized<stg_gradient_sink>();
  sink.self = &own;
  sink.ready = [](void* self, uint64_t index, stg_tensor* gradient, const stg_stream* stream) {
    TensorPtr owned{gradient};
    return static_cast<Sink*>(self)->take([&] {
      if (owned != nullptr) check_tensor(*owned, "gradient ", index);
      static_cast<Sink*>(self)->ready(index, std::move(owned), stream);
    });
  };
  if (ready_sparse) {
    sink.ready_sparse = [](void* self, uint64_t index, stg_tensor* indices, stg_tensor* values, const int64_t* shape,
                           uint64_t num_dims, const stg_stream*) {
      SparseGradient owned{TensorPtr{indices}, TensorPtr{values}, shape, num_dims};
      return static_cast<Sink*>(self)->take([&] {
        if (owned.indices != nullptr) check_tensor(*owned.indices, "the indices of gradient ", index);
        if (owned.values != nullptr) check_tensor(*owned.values, "the values of gradient ", index);
        static_cast<Sink*>(self)->ready_sparse(index, std::move(owned));
      });
    };
  }
  check(model().table().backward(model().self(), get(), graph.release(), scale, 0, &sink));
  // A model that passes over an error would train on without that gradient.
  if (own.refused) std::rethrow_exception(own.refused);
}

}  // namespace stratagem
