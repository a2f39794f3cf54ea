// SPDX-License-Identifier: Apache-2.0
#include "spec/toy_model.hpp"

#include <cmath>
#include <cstring>

#include "base/structs.hpp"
#include "strategy/elements.hpp"

namespace stratagem::test {

namespace {

struct ToyGraph {
  ToyStep step;
  Tree batch;  // only of a model that reads it in backward
  stg_step_context context{};
};

ToyModel& model_of(void* self) { return *static_cast<ToyModel*>(self); }
ToyReplica& replica_of(stg_replica* replica) { return *reinterpret_cast<ToyReplica*>(replica); }

// Where initial values may be left out there are wrong ones, so that a strategy that doesn't write them is seen in every test.
std::vector<TensorPtr> make_tensors(const std::vector<ToyParameter>& parameters, const stg_replicate_args& args,
                                    uint64_t flags_written) {
  std::vector<TensorPtr> tensors;
  for (const ToyParameter& parameter : parameters) {
    const bool is_cast = args.floating_dtype.bits != 0 && is_floating(parameter.dtype);
    const bool is_left_out = (args.flags & STG_REPLICATE_SKIP_INIT) != 0 && (parameter.flags & flags_written) == flags_written;
    const std::vector<double> wrong(parameter.values.size(), is_floating(parameter.dtype) ? std::nan("") : -77);
    tensors.push_back(
        tensor_of(is_left_out ? wrong : parameter.values, parameter.shape, is_cast ? args.floating_dtype : parameter.dtype));
  }
  return tensors;
}

void describe(ToyReplica& replica, const std::vector<ToyParameter>& parameters, const std::vector<TensorPtr>& tensors) {
  for (size_t p = 0; p < parameters.size(); ++p) {
    auto& names = replica.names.emplace_back();
    for (const std::string& name : parameters[p].names) names.push_back(to_abi(name));
    stg_parameter described = sized<stg_parameter>();
    described.names = names.data();
    described.num_names = names.size();
    described.tensor = tensors[p].get();
    described.flags = parameters[p].flags;
    replica.described.push_back(described);
  }
}

stg_error* replicate(void* self, const stg_replicate_args* args, stg_replica** out) {
  return guard([&] {
    ToyModel& model = model_of(self);
    auto replica = std::make_unique<ToyReplica>();
    replica->args = *args;
    replica->parameters = make_tensors(model.parameters, *args, STG_PARAMETER_PINNED);
    replica->buffers = make_tensors(model.buffers, *args, STG_PARAMETER_PINNED | STG_PARAMETER_PERSISTENT);
    ++model.num_replicas;
    if ((args->flags & STG_REPLICATE_SKIP_INIT) != 0) ++model.num_skipped_inits;
    *out = reinterpret_cast<stg_replica*>(replica.release());
  });
}

stg_error* describe_replica(void* self, stg_replica* handle, stg_model_description* out) {
  return guard([&] {
    ToyModel& model = model_of(self);
    ToyReplica& replica = replica_of(handle);
    replica.names.clear();
    replica.described.clear();
    replica.described_parameters.clear();
    replica.described_buffers.clear();
    describe(replica, model.parameters, replica.parameters);
    describe(replica, model.buffers, replica.buffers);
    for (size_t i = 0; i < replica.described.size(); ++i) {
      (i < model.parameters.size() ? replica.described_parameters : replica.described_buffers).push_back(&replica.described[i]);
    }
    out->parameters = replica.described_parameters.data();
    out->num_parameters = replica.described_parameters.size();
    out->buffers = replica.described_buffers.data();
    out->num_buffers = replica.described_buffers.size();
    out->loss_kind = model.loss_kind;
  });
}

stg_error* step(void* self, stg_replica* handle, const stg_step_context* context, stg_tree* batch,
                stg_model_step_result* result) {
  Tree owned = Tree::receive(batch);
  return guard([&] {
    ToyModel& model = model_of(self);
    auto graph = std::make_unique<ToyGraph>();
    graph->step = model.on_step(replica_of(handle), *context, owned.root());
    result->outputs = make_tree(std::move(graph->step.outputs)).give();
    Value& denominator = graph->step.denominator;
    if (auto* integer = std::get_if<int64_t>(&denominator.data)) {
      result->denominator.type = STG_INT64;
      result->denominator.as.i64 = *integer;
    } else if (auto* number = std::get_if<double>(&denominator.data)) {
      result->denominator.type = STG_DOUBLE;
      result->denominator.as.f64 = *number;
    } else if (auto* tensor = std::get_if<TensorPtr>(&denominator.data)) {
      result->denominator.type = STG_TENSOR;
      result->denominator.as.tensor = tensor->release();
    }
    if ((context->flags & STG_STEP_GRADIENT) == 0) return;
    if (model.reads_batch_in_backward) graph->batch = std::move(owned);
    graph->context = *context;
    ++model.num_graphs;
    result->graph = reinterpret_cast<stg_graph*>(graph.release());
  });
}

void report_sparse(const stg_gradient_sink* sink, uint64_t index, ToySparse gradient, double scale) {
  if (gradient.values != nullptr && is_floating(gradient.values->view.dtype)) {
    const stg_tensor_view& view = gradient.values->view;
    for (int64_t i = 0; i < numel(view); ++i) {
      store_floating(first_element<char>(view) + i * static_cast<int64_t>(element_size_bytes(view.dtype)), view.dtype,
                     read_element(view, i) * scale);
    }
  }
  check(sink->ready_sparse(sink->self, index, gradient.indices.release(), gradient.values.release(), gradient.shape.data(),
                           gradient.shape.size(), nullptr));
}

stg_error* backward(void* self, stg_replica* handle, stg_graph* graph, double scale, uint32_t, const stg_gradient_sink* sink) {
  ToyModel& model = model_of(self);
  const std::unique_ptr<ToyGraph> owned{reinterpret_cast<ToyGraph*>(graph)};
  --model.num_graphs;
  return guard([&] {
    ToyReplica& replica = replica_of(handle);
    if (model.on_backward) model.on_backward(replica);
    if (model.reads_batch_in_backward) owned->step = model.on_step(replica, owned->context, owned->batch.root());
    for (size_t p = 0; p < replica.parameters.size(); ++p) {
      if (const auto sparse = owned->step.sparse_gradients.find(p); sparse != owned->step.sparse_gradients.end()) {
        report_sparse(sink, p, std::move(sparse->second), scale);
        continue;
      }
      TensorPtr gradient;
      if (p < owned->step.gradients.size() && !owned->step.gradients[p].empty()) {
        std::vector<double> values = owned->step.gradients[p];
        for (double& value : values) value *= scale;
        const stg_tensor_view& view = replica.parameters[p]->view;
        gradient = tensor_of(values, {view.shape, view.shape + view.num_dims}, view.dtype);
      }
      check(sink->ready(sink->self, p, gradient.release(), nullptr));
    }
  });
}

stg_error* bind(void*, stg_replica* handle, uint64_t index, const stg_tensor* storage, const stg_tensor*) {
  return guard([&] {
    const stg_tensor_view& view = storage->view;
    TensorPtr bound = make_strided_tensor(nullptr, view.data, view.dtype, {view.shape, view.shape + view.num_dims},
                                          strides_of(view), 0, view.device);
    bound->view.byte_offset = view.byte_offset;
    replica_of(handle).parameters[index] = std::move(bound);
  });
}

}  // namespace

ToyModel::ToyModel(std::vector<ToyParameter> list, StepFunction function)
    : parameters(std::move(list)), on_step(std::move(function)) {
  table = sized<stg_model>();
  table.self = this;
  table.retain = [](void* self) { ++model_of(self).num_references; };
  table.release = [](void* self) { --model_of(self).num_references; };
  table.replicate = replicate;
  table.destroy_replica = [](void* self, stg_replica* replica) {
    --model_of(self).num_replicas;
    delete &replica_of(replica);
  };
  table.describe = describe_replica;
  table.set_mode = [](void*, stg_replica* replica, uint32_t train) -> stg_error* {
    replica_of(replica).is_training = train != 0;
    return nullptr;
  };
  table.step = step;
  table.backward = backward;
  table.release_graph = [](void* self, stg_replica*, stg_graph* graph) {
    --model_of(self).num_graphs;
    delete reinterpret_cast<ToyGraph*>(graph);
  };
  table.bind = bind;
  table.parameters_changed = [](void*, stg_replica* replica) -> stg_error* {
    ++replica_of(replica).num_times_told;
    return nullptr;
  };
}

double element(const stg_value& batch, const char* key, int64_t index) {
  const stg_value* value = key == nullptr ? &batch : find(batch, key);
  return read_element(value->as.tensor->view, index);
}

int64_t num_rows(const stg_value& batch, const char* key) {
  const stg_value* value = key == nullptr ? &batch : find(batch, key);
  return value->as.tensor->view.shape[0];
}

TensorPtr tensor_of(const std::vector<double>& values, std::vector<int64_t> shape, stg_dtype dtype) {
  TensorPtr tensor = allocate_tensor(dtype, std::move(shape));
  for (size_t i = 0; i < values.size(); ++i) {
    char* at = first_element<char>(tensor->view) + i * element_size_bytes(dtype);
    if (is_floating(dtype)) {
      store_floating(at, dtype, values[i]);
    } else {
      const auto integer = static_cast<int64_t>(values[i]);
      std::memcpy(at, &integer, element_size_bytes(dtype));
    }
  }
  return tensor;
}

TensorPtr scalar(double value, stg_dtype dtype) { return tensor_of({value}, {}, dtype); }

std::unique_ptr<ToyModel> linear_model(double initial, stg_dtype dtype) {
  ToyParameter weight{{"weight"}, {1}, {initial}};
  weight.dtype = dtype;
  std::vector<ToyParameter> parameters;
  parameters.push_back(weight);
  return std::make_unique<ToyModel>(
      std::move(parameters), [](ToyReplica& replica, const stg_step_context&, const stg_value& batch) {
        const int64_t rows = num_rows(batch, "x");
        double mean = 0;
        for (int64_t i = 0; i < rows; ++i) mean += element(batch, "x", i);
        mean /= static_cast<double>(rows);
        ToyStep step;
        Dict outputs;
        outputs.emplace_back("loss", scalar(replica.value(0, 0) * mean, replica.parameters[0]->view.dtype));
        step.outputs = std::move(outputs);
        step.gradients = {{mean}};
        return step;
      });
}

}  // namespace stratagem::test
