// SPDX-License-Identifier: Apache-2.0
//
// The entries of a strategy, from the ABI's structs to the virtual functions of Strategy and back: life and data. Steps and state are in
// sdk_steps.cpp.
#include <thread>

#include "base/dlpack.hpp"
#include "base/json.hpp"
#include "base/sdk_entry.hpp"

namespace stratagem::sdk {

namespace entries {

// ---- life

void destroy(stg_strategy* self) {
  // In a forked child the threads to join do not exist: the memory is left to the exit of the process.
  if (self == nullptr || is_forked_child()) return;
  auto* instance = reinterpret_cast<Instance*>(self);
  // From inside a callback of the instance nobody can join it: it is kept, rather than crash the host.
  if (instance->strategy->is_own_thread()) return;
  const void* inside = nullptr;
  while (!instance->caller.compare_exchange_strong(inside, this_thread(), std::memory_order_acquire)) {
    if (inside == this_thread()) return;
    instance->strategy->abort();
    std::this_thread::yield();
    inside = nullptr;
  }
  delete instance;
}

void abort(stg_strategy* self) {
  if (self == nullptr || is_forked_child()) return;
  auto* instance = reinterpret_cast<Instance*>(self);
  instance->state.store(STG_STATE_DRAINING);
  instance->strategy->abort();
}

stg_error* status(stg_strategy* self, stg_status* out) {
  return guard([&] {
    Instance& instance = Instance::of(self);
    known_size_bytes(out, STG_STATUS_MIN_SIZE, "stg_status");
    stg_status abi = sized<stg_status>();
    instance.strategy->fill_status(abi);
    abi.state = instance.state.load();
    abi.stage = instance.stage.load();
    write_result(out, abi);
  });
}

stg_error* devices(stg_strategy* self, const stg_device** out, uint64_t* num_devices) {
  return guard([&] {
    const std::vector<stg_device>& list = Instance::of(self).strategy->devices();
    required(out, "out");
    *required(num_devices, "num_devices") = list.size();
    *out = list.data();
  });
}

stg_error* ranks(stg_strategy* self, stg_ranks* out) {
  return guard([&] {
    Instance& instance = Instance::of(self);
    known_size_bytes(out, STG_RANKS_MIN_SIZE, "stg_ranks");
    write_result(out, instance.strategy->ranks());
  });
}

stg_error* setup(stg_strategy* self, const stg_call* call, const stg_setup_args* args) {
  return guard([&] {
    const stg_setup_args abi = read_argument(args, STG_SETUP_ARGS_MIN_SIZE, "stg_setup_args");
    Tree state = Tree::receive(abi.state);
    run(self, Function::setup, [&](Entry& entry) {
      check_enumerator(abi.stage, STG_STAGE_PREDICT, "stg_setup_args.stage");
      const auto stage = static_cast<uint32_t>(abi.stage);
      if (abi.model == nullptr && abi.state != nullptr) throw invalid_argument("setup: a state without a model");
      Model model = abi.model == nullptr ? Model{} : Model{abi.model};
      const uint32_t next = !model ? STG_STATE_MODELLESS : stage == STG_STAGE_FIT ? STG_STATE_FIT : STG_STATE_EVALUATE;
      entry->setup(Call{call}, std::move(model), checked(std::move(state), "state"), stage);
      entry.instance().stage.store(stage);
      entry.move_to(next);
    });
  });
}

stg_error* teardown(stg_strategy* self, const stg_call* call) {
  return guard([&] {
    run(self, Function::teardown, [&](Entry& entry) {
      if (entry.instance().state.load() == STG_STATE_CREATED) return;
      entry->teardown(Call{call});
      entry.instance().stage.store(STG_STAGE_FIT);
      entry.move_to(STG_STATE_CREATED);
    });
  });
}

stg_error* describe_parameters(stg_strategy* self, stg_model_description* out) {
  return guard([&] {
    run(self, Function::describe_parameters, [&](Entry& entry) {
      known_size_bytes(out, STG_MODEL_DESCRIPTION_MIN_SIZE, "stg_model_description");
      write_result(out, entry->describe_parameters());
    });
  });
}

// ---- data

stg_error* model_to_device(stg_strategy* self, const stg_call* call) {
  return guard([&] { run(self, Function::model_to_device, [&](Entry& entry) { entry->model_to_device(Call{call}); }); });
}

stg_error* batch_to_device(stg_strategy* self, const stg_call* call, const stg_transfer_args* args, stg_tree* out) {
  return guard([&] {
    const stg_transfer_args abi = read_argument(args, STG_TRANSFER_ARGS_MIN_SIZE, "stg_transfer_args");
    Tree batch = Tree::receive(required(abi.batch, "stg_transfer_args.batch"));
    run(self, Function::batch_to_device, [&](Entry& entry) {
      required(out, "out");
      *out = entry->batch_to_device(Call{call}, checked(std::move(batch), "batch"), abi.device, abi.dataloader_index).give();
    });
  });
}

// A function from one tree to another.
template <class Body>
stg_error* map_tree(stg_strategy* self, Function function, stg_tree* object, stg_tree* out, Body&& body) {
  return guard([&] {
    Tree tree = Tree::receive(required(object, "object"));
    run(self, function, [&](Entry& entry) {
      required(out, "out");
      *out = body(entry, checked(std::move(tree), "object")).give();
    });
  });
}

stg_error* broadcast(stg_strategy* self, const stg_call* call, stg_tree* object, int32_t src, stg_tree* out) {
  return map_tree(self, Function::broadcast, object, out,
                  [&](Entry& entry, Tree tree) { return entry->broadcast(Call{call}, std::move(tree), src); });
}

stg_error* all_gather(stg_strategy* self, const stg_call* call, stg_tree* object, stg_tree* out) {
  return map_tree(self, Function::all_gather, object, out,
                  [&](Entry& entry, Tree tree) { return entry->all_gather(Call{call}, std::move(tree)); });
}

stg_error* reduce(stg_strategy* self, const stg_call* call, stg_tree* object, uint32_t op, stg_tree* out) {
  return map_tree(self, Function::reduce, object, out, [&](Entry& entry, Tree tree) {
    check_enumerator(op, STG_REDUCE_MAX, "op");
    return entry->reduce(Call{call}, std::move(tree), op);
  });
}

stg_error* to_host(stg_strategy* self, const stg_call* call, stg_tree* object, stg_tree* out) {
  return map_tree(self, Function::to_host, object, out,
                  [&](Entry& entry, Tree tree) { return entry->to_host(Call{call}, std::move(tree)); });
}

stg_error* reduce_boolean_decision(stg_strategy* self, const stg_call* call, uint32_t decision, uint32_t mode, uint32_t* out) {
  return guard([&] {
    run(self, Function::reduce_boolean_decision, [&](Entry& entry) {
      check_enumerator(decision, 1, "decision");
      check_enumerator(mode, STG_DECIDE_ANY, "mode");
      *required(out, "out") = entry->reduce_boolean_decision(Call{call}, decision != 0, mode) ? 1 : 0;
    });
  });
}

stg_error* barrier(stg_strategy* self, const stg_call* call, stg_string name) {
  return guard(
      [&] { run(self, Function::barrier, [&](Entry& entry) { entry->barrier(Call{call}, checked_text(name, "name")); }); });
}

stg_error* announce_batch(stg_strategy* self, const stg_call* call, const stg_transfer_args* args, uint32_t stage,
                          uint64_t* ticket) {
  return guard([&] {
    const stg_transfer_args abi = read_argument(args, STG_TRANSFER_ARGS_MIN_SIZE, "stg_transfer_args");
    Tree batch = Tree::receive(required(abi.batch, "stg_transfer_args.batch"));
    run(self, Function::announce_batch, [&](Entry& entry) {
      check_enumerator(stage, STG_STAGE_PREDICT, "stage");
      required(ticket, "ticket");
      if (batch.borrowed()) throw invalid_argument("announce_batch: the batch is borrowed; it must be moved in (have a release)");
      if (abi.device.kind != STG_DEVICE_NONE) {
        throw invalid_argument("announce_batch: the device is ", device_name(abi.device),
                               "; leave it none, a step sends each share ", "to its replica's");
      }
      *ticket = entry->announce_batch(Call{call}, checked(std::move(batch), "batch"), abi.dataloader_index, stage);
    });
  });
}

}  // namespace entries

stg_error* create_instance(Construct construct, const stg_create_args* args, stg_strategy** out) noexcept {
  return guard([&] {
    const stg_create_args abi = read_argument(args, STG_CREATE_ARGS_MIN_SIZE, "stg_create_args");
    check_flags(abi.flags, STG_CREATE_CALLER_THREAD_ONLY, "stg_create_args.flags");
    required(out, "out");
    refuse_forked_child();
    watch_forks();
    CreateArgs create_args;
    const std::string_view text = checked_text(abi.config_json, "stg_create_args.config_json");
    create_args.config = text.empty() ? nlohmann::json::object() : parse_json(text, "stg_create_args.config_json");
    if (!create_args.config.is_object())
      throw invalid_argument("stg_create_args.config_json is a JSON ", create_args.config.type_name(), "; it must be an object");
    create_args.host = Host{abi.host};
    create_args.caller_thread_only = (abi.flags & STG_CREATE_CALLER_THREAD_ONLY) != 0;
    auto instance = std::make_unique<Instance>();
    instance->caller_thread_only = create_args.caller_thread_only;
    instance->strategy = construct(create_args);
    *out = reinterpret_cast<stg_strategy*>(instance.release());
  });
}

stg_strategy_api strategy_table(decltype(stg_strategy_api::create) create) {
  stg_strategy_api api = sized<stg_strategy_api>();
  api.create = create;
#define STRATAGEM_SLOT(name, thread, states) api.name = entries::name;
  STG_STRATEGY_FUNCTIONS(STRATAGEM_SLOT)
#undef STRATAGEM_SLOT
  return api;
}

}  // namespace stratagem::sdk
