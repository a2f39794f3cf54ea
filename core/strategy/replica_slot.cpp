// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "strategy/elements.hpp"
#include "strategy/gradients.hpp"
#include "strategy/replicas.hpp"

namespace stratagem {

namespace {

// A view over another tensor's memory that owns its shape and strides, and nothing else.
TensorPtr own_view(const stg_tensor& tensor) {
  const stg_tensor_view& view = tensor.view;
  TensorPtr copy = make_strided_tensor(nullptr, view.data, view.dtype, {view.shape, view.shape + view.num_dims}, strides_of(view),
                                       tensor.flags, view.device);
  copy->view.byte_offset = view.byte_offset;
  return copy;
}

const stg_parameter& checked(const stg_parameter* parameter, stg_device device, const char* kind, uint64_t index) {
  if (parameter == nullptr) throw invalid_argument("the model describes a null ", kind, " ", index);
  known_size_bytes(parameter, STG_PARAMETER_MIN_SIZE, "stg_parameter");
  if (parameter->num_names == 0 || parameter->names == nullptr)
    throw invalid_argument("the model's ", kind, " ", index, " has no name");
  const std::string name(text_of(parameter->names[0]));
  if (parameter->tensor == nullptr)
    throw invalid_argument("the model's ", kind, " ", name, " has no tensor (not materialised yet?)");
  check_tensor(*parameter->tensor, "the model's ", kind, " ", name);
  const stg_device found = parameter->tensor->view.device;
  if (found.kind != device.kind || (device.kind != STG_DEVICE_CPU && found.index != device.index)) {
    throw invalid_argument("the model's ", kind, " ", name, " is on ", device_name(found), "; its replica is on ",
                           device.kind == STG_DEVICE_CPU ? "a cpu" : device_name(device));
  }
  return *parameter;
}

ParameterInfo info_of(const stg_parameter& parameter) {
  ParameterInfo info;
  for (uint64_t n = 0; n < parameter.num_names; ++n) info.names.emplace_back(text_of(parameter.names[n]));
  const stg_tensor_view& view = parameter.tensor->view;
  info.dtype = view.dtype;
  info.shape = {view.shape, view.shape + view.num_dims};
  info.requires_grad = (parameter.flags & STG_PARAMETER_REQUIRES_GRAD) != 0;
  info.persistent = (parameter.flags & STG_PARAMETER_PERSISTENT) != 0;
  return info;
}

void check_distinct_names(const ReplicaSlot& slot) {
  std::unordered_set<std::string> names;
  for (const auto* infos : {&slot.parameter_infos, &slot.buffer_infos}) {
    for (const ParameterInfo& info : *infos) {
      for (const std::string& name : info.names) {
        if (!names.insert(name).second) throw invalid_argument("the model describes the name ", name, " twice");
      }
    }
  }
}

// One list of a description, as a replica keeps it.
struct Described {
  Described(const stg_parameter* const* list, uint64_t count, stg_device device, const char* kind) {
    for (uint64_t i = 0; i < count; ++i) {
      const stg_parameter& entry = checked(list[i], device, kind, i);
      tensors.push_back(own_view(*entry.tensor));
      infos.push_back(info_of(entry));
      pinned.push_back((entry.flags & STG_PARAMETER_PINNED) != 0 && (entry.tensor->flags & STG_TENSOR_READ_ONLY) == 0);
    }
  }

  // Gradients and the optimizer have room for what was there at setup: nothing else may be described later, and what was trained or
  // frozen then stays so.
  void keep(const std::vector<ParameterInfo>& before, const char* kind) {
    if (infos.size() != before.size())
      throw failed_precondition("the model describes ", infos.size(), " ", kind, "s, at setup they were ", before.size());
    for (size_t i = 0; i < infos.size(); ++i) {
      if (infos[i].names != before[i].names || infos[i].shape != before[i].shape ||
          !same_dtype(infos[i].dtype, before[i].dtype)) {
        throw failed_precondition("the model describes ", kind, " ", i, " as ", infos[i].names[0], ", ",
                                  dtype_name(infos[i].dtype), " ", shape_text(tensors[i]->view), "; at setup it was ",
                                  before[i].names[0], ", ", dtype_name(before[i].dtype), "; set up again");
      }
      infos[i].requires_grad = before[i].requires_grad;
    }
  }

  std::vector<TensorPtr> tensors;
  std::vector<ParameterInfo> infos;
  std::vector<bool> pinned;
};

}  // namespace

// ---- one replica

ReplicaSlot::ReplicaSlot(const Model& model, const stg_replicate_args& args, size_t its_leader)
    : leader(its_leader), index_(args.replica), device_(args.device) {
  guarded("setup", [&] {
    model_ = Replica(model, args);
    describe();
    check_distinct_names(*this);
    for (const auto* infos : {&parameter_infos, &buffer_infos}) {
      for (const ParameterInfo& info : *infos) {
        if (args.floating_dtype.bits != 0 && is_floating(info.dtype) && !same_dtype(info.dtype, args.floating_dtype)) {
          throw invalid_argument(info.names[0], " is ", dtype_name(info.dtype), "; the precision asks for ",
                                 dtype_name(args.floating_dtype));
        }
      }
    }
  });
}

void ReplicaSlot::describe() {
  const stg_model_description made = model_.describe();
  if ((made.parameters == nullptr && made.num_parameters != 0) || (made.buffers == nullptr && made.num_buffers != 0)) {
    throw invalid_argument("the model's description has a null list");
  }
  if (made.loss_kind > STG_LOSS_SUM) throw invalid_argument("the model's loss_kind is ", made.loss_kind, "; known are 0 and 1");
  description = made;  // what the one before pointed to is gone
  Described new_parameters(made.parameters, made.num_parameters, device_, "parameter");
  Described new_buffers(made.buffers, made.num_buffers, device_, "buffer");
  if (is_described_) {
    new_parameters.keep(parameter_infos, "parameter");
    new_buffers.keep(buffer_infos, "buffer");
  }
  is_described_ = true;
  parameters = std::move(new_parameters.tensors);
  parameter_infos = std::move(new_parameters.infos);
  pinned = std::move(new_parameters.pinned);
  buffers = std::move(new_buffers.tensors);
  buffer_infos = std::move(new_buffers.infos);
  buffer_pinned = std::move(new_buffers.pinned);
  gradients.resize(parameters.size());
  sparse_gradients.resize(parameters.size());
  is_sum_own_.resize(parameters.size());
}

void ReplicaSlot::tell_changes() {
  if (!parameters_dirty) return;
  const stg_model& table = model_.model().table();
  if (table.parameters_changed != nullptr) check(table.parameters_changed(model_.model().self(), model_.get()));
  parameters_dirty = false;  // told once it knows
}

void ReplicaSlot::forward(stg_step_context context, Tree share) {
  const int mode = context.stage == STG_STAGE_FIT ? 1 : 0;
  if (mode == 1) drop_graph();
  tell_changes();
  if (mode_ != mode) {
    model_.set_mode(mode == 1);
    mode_ = mode;
  }
  const stg_model& table = model_.model().table();
  if (table.transfer != nullptr) {
    stg_tree moved{};
    check(table.transfer(model_.model().self(), model_.get(), share.argument(), context.dataloader_index, &moved));
    share = Tree{moved};
  }
  context.replica = index_;
  context.device = device_;
  ModelStep made = model_.step(context, std::move(share));
  // A training_step may be waiting for its backward: an evaluation in between leaves its graph alone.
  if (mode == 0) made.graph = std::move(step.graph);
  step = std::move(made);
}

void ReplicaSlot::backward(double scale, double weight, bool detect_anomaly) {
  if (!step.graph) return;
  if (scale == 0 || weight == 0) return drop_graph();
  Incoming incoming{std::vector<bool>(parameters.size()), std::vector<TensorPtr>(parameters.size()),
                    std::vector<std::optional<SparseRows>>(parameters.size())};
  model_.backward(
      std::move(step.graph), scale, [&](uint64_t index, TensorPtr gradient) { collect(index, std::move(gradient), incoming); },
      [&](uint64_t index, const SparseGradient& gradient) {
        const ParameterInfo& info = first_seen(index, incoming);
        check_trained(info);
        incoming.sparse_gradients[index] = read_sparse(gradient, info.names[0], parameters[index]->view);
      });
  check_seen(incoming);
  if (!has_gradients()) {
    gradients_weight = weight;
  } else if (weight != gradients_weight) {
    apply_weight();
  }
  for (size_t p = 0; p < parameters.size(); ++p) {
    TensorPtr& dense = incoming.gradients[p];
    std::optional<SparseRows>& sparse = incoming.sparse_gradients[p];
    if (!dense && !sparse) continue;
    if (detect_anomaly && has_nan(dense ? dense->view : sparse->values->view))
      throw Error{STG_OUT_OF_RANGE, concat("the gradient of ", parameter_infos[p].names[0], " has a NaN")};
    if (dense) {
      accumulate(p, std::move(dense), weight / gradients_weight);
    } else {
      accumulate(p, std::move(*sparse), weight / gradients_weight);
    }
  }
}

void ReplicaSlot::backward(double scale, const Replica::ReadyOnStream& take) {
  Incoming incoming{std::vector<bool>(parameters.size()), std::vector<TensorPtr>(parameters.size()), {}};
  model_.backward(std::move(step.graph), scale, [&](uint64_t index, TensorPtr gradient, const stg_stream* stream) {
    collect(index, std::move(gradient), incoming);
    if (incoming.gradients[index]) take(index, std::move(incoming.gradients[index]), stream);
  });
  check_seen(incoming);
}

// A parameter that the model has frozen since setup is one without a gradient. A backward that names nothing is a mistake.
void ReplicaSlot::check_seen(const Incoming& incoming) const {
  if (parameters.empty() || std::find(incoming.seen.begin(), incoming.seen.end(), true) != incoming.seen.end()) return;
  throw invalid_argument("the model reported neither a gradient nor null for any parameter, ", parameter_infos[0].names[0],
                         " the first of them");
}

const ParameterInfo& ReplicaSlot::first_seen(uint64_t index, Incoming& incoming) const {
  if (index >= parameters.size())
    throw invalid_argument("a gradient for parameter ", index, "; the model has ", parameters.size());
  const ParameterInfo& info = parameter_infos[index];
  if (incoming.seen[index]) throw invalid_argument("the gradient of ", info.names[0], " was reported twice in one backward");
  incoming.seen[index] = true;
  return info;
}

void ReplicaSlot::check_trained(const ParameterInfo& info) const {
  if (info.requires_grad) return;
  throw failed_precondition(info.names[0],
                            " has a gradient, but was frozen at setup, so there is no room for one; thaw it before ",
                            "setup, or set up again");
}

void ReplicaSlot::collect(uint64_t index, TensorPtr gradient, Incoming& incoming) const {
  const ParameterInfo& info = first_seen(index, incoming);
  if (!gradient) return;
  check_trained(info);
  const stg_tensor_view& view = gradient->view;
  if (!same_dtype(view.dtype, info.dtype) || shape_of(view).size() != info.shape.size() ||
      !std::equal(info.shape.begin(), info.shape.end(), view.shape)) {
    throw invalid_argument("the gradient of ", info.names[0], " is ", dtype_name(view.dtype), " ", shape_text(view),
                           "; the parameter is ", dtype_name(info.dtype), " ", shape_text(parameters[index]->view));
  }
  if (!same_device(view.device, parameters[index]->view.device) && !is_in_host_memory(parameters[index]->view.device)) {
    throw invalid_argument("the gradient of ", info.names[0], " is on ", device_name(view.device), "; the parameter is on ",
                           device_name(parameters[index]->view.device));
  }
  if (is_in_host_memory(parameters[index]->view.device)) check_in_host_memory(view, "the gradient of ", info.names[0]);
  incoming.gradients[index] = std::move(gradient);
}

// The first gradient of a window is adopted as autograd made it. It is only read: its memory may be another gradient's, too, or the
// model's own (no deleter), which writes to it again. Further ones are added in memory of this replica's, of the parameter's layout.
void ReplicaSlot::accumulate(uint64_t index, TensorPtr gradient, double weight) {
  make_dense(index);
  TensorPtr& sum = gradients[index];
  const FlatLayout layout = flat_layout(parameters[index]->view);
  const bool is_copied = !layout.fits(gradient->view) || (!sum && gradient->deleter == nullptr) || weight != 1;
  if (is_copied) gradient = layout.copy(gradient->view);
  if (weight != 1) scale_flat(gradient->view, weight);
  if (!sum) {
    sum = std::move(gradient);
    is_sum_own_[index] = is_copied;
    return;
  }
  const stg_tensor_view& view = own_sum(index)->view;
  add_elements(view.dtype, first_element<>(view), first_element<>(gradient->view), flat_numel(view));
}

// Sparse ones are kept sparse while they can be.
void ReplicaSlot::accumulate(uint64_t index, SparseRows rows, double weight) {
  if (weight != 1) scale_flat(rows.values->view, weight);
  std::optional<SparseRows>& sum = sparse_gradients[index];
  const stg_tensor_view& parameter = parameters[index]->view;
  if (!is_contiguous(parameter)) {
    TensorPtr dense = allocate_tensor(parameter.dtype, {parameter.shape, parameter.shape + parameter.num_dims});
    add_sparse_to(dense->view, rows);
    return accumulate(index, std::move(dense), 1);
  }
  if (sum && sum->num_sparse_dims != rows.num_sparse_dims) make_dense(index);
  if (gradients[index]) {
    add_sparse_to(own_sum(index)->view, rows);
  } else {
    sum = sum ? add_sparse(*sum, rows) : std::move(rows);
  }
}

TensorPtr& ReplicaSlot::own_sum(uint64_t index) {
  TensorPtr& sum = gradients[index];
  if (!is_sum_own_[index]) {
    sum = flat_layout(parameters[index]->view).copy(sum->view);
    is_sum_own_[index] = true;
  }
  return sum;
}

void ReplicaSlot::make_dense(size_t parameter) {
  if (!sparse_gradients[parameter]) return;
  gradients[parameter] = flat_layout(parameters[parameter]->view).allocate();
  is_sum_own_[parameter] = true;
  add_sparse_to(gradients[parameter]->view, *sparse_gradients[parameter]);
  sparse_gradients[parameter].reset();
}

bool ReplicaSlot::has_gradients() const {
  return std::any_of(gradients.begin(), gradients.end(), [](const TensorPtr& sum) { return sum != nullptr; }) ||
         std::any_of(sparse_gradients.begin(), sparse_gradients.end(), [](const auto& sum) { return sum.has_value(); });
}

// What was added up so far, times its weight: further gradients have another one.
void ReplicaSlot::apply_weight() {
  for (size_t p = 0; p < gradients.size() && gradients_weight != 1; ++p) {
    if (gradients[p]) scale_flat(own_sum(p)->view, gradients_weight);
    if (sparse_gradients[p]) scale_flat(sparse_gradients[p]->values->view, gradients_weight);
  }
  gradients_weight = 1;
}

Tree ReplicaSlot::generator_state() const {
  const stg_model& table = model_.model().table();
  if (table.get_generator_state == nullptr) return {};
  stg_tree out{};
  check(table.get_generator_state(model_.model().self(), model_.get(), &out));
  Tree tree{out};
  if (tree.root().type != STG_BYTES)
    throw invalid_argument("the model's generator state is a ", type_name(tree.root().type), "; it must be bytes");
  return tree;
}

void ReplicaSlot::set_generator_state(const uint8_t* state, uint64_t size_bytes) const {
  check(model_.model().table().set_generator_state(model_.model().self(), model_.get(), state, size_bytes));
}

void ReplicaSlot::drop_gradients() {
  for (TensorPtr& gradient : gradients) gradient.reset();
  for (std::optional<SparseRows>& rows : sparse_gradients) rows.reset();
}

}  // namespace stratagem
