// SPDX-License-Identifier: Apache-2.0
#include "strategy/replicas.hpp"

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "strategy/elements.hpp"
#include "strategy/gradients.hpp"

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

bool same_device(stg_device a, stg_device b) { return a.kind == b.kind && a.index == b.index; }

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

bool same_memory(const TensorPtr& a, const TensorPtr& b) { return first_element<>(a->view) == first_element<>(b->view); }

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
      std::move(step.graph), scale,
      [&](uint64_t index, TensorPtr gradient, const stg_stream*) { collect(index, std::move(gradient), incoming); },
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

void ReplicaSlot::backward(double scale, const Replica::Ready& take) {
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

// ---- all of them

namespace {

// The first replica in the same memory.
size_t leader_of(const std::vector<stg_device>& devices, size_t replica) {
  if (devices[replica].kind == STG_DEVICE_CPU) return 0;
  size_t leader = 0;
  while (!same_device(devices[leader], devices[replica])) ++leader;
  return leader;
}

}  // namespace

Replicas::Replicas(const Model& model, const Options& options, uint32_t threads_per_replica, bool needs_writable_parameters,
                   bool state_follows) {
  stg_replicate_args args = sized<stg_replicate_args>();
  args.num_replicas = static_cast<int32_t>(options.devices.size());
  args.floating_dtype = options.floating_dtype;
  args.num_threads = threads_per_replica;
  args.seed = options.seed;
  for (size_t i = 0; i < options.devices.size(); ++i) {
    args.device = options.devices[i];
    args.replica = static_cast<int32_t>(i);
    args.flags = i > 0 || state_follows ? STG_REPLICATE_SKIP_INIT : 0;
    slots_.push_back(std::make_unique<ReplicaSlot>(model, args, leader_of(options.devices, i)));
    ReplicaSlot& slot = *slots_.back();
    slot.guarded("setup", [&] {
      if (i > 0) {
        compare(slot);
        share(slot);
        copy_parameters(i);
        copy_buffers(i);
      }
      for (size_t p = 0; needs_writable_parameters && p < slot.parameters.size(); ++p) {
        if (slot.parameter_infos[p].requires_grad && !slot.pinned[p]) {
          throw failed_precondition(
              "parameter ", slot.parameter_infos[p].names[0],
              " can't be written in place (it is floating or read-only), which the optimizer of the config needs; "
              "leave \"optimizer\" out and update it in the host");
        }
      }
    });
  }
}

Replicas::~Replicas() {
  while (!slots_.empty()) slots_.pop_back();
}

void Replicas::compare(const ReplicaSlot& other) const {
  const auto compare_lists = [&](const std::vector<ParameterInfo>& mine, const std::vector<ParameterInfo>& theirs,
                                 const char* kind) {
    if (mine.size() != theirs.size()) {
      throw invalid_argument("it has ", theirs.size(), " ", kind, "s, the root has ", mine.size(), "; replicas must be alike");
    }
    for (size_t p = 0; p < mine.size(); ++p) {
      const ParameterInfo& a = mine[p];
      const ParameterInfo& b = theirs[p];
      if (a.names != b.names || a.shape != b.shape || !same_dtype(a.dtype, b.dtype) || a.requires_grad != b.requires_grad) {
        throw invalid_argument(kind, " ", p, " is ", b.names[0], ", on the root it is ", a.names[0],
                               a.names == b.names ? " (they differ in shape, type or gradient)" : "", "; replicas must be alike");
      }
    }
  };
  compare_lists(root().parameter_infos, other.parameter_infos, "parameter");
  compare_lists(root().buffer_infos, other.buffer_infos, "buffer");
}

void Replicas::share(ReplicaSlot& slot) {
  const stg_model& table = slot.model().model().table();
  const ReplicaSlot& leader = *slots_[slot.leader];
  const auto all_shared = [&] {
    return &leader != &slot && std::equal(slot.parameters.begin(), slot.parameters.end(), leader.parameters.begin(), same_memory);
  };
  if (&leader != &slot && !all_shared() && table.bind != nullptr) {
    for (size_t p = 0; p < slot.parameters.size(); ++p) {
      if (same_memory(slot.parameters[p], leader.parameters[p])) continue;
      check(table.bind(slot.model().model().self(), slot.model().get(), p, leader.parameters[p].get(), nullptr));
    }
    slot.describe();
    if (!all_shared()) throw failed_precondition("after bind, the model describes other memory than it was given");
  }
  slot.shares_parameters = all_shared();
  if (slot.shares_parameters) return;
  all_follow_ = all_follow_ && &leader == &slot;
  for (size_t p = 0; p < slot.parameters.size(); ++p) {
    // Gradients are added up in memory order.
    const stg_tensor_view& mine = slot.parameters[p]->view;
    const stg_tensor_view& its = root().parameters[p]->view;
    if ((is_dense(mine) || is_dense(its)) && !same_layout(mine, its)) {
      throw invalid_argument("parameter ", slot.parameter_infos[p].names[0],
                             " lies in another order in memory (other strides) than the root's; replicas must be alike");
    }
  }
  const auto fixed = std::find(slot.pinned.begin(), slot.pinned.end(), false);
  if (fixed != slot.pinned.end()) {
    throw failed_precondition(
        "parameter ", slot.parameter_infos[static_cast<size_t>(fixed - slot.pinned.begin())].names[0],
        " is neither shared with the root nor writable in place, so replicas can't be kept equal; give the model "
        "`bind`, share the memory between its replicas, or pin its parameters");
  }
}

void Replicas::copy_parameters(size_t i) {
  if (i != 0) copy_parameters(i, root());
}

void Replicas::refresh_parameters(size_t i) {
  if (slots_[i]->leader != i) copy_parameters(i, *slots_[slots_[i]->leader]);
}

void Replicas::copy_parameters(size_t i, const ReplicaSlot& from) {
  ReplicaSlot& slot = *slots_[i];
  if (slot.shares_parameters) return;
  for (size_t p = 0; p < slot.parameters.size(); ++p) copy_elements(slot.parameters[p]->view, from.parameters[p]->view);
  slot.parameters_dirty = true;
}

void Replicas::copy_buffers(size_t i) {
  ReplicaSlot& slot = *slots_[i];
  for (size_t b = 0; i != 0 && b < slot.buffers.size(); ++b) {
    if (!slot.buffer_pinned[b] || same_memory(slot.buffers[b], root().buffers[b])) continue;
    copy_elements(slot.buffers[b]->view, root().buffers[b]->view);
  }
}

void Replicas::mark_parameters_dirty() {
  for (const auto& slot : slots_) slot->parameters_dirty = true;
}

void Replicas::save(size_t i) {
  ReplicaSlot& slot = *slots_[i];
  const bool is_saved = slot.saved_generator.root().type != STG_NONE;  // before the model's own split
  if (!is_saved && slot.model().model().table().set_generator_state != nullptr) slot.saved_generator = slot.generator_state();
  if (i != 0 || buffers_are_saved_) return;
  saved_buffers_.resize(root().buffers.size());
  for (size_t b = 0; b < saved_buffers_.size(); ++b) {
    if (!root().buffer_pinned[b]) continue;
    const stg_tensor_view& buffer = root().buffers[b]->view;
    if (saved_buffers_[b]) {
      copy_elements(saved_buffers_[b]->view, buffer);
    } else {
      saved_buffers_[b] = clone_tensor(buffer);
    }
  }
  buffers_are_saved_ = true;
}

void Replicas::restore() noexcept {
  for (const auto& slot : slots_) {
    const stg_value state = slot->saved_generator.root();
    try {
      if (state.type != STG_NONE) slot->set_generator_state(state.as.bytes, state.count);
    } catch (const Error&) {
      // It draws other numbers then; what failed before is what has to be told.
    }
  }
  for (size_t b = 0; buffers_are_saved_ && b < saved_buffers_.size(); ++b) {
    if (saved_buffers_[b]) copy_elements(root().buffers[b]->view, saved_buffers_[b]->view);
  }
  for (size_t i = 1; i < size(); ++i) copy_buffers(i);
  forget_saved();
}

void Replicas::forget_saved() {
  buffers_are_saved_ = false;
  for (const auto& slot : slots_) slot->saved_generator = {};
}

void Replicas::drop_graphs() {
  // With what else the latest forward left, where its outputs were never gathered.
  for (const auto& slot : slots_) slot->step = {};
}

void Replicas::drop_all() {
  drop_graphs();
  drop_gradients();
  forget_saved();
}

void Replicas::drop_gradients() {
  for (const auto& slot : slots_) slot->drop_gradients();
}

}  // namespace stratagem
