// SPDX-License-Identifier: Apache-2.0
//
// The parts of a step on an accelerator. What they queue is ordered by the streams of each replica's lane (accelerator/lanes.hpp); the
// host reads only what a caller asked for (the norm of a clipped gradient, whether a scaled one overflowed), when all is queued.
//
//   train_batch   each  forward | then: weights, which are the factors of the reduction
//                 each  backward; full buckets are reduced meanwhile | then: outputs gathered
//                 each  waits for the buckets | leaders  overflow, clip, update
//
// Where the optimizer is sharded, the last line has a meeting before the update, with clipping by norm or a scaled loss, and one after it.
#include "base/dlpack.hpp"
#include "strategy/device_clipping.hpp"
#include "strategy/elements.hpp"
#include "strategy/engine_step.hpp"
#include "torch/bridge.hpp"

namespace stratagem {

// Around what is queued on the calling thread outside a run.
void Engine::in_root_lane(const Call& call, const std::function<void()>& body) const {
  if (!device_) return body();
  const Lanes::Scope scope(device_->lanes, 0);
  device_->lanes.enter(call);
  try {
    body();
  } catch (...) {
    device_->lanes.leave(call);
    throw;
  }
  device_->lanes.leave(call);
}

Tree Engine::place(Step& step, size_t worker) {
  Tree share = std::move(step.shares.trees[worker]);
  const ReplicaSlot& slot = training_->replicas[worker];
  if (!device_) return share;
  // A model that moves its batches itself knows better.
  if (slot.model().model().table().transfer != nullptr) return share;
  Lanes& lanes = device_->lanes;
  if (!step.arrivals.empty()) return lanes.receive(worker, std::move(step.arrivals[worker]));
  return lanes.receive(worker, lanes.send(worker, std::move(share)));
}

// ---- weights that the host doesn't know yet

void Engine::send_device_weights(Step& step) {
  std::vector<DeviceWeights::Weight> weights;
  for (size_t i = 0; i < step.num_shares; ++i) {
    if (step.device_weights[i].defined()) {
      weights.emplace_back(step.device_weights[i]);
    } else {
      weights.emplace_back(step.scales[i]);
    }
  }
  training_->device_gradients().weights().send(weights);
}

// When all of the step is queued; where they are of no use, its update has been left out.
void Engine::settle_device_weights(const Call& call, Step& step, Update* update) {
  const Lanes::Scope scope(device_->lanes, 0);
  const std::vector<double> weights = training_->device_gradients().weights().read(call);
  step.divisor = 0;
  window_.total_weight = step.total_weight_before;
  for (size_t i = 0; i < step.num_shares; ++i) {
    training_->replicas[i].guarded("forward", [&] { check_denominator(weights[i]); });
    step.weights[i] = step.scales[i] = weights[i];
    step.divisor += weights[i];
    window_.total_weight += weights[i];
  }
  window_.divisor = step.divisor_before + step.divisor;
  if (update == nullptr) return training_->device_gradients().settle(weights);
  update->result.total_weight = window_.total_weight;
  update->is_skipped = window_.divisor == 0;
  if (update->is_skipped) update->result.outcome = STG_UPDATE_SKIPPED_NO_WEIGHT;
}

// On the root, which has taken the weights.
TensorPtr Engine::combine_device_losses(const std::vector<const stg_value*>& losses) const {
  std::vector<at::Tensor> numbers;
  for (const stg_value* loss : losses) numbers.push_back(view_tensor(*loss->as.tensor));
  return to_dlpack(weighted_mean(numbers, training_->device_gradients().weights().receive(0)));
}

// ---- the parts

void Engine::begin_device_backward(const Step& step, bool is_last) {
  DeviceGradients::Backward backward;
  backward.weights = step.scales;
  backward.weighs_on_device = step.weighs_on_device;
  const double divisor = step.weighs_on_device ? step.divisor_before : window_.divisor;
  if (is_last && window_.divisor != 0) backward.normalisation = {divisor, training_->loss_scale()};
  backward.detects_anomalies = step.detects_anomalies && !training_->scaler;
  training_->device_gradients().begin_backward(std::move(backward));
}

void Engine::backward_on_device(Step& step, size_t worker) {
  DeviceGradients& gradients = training_->device_gradients();
  ReplicaSlot& slot = training_->replicas[worker];
  gradients.take_weights(worker);
  if (worker < step.num_shares && step.scales[worker] != 0) {
    const PartScope scope(host_, "backward", worker);
    slot.guarded("backward", [&] {
      slot.backward(training_->loss_scale(), [&](uint64_t index, TensorPtr gradient, const stg_stream* stream) {
        gradients.add(worker, index, std::move(gradient), stream);
      });
    });
  } else {
    slot.drop_graph();
  }
  gradients.end_backward(worker);
}

void Engine::add_device_reduction_phase(Phases& phases) {
  phases.push_back({"reduce",
                    [this](size_t worker) {
                      if (window_.divisor != 0 && device_->lanes.is_leader(worker)) training_->device_gradients().receive(worker);
                    },
                    [this] {
                      training_->device_gradients().note_present();
                      training_->gradients->mark_complete();
                    }});
}

DeviceOptimizer::Wish Engine::wish_of(const Update& update) const { return {update.args, training_->scaler.has_value()}; }

void Engine::add_device_update_phase(Phases& phases, const UpdatePtr& update) {
  DeviceOptimizer& optimizer = training_->device_optimizer();
  optimizer.begin_update();
  const auto on_leaders = [this, update](const auto& body) {
    return [this, update, body](size_t worker) {
      if (!update->is_skipped && device_->lanes.is_leader(worker)) body(worker);
    };
  };
  if (optimizer.is_sharded() && wish_of(*update).measures()) {
    phases.push_back(
        {"measure", on_leaders([this, update, &optimizer](size_t leader) { optimizer.measure(leader, wish_of(*update)); })});
  }
  phases.push_back(
      {"update", on_leaders([this, update](size_t leader) { irrevocably([&] { update_on_device(*update, leader); }); })});
  if (optimizer.is_sharded()) {
    phases.push_back(
        {"gather", on_leaders([this, &optimizer](size_t leader) { irrevocably([&] { optimizer.receive(leader); }); })});
  }
  add_refresh_phase(phases);
}

// The other replicas of the device have ended their backward: the gathering has waited for them, or an earlier call.
void Engine::update_on_device(Update& update, size_t worker) {
  const PartScope scope(worker == 0 ? host_ : silent_host_, "update", worker);
  DeviceOptimizer::Found found = training_->device_optimizer().update(worker, wish_of(update));
  if (worker == 0) update.found = std::move(found);
}

// What the host must know of an update, when everything is queued.
void Engine::finish_device_update(const Call& call, Update& update) {
  const Lanes::Scope scope(device_->lanes, 0);
  const DeviceOptimizer::Found& found = update.found;
  if (found.overflow.defined() || found.norm.defined()) device_->lanes.await(call, 0, "the update");
  if (found.overflow.defined() && found.overflow.item<float>() != 0) {
    update.is_skipped = true;
    update.result.outcome = STG_UPDATE_SKIPPED_OVERFLOW;
  } else if (found.norm.defined()) {
    update.result.gradient_norm = found.norm.item<double>();
  }
  finish_update(update);
}

bool Engine::have_overflow_on_device(const Call& call) {
  const Lanes::Scope scope(device_->lanes, 0);
  DeviceGradients& gradients = training_->device_gradients();
  gradients.gather();
  std::vector<at::Tensor> present;
  for (size_t p = 0; p < training_->replicas.root().parameters.size(); ++p) {
    if (gradients.is_present(p)) present.push_back(gradients.gradient(0, p));
  }
  if (present.empty()) return false;
  const at::Tensor found = find_overflow(present, device_->lanes.root().device);
  device_->lanes.await(call, 0, "the look for an overflow");
  return found.item<float>() != 0;
}

// Every tensor to a replica's device, for what its lane does next and, after the call, for the caller.
Tree Engine::move_batch(const Call& call, Tree batch, size_t replica) {
  Lanes& lanes = device_->lanes;
  in_root_lane(call, [&] {
    if (batch.borrowed()) batch = copy_tree(batch.root(), &clone_tensor);
    batch = lanes.receive(replica, lanes.send(replica, std::move(batch)));
  });
  return lanes.lend(call, std::move(batch));
}

Tree Engine::to_host(const Call& call, Tree object) {
  if (!device_) return Strategy::to_host(call, std::move(object));
  in_root_lane(call, [&] {
    device_->await(call, "what is to be read");
    if (object.borrowed()) object = copy_tree(object.root(), &clone_tensor);
    for_each_leaf(object.root(), [](const KeyPath&, stg_value& leaf) {
      if (leaf.type != STG_TENSOR || is_in_host_memory(leaf.as.tensor->view.device)) return;
      TensorPtr before{std::exchange(leaf.as.tensor, copy_to_host(leaf.as.tensor->view).release())};
    });
  });
  return object;
}

}  // namespace stratagem
