// SPDX-License-Identifier: Apache-2.0
//
// Life, data and state of an instance. Its training and evaluation steps are in engine_steps.cpp.
#include "strategy/engine.hpp"

#include <ATen/Parallel.h>

#include "accelerator/accelerators.hpp"
#include "base/dlpack.hpp"
#include "strategy/checkpoint.hpp"
#include "strategy/device_reduction.hpp"
#include "strategy/gradient_sets.hpp"
#include "strategy/reduce.hpp"
#include "strategy/state.hpp"
#include "torch/errors.hpp"
#include "torch/threads.hpp"

namespace stratagem {

Engine::Engine(const CreateArgs& args, Topology topology)
    : options_(read_options(args.config, topology)),
      host_(args.host),
      gathers_outputs_(topology == Topology::data_parallel),
      on_caller_thread_(args.caller_thread_only) {
  initialise_torch();
  static std::atomic<bool> said_fallback{false};
  if (!options_.fallback.empty() && !said_fallback.exchange(true)) host_.log(STG_LOG_INFO, options_.fallback);
  if (options_.num_devices_given > options_.devices.size()) {
    host_.warn(concat("devices: ", options_.num_devices_given, " given, single_device uses the first, ",
                      device_name(options_.devices[0])));
  }
  if (options_.accelerator == nullptr) return;
  // LibTorch looks for accelerators once, at its first use.
  transport_ = &options_.accelerator->open();
}

// How announced batches set out for their devices; empty on the CPU, and for a model that moves them itself.
AnnouncedBatches::Send Engine::sender(const std::shared_ptr<DeviceTraining>& device, const Model& model) {
  if (!device || !model || model.table().transfer != nullptr) return {};
  return [lanes = &device->lanes](Shares& shares) -> std::any {
    auto arrivals = std::make_shared<std::vector<Arrival>>();
    for (size_t i = 0; i < shares.trees.size(); ++i) arrivals->push_back(lanes->send(i, std::move(shares.trees[i])));
    return arrivals;
  };
}

Engine::~Engine() {
  // Threads first: a replica may still be in the model's code.
  replace_workers(nullptr);
  drop_training();
}

void Engine::drop_training() {
  std::optional<Lanes::Scope> scope;
  if (device_) {
    device_->lanes.finish();  // what goes now is at rest
    try {
      scope.emplace(device_->lanes, 0);
    } catch (...) {  // a device that is lost can't be made current
    }
  }
  announced_.reset();
  waiting_step_.reset();
  if (training_) training_->replicas.drop_all();
  training_.reset();
  scope.reset();
  set_device(nullptr);
}

void Engine::set_device(std::shared_ptr<DeviceTraining> device) {
  const std::lock_guard lock(workers_mutex_);
  device_.swap(device);
}

void Engine::abort() noexcept {
  const std::lock_guard lock(workers_mutex_);
  if (workers_) workers_->abort();
  if (device_) device_->lanes.abort();
}

bool Engine::is_own_thread() const noexcept {
  const std::lock_guard lock(workers_mutex_);
  return workers_ && workers_->has_this_thread();
}

// Joins the old ones, without holding up an abort.
void Engine::replace_workers(std::unique_ptr<Workers> workers) {
  const std::lock_guard lock(workers_mutex_);
  workers_.swap(workers);
}

// ---- life

void Engine::setup(const Call& call, Model model, Tree state, uint32_t stage) {
  const size_t num_replicas = options_.devices.size();
  uint32_t threads = options_.num_threads;
  if (threads == 0 && num_replicas > 1) threads = static_cast<uint32_t>(at::get_num_threads());
  threads_per_replica_ = threads == 0 ? 0 : std::max<uint32_t>(1, threads / static_cast<uint32_t>(num_replicas));

  std::shared_ptr<DeviceTraining> device;
  if (transport_ != nullptr) device = std::make_shared<DeviceTraining>(call, options_, *transport_);
  std::optional<Lanes::Scope> scope;
  if (device) scope.emplace(device->lanes, 0);
  std::shared_ptr<Training> training;
  if (model) {
    const bool state_follows = state.root().type != STG_NONE;
    training = std::make_shared<Training>(model, options_, threads_per_replica_, stage == STG_STAGE_FIT, state_follows, device);
    // Weights that are almost those of the state would be worse than an error.
    if (state_follows) import_training_state(*training, state.root(), true);
  }
  // From here on each replica has a stream of its own.
  if (device) device->await(call, "setup");
  call.check("setup");
  Workers::Options workers;
  workers.num_workers = num_replicas;
  workers.on_caller_thread = on_caller_thread_;
  workers.initialise_thread = [threads_here = threads_per_replica_] { set_thread_intra_op(static_cast<int>(threads_here)); };
  const size_t num_busy =
      num_replicas * (threads_per_replica_ == 0 ? static_cast<size_t>(at::get_num_threads()) : threads_per_replica_);
  // An accelerator's replicas leave the cores alone.
  const bool has_free_core = device != nullptr || num_busy < num_usable_cores();
  auto announced = std::make_unique<AnnouncedBatches>(!on_caller_thread_ && has_free_core, last_ticket_, sender(device, model));
  replace_workers(std::make_unique<Workers>(std::move(workers)));
  announced_ = std::move(announced);
  set_device(std::move(device));
  training_ = std::move(training);
  num_updates_.store(training_ ? training_->num_updates : 0);
}

void Engine::teardown(const Call&) {
  replace_workers(nullptr);
  if (announced_) last_ticket_ = announced_->last_ticket();
  drop_training();
  window_ = {};
  num_micro_batches_ = 0;
  num_updates_ = 0;
  has_graph_ = false;
}

stg_model_description Engine::describe_parameters() { return training_->replicas.root().description; }

void Engine::fill_status(stg_status& status) const {
  status.num_micro_batches = num_micro_batches_.load();
  status.num_updates = num_updates_.load();
  status.has_graph = has_graph_.load() ? 1 : 0;
}

// ---- data

void Engine::model_to_device(const Call& call) {
  in_root_lane(call, [&] { refresh_replicas(); });
}

// From the root, on the calling thread.
void Engine::refresh_replicas() {
  Replicas& replicas = training_->replicas;
  for (size_t i = 1; i < replicas.size(); ++i) {
    replicas.copy_parameters(i);
    replicas.copy_buffers(i);
  }
}

Tree Engine::batch_to_device(const Call& call, Tree batch, stg_device target, int64_t dataloader_index) {
  size_t replica = 0;
  if (target.kind != STG_DEVICE_NONE) {
    const auto is_target = [&](stg_device device) { return device.kind == target.kind && device.index == target.index; };
    while (replica < options_.devices.size() && !is_target(options_.devices[replica])) ++replica;
    if (replica == options_.devices.size()) {
      std::vector<std::string> known;
      for (const stg_device device : options_.devices) known.push_back(device_name(device));
      throw invalid_argument("batch_to_device: ", device_name(target), " is none of this instance's devices: ", join(known));
    }
  }
  const bool moves = target.kind != STG_DEVICE_NONE || !gathers_outputs_;
  const bool has_transfer = training_ && training_->replicas[replica].model().model().table().transfer != nullptr;
  if (device_ && moves && !has_transfer) return move_batch(call, std::move(batch), replica);
  // A borrowed batch must not be aliased by what goes out.
  if (batch.borrowed()) batch = copy_tree(batch.root());
  if (!moves || !has_transfer) return batch;
  const ReplicaSlot& slot = training_->replicas[replica];
  const Model& model = slot.model().model();
  stg_tree moved{};
  slot.guarded("batch_to_device", [&] {
    check(model.table().transfer(model.self(), slot.model().get(), batch.argument(), dataloader_index, &moved));
  });
  return Tree{moved};
}

Tree Engine::reduce(const Call& call, Tree object, uint32_t op) {
  if (gathers_outputs_) {
    in_root_lane(call, [&] { object = reduce_leaves(std::move(object), op, options_.lightning); });
    return object;
  }
  return object.borrowed() ? copy_tree(object.root()) : std::move(object);
}

void Engine::barrier(const Call& call, std::string_view) {
  if (device_) device_->await(call, "the barrier");
  if (!training_) return;
  for (size_t i = 0; i < training_->replicas.size(); ++i) {
    const ReplicaSlot& slot = training_->replicas[i];
    const stg_model& table = slot.model().model().table();
    if (table.synchronize == nullptr) continue;
    slot.guarded("barrier", [&] { check(table.synchronize(slot.model().model().self(), slot.model().get())); });
  }
}

uint64_t Engine::announce_batch(const Call& call, Tree batch, int64_t dataloader_index, uint32_t stage) {
  // A model's own split runs on the root's replica, which may be busy, and may draw its numbers: only its step can do it.
  const bool has_own_split = training_->replicas.root().model().model().table().split != nullptr;
  if (device_) batch = device_->lanes.hold(&call, std::move(batch));
  return announced_->announce(std::move(batch), {stage, dataloader_index},
                              has_own_split ? std::nullopt : std::optional(split_options()));
}

void Engine::reduce_gradients(const Call& call, const std::vector<stg_gradient_set*>& sets, uint64_t op) {
  if (!device_) return reduce_gradient_sets(sets, op, options_.devices, *workers_, call);
  DeviceReduction reduction(device_->lanes, options_.buckets.compress);
  reduce_device_gradient_sets(sets, op, options_.devices, device_->lanes, reduction);
}

// ---- state

Tree Engine::export_state(const Call& call, uint64_t flags) {
  Tree state;
  in_root_lane(call, [&] {
    if (device_) device_->await(call, "the export of the state");
    state = export_training_state(training_, (flags & STG_EXPORT_COPY) != 0);
  });
  return state;
}

ImportReport Engine::import_state(const Call& call, Tree state, uint64_t flags) {
  ImportReport report;
  in_root_lane(call, [&] {
    report = import_training_state(*training_, state.root(), (flags & STG_IMPORT_STRICT) != 0);
    forget_window();
  });
  num_updates_.store(training_->num_updates);
  return report;
}

void Engine::save(const Call& call, const std::string& path, const std::string& host_json) {
  save_checkpoint(export_state(call, 0), host_, path, host_json);
}

ImportReport Engine::load(const Call& call, const std::string& path, uint64_t flags, std::string& host_json) {
  Checkpoint checkpoint = load_checkpoint(host_, path);
  ImportReport report = import_state(call, std::move(checkpoint.state), flags);
  host_json = std::move(checkpoint.host_json);
  return report;
}

}  // namespace stratagem
