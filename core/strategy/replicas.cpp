// SPDX-License-Identifier: Apache-2.0
#include "strategy/replicas.hpp"

#include <algorithm>

#include "strategy/elements.hpp"

namespace stratagem {

namespace {

bool same_memory(const TensorPtr& a, const TensorPtr& b) { return first_element<>(a->view) == first_element<>(b->view); }

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
