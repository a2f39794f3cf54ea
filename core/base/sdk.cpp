// SPDX-License-Identifier: Apache-2.0
//
// The entries of a strategy: from the ABI's structs to the virtual functions of Strategy and back. Every entry runs the same list:
// take over what was moved in (it is consumed on every return), check sizes, check who calls and in which state, validate trees, call,
// write the result.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <thread>

#include "base/dlpack.hpp"
#include "base/strategy.hpp"

namespace stratagem::sdk {

namespace {

struct FunctionRule {
  const char* name;
  uint32_t thread;
  uint32_t states;
};

enum class Function : uint32_t {
#define STRATAGEM_ENUMERATOR(name, thread, states) name,
  STG_STRATEGY_FUNCTIONS(STRATAGEM_ENUMERATOR)
#undef STRATAGEM_ENUMERATOR
};

constexpr FunctionRule rules[] = {
#define STRATAGEM_RULE(name, thread, states) {#name, thread, states},
    STG_STRATEGY_FUNCTIONS(STRATAGEM_RULE)
#undef STRATAGEM_RULE
};

// Set in a child of fork, where the replicas' threads don't exist.
std::atomic<bool> is_forked_child{false};

std::string states_text(uint32_t states) {
  std::vector<std::string> names;
  for (const auto& [bit, name] : {std::pair{STG_STATE_CREATED, "created"}, std::pair{STG_STATE_FIT, "set up for fit"},
                                  std::pair{STG_STATE_EVALUATE, "set up for evaluation"},
                                  std::pair{STG_STATE_MODELLESS, "set up without a model"}, std::pair{STG_STATE_DRAINING, "draining"}}) {
    if ((states & bit) != 0) names.emplace_back(name);
  }
  return join(names, " or ");
}

// The address of a thread-local tells threads apart for less than std::thread::id costs.
const void* this_thread() {
  thread_local char anchor;
  return &anchor;
}

struct Instance {
  std::unique_ptr<Strategy> strategy;
  std::atomic<uint32_t> state{STG_STATE_CREATED};
  std::atomic<uint32_t> stage{STG_STAGE_FIT};
  std::atomic<const void*> caller{nullptr};  // the thread inside an [owner] function; null: none
  std::vector<double> weights;               // lent by the last step's result; written inside [owner] functions only

  static Instance& of(stg_strategy* self) {
    if (self == nullptr) throw invalid_argument("the strategy instance is null");
    if (is_forked_child.load(std::memory_order_relaxed)) {
      throw failed_precondition("this process is a forked child: the instance belongs to its parent; create a new one before forking, or exec");
    }
    return *reinterpret_cast<Instance*>(self);
  }
};

// One [owner] call: refuses a second caller and the wrong state; lets go at the end.
class Entry {
 public:
  Entry(stg_strategy* self, Function function) : instance_(Instance::of(self)) {
    const FunctionRule& rule = rules[static_cast<uint32_t>(function)];
    const void* inside = nullptr;
    if (!instance_.caller.compare_exchange_strong(inside, this_thread(), std::memory_order_acquire)) {
      throw failed_precondition(rule.name, inside == this_thread() ? " was called from inside one of the instance's own callbacks"
                                                                   : " was called while another thread is inside the instance",
                                "; an instance takes one call at a time");
    }
    const uint32_t state = instance_.state.load(std::memory_order_relaxed);
    if ((rule.states & state) == 0) {
      instance_.caller.store(nullptr, std::memory_order_release);
      Error error = failed_precondition(rule.name, ": the instance is ", states_text(state), "; it must be ", states_text(rule.states));
      if (state == STG_STATE_DRAINING) error.flags = STG_ERROR_INSTANCE_DRAINING;
      throw error;
    }
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  ~Entry() { instance_.caller.store(nullptr, std::memory_order_release); }

  Strategy* operator->() const { return instance_.strategy.get(); }
  Instance& instance() const { return instance_; }

 private:
  Instance& instance_;
};

// Runs `body(entry)` as one [owner] call; an error that leaves the instance draining moves its state.
template <class Body>
void run(stg_strategy* self, Function function, Body&& body) {
  Entry entry(self, function);
  try {
    body(entry);
  } catch (const Error& error) {
    if ((error.flags & STG_ERROR_INSTANCE_DRAINING) != 0) entry.instance().state.store(STG_STATE_DRAINING);
    throw;
  }
}

template <class T>
T* required(T* pointer, const char* name) {
  if (pointer == nullptr) throw invalid_argument(name, " is null");
  return pointer;
}

std::string_view checked_text(stg_string text, const char* name) {
  if (text.data == nullptr && text.size_bytes != 0) throw invalid_argument(name, " is null with ", text.size_bytes, " bytes");
  return text_of(text);
}

void check_flags(uint64_t flags, uint64_t known, const char* name) {
  if ((flags & ~known) != 0) throw invalid_argument(name, " has the unknown bits ", flags & ~known, "; known are ", known);
}

void check_enumerator(uint64_t value, uint64_t last, const char* name) {
  if (value > last) throw invalid_argument(name, " is ", value, "; known are 0 to ", last);
}

Tree checked(Tree tree, const char* name) {
  validate(tree.root(), name);
  return tree;
}

stg_update_args checked_update(const stg_update_args* args) {
  const stg_update_args update = read_argument(args, STG_UPDATE_ARGS_MIN_SIZE, "stg_update_args");
  if (!std::isfinite(update.lr)) throw invalid_argument("stg_update_args.lr is ", update.lr, "; it must be finite");
  check_enumerator(update.clip, STG_CLIP_VALUE, "stg_update_args.clip");
  if (update.clip != STG_CLIP_NONE && !(update.clip_limit > 0)) {
    throw invalid_argument("stg_update_args.clip_limit is ", update.clip_limit, "; it must be over 0 with clipping");
  }
  return update;
}

// The moved batch is taken over even if what comes after fails; so this is the first thing that a step does.
struct RawStep {
  explicit RawStep(const stg_step_args* args) : abi(read_argument(args, STG_STEP_ARGS_MIN_SIZE, "stg_step_args")), batch(Tree::receive(abi.batch)) {}
  stg_step_args abi;
  Tree batch;
};

StepArgs step_args(RawStep raw, bool with_update) {
  StepArgs args;
  check_flags(raw.abi.flags, STG_BATCH_LAST_MICRO_BATCH | STG_BATCH_DETECT_ANOMALY, "stg_step_args.flags");
  if ((raw.abi.batch == nullptr) == (raw.abi.announced == 0)) {
    throw invalid_argument("stg_step_args needs either a batch or the ticket of an announced one");
  }
  const bool is_last = (raw.abi.flags & STG_BATCH_LAST_MICRO_BATCH) != 0;
  if (with_update && is_last) {
    args.update = checked_update(required(raw.abi.update, "stg_step_args.update (needed with STG_BATCH_LAST_MICRO_BATCH)"));
  } else if (raw.abi.update != nullptr) {
    throw invalid_argument("stg_step_args.update is for train_batch with STG_BATCH_LAST_MICRO_BATCH only; leave it null");
  }
  args.batch = checked(std::move(raw.batch), "batch");
  args.announced = raw.abi.announced;
  args.batch_index = raw.abi.batch_index;
  args.dataloader_index = raw.abi.dataloader_index;
  args.global_step = raw.abi.global_step;
  args.flags = raw.abi.flags;
  return args;
}

void write_step(Entry& entry, stg_step_result* out, StepResult result) {
  std::vector<double>& weights = entry.instance().weights;
  weights = std::move(result.weights);
  stg_step_result abi = sized<stg_step_result>();
  abi.outputs = result.outputs.give();
  abi.weights = weights.data();
  abi.num_weights = weights.size();
  write_result(out, abi);
}

void write_update(stg_update_result* out, const UpdateResult& update) {
  if (out == nullptr) return;
  stg_update_result abi = sized<stg_update_result>();
  abi.outcome = update.outcome;
  abi.gradient_norm = update.gradient_norm;
  abi.total_weight = update.total_weight;
  abi.loss_scale = update.loss_scale;
  write_result(out, abi);
}

void check_update_result(const stg_update_result* out) {
  if (out != nullptr) known_size_bytes(out, STG_UPDATE_RESULT_MIN_SIZE, "stg_update_result");
}

stg_tree report_tree(const ImportReport& report) {
  const auto names = [](const std::vector<std::string>& texts) { return List(texts.begin(), texts.end()); };
  Dict dict;
  dict.emplace_back("missing", names(report.missing));
  dict.emplace_back("unexpected", names(report.unexpected));
  dict.emplace_back("unknown_keys", names(report.unknown_keys));
  return make_tree(std::move(dict)).give();
}

// ---- life

void destroy(stg_strategy* self) {
  // In a forked child the threads to join do not exist: the memory is left to the exit of the process.
  if (self == nullptr || is_forked_child.load(std::memory_order_relaxed)) return;
  auto* instance = reinterpret_cast<Instance*>(self);
  const void* inside = nullptr;
  while (!instance->caller.compare_exchange_strong(inside, this_thread(), std::memory_order_acquire)) {
    // From inside a callback of the instance nobody can join it: it is kept, rather than crash the host.
    if (inside == this_thread()) return;
    instance->strategy->abort();
    std::this_thread::yield();
    inside = nullptr;
  }
  delete instance;
}

void abort(stg_strategy* self) {
  if (self == nullptr || is_forked_child.load(std::memory_order_relaxed)) return;
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
      entry.instance().state.store(next);
    });
  });
}

stg_error* teardown(stg_strategy* self, const stg_call* call) {
  return guard([&] {
    run(self, Function::teardown, [&](Entry& entry) {
      if (entry.instance().state.load() == STG_STATE_CREATED) return;
      entry->teardown(Call{call});
      entry.instance().stage.store(STG_STAGE_FIT);
      entry.instance().state.store(STG_STATE_CREATED);
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
  return guard([&] {
    run(self, Function::barrier, [&](Entry& entry) { entry->barrier(Call{call}, checked_text(name, "name")); });
  });
}

stg_error* announce_batch(stg_strategy* self, const stg_call* call, const stg_transfer_args* args, uint32_t stage, uint64_t* ticket) {
  return guard([&] {
    const stg_transfer_args abi = read_argument(args, STG_TRANSFER_ARGS_MIN_SIZE, "stg_transfer_args");
    Tree batch = Tree::receive(required(abi.batch, "stg_transfer_args.batch"));
    run(self, Function::announce_batch, [&](Entry& entry) {
      check_enumerator(stage, STG_STAGE_PREDICT, "stage");
      required(ticket, "ticket");
      if (batch.borrowed()) throw invalid_argument("announce_batch: the batch is borrowed; it must be moved in (have a release)");
      *ticket = entry->announce_batch(Call{call}, checked(std::move(batch), "batch"), abi.dataloader_index, stage);
    });
  });
}

// ---- steps

stg_error* training_step(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out) {
  return guard([&] {
    RawStep raw(args);
    run(self, Function::training_step, [&](Entry& entry) {
      known_size_bytes(out, STG_STEP_RESULT_MIN_SIZE, "stg_step_result");
      write_step(entry, out, entry->training_step(Call{call}, step_args(std::move(raw), false)));
    });
  });
}

stg_error* backward(stg_strategy* self, const stg_call* call, uint64_t flags) {
  return guard([&] {
    run(self, Function::backward, [&](Entry& entry) {
      check_flags(flags, STG_BATCH_LAST_MICRO_BATCH | STG_BATCH_DETECT_ANOMALY, "flags");
      entry->backward(Call{call}, flags);
    });
  });
}

stg_error* optimizer_step(stg_strategy* self, const stg_call* call, const stg_update_args* args, stg_update_result* out) {
  return guard([&] {
    run(self, Function::optimizer_step, [&](Entry& entry) {
      check_update_result(out);
      write_update(out, entry->optimizer_step(Call{call}, checked_update(args)));
    });
  });
}

stg_error* train_batch(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out,
                       stg_update_result* update) {
  return guard([&] {
    RawStep raw(args);
    run(self, Function::train_batch, [&](Entry& entry) {
      known_size_bytes(out, STG_STEP_RESULT_MIN_SIZE, "stg_step_result");
      check_update_result(update);
      UpdateResult update_result;
      StepResult result = entry->train_batch(Call{call}, step_args(std::move(raw), true), update_result);
      write_step(entry, out, std::move(result));
      write_update(update, update_result);
    });
  });
}

stg_error* zero_grad(stg_strategy* self, const stg_call* call) {
  return guard([&] { run(self, Function::zero_grad, [&](Entry& entry) { entry->zero_grad(Call{call}); }); });
}

stg_error* gradients(stg_strategy* self, const stg_call* call, stg_tree* out) {
  return guard([&] {
    run(self, Function::gradients, [&](Entry& entry) {
      required(out, "out");
      *out = entry->gradients(Call{call}).give();
    });
  });
}

stg_error* parameters_changed(stg_strategy* self, const stg_call* call) {
  return guard([&] { run(self, Function::parameters_changed, [&](Entry& entry) { entry->parameters_changed(Call{call}); }); });
}

template <Function function, uint32_t stage>
stg_error* evaluation_step(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out) {
  return guard([&] {
    RawStep raw(args);
    run(self, function, [&](Entry& entry) {
      known_size_bytes(out, STG_STEP_RESULT_MIN_SIZE, "stg_step_result");
      write_step(entry, out, entry->evaluation_step(Call{call}, step_args(std::move(raw), false), stage));
    });
  });
}

// Moved sets are released on every return.
struct GradientSets {
  std::vector<stg_gradient_set*> sets;
  ~GradientSets() {
    for (stg_gradient_set* set : sets) {
      if (set->release != nullptr) set->release(set);
    }
  }
};

stg_error* reduce_gradients(stg_strategy* self, const stg_call* call, const stg_reduce_gradients_args* args) {
  return guard([&] {
    const stg_reduce_gradients_args abi = read_argument(args, STG_REDUCE_GRADIENTS_ARGS_MIN_SIZE, "stg_reduce_gradients_args");
    if (abi.sets == nullptr && abi.num_sets != 0) throw invalid_argument("stg_reduce_gradients_args.sets is null");
    GradientSets moved;
    for (uint64_t i = 0; i < abi.num_sets; ++i) {
      const std::string name = concat("set ", i);
      read_argument(abi.sets[i], STG_GRADIENT_SET_MIN_SIZE, name.c_str());
      moved.sets.push_back(abi.sets[i]);
    }
    run(self, Function::reduce_gradients, [&](Entry& entry) {
      check_enumerator(abi.op, STG_REDUCE_SUM, "stg_reduce_gradients_args.op (mean or sum)");
      for (uint64_t i = 0; i < abi.num_sets; ++i) {
        const stg_gradient_set& set = *moved.sets[i];
        if (!std::isfinite(set.weight) || set.weight < 0) {
          throw invalid_argument("set ", i, ": the weight is ", set.weight, "; it must be finite and at least 0");
        }
        if (set.gradients == nullptr && set.num_gradients != 0) throw invalid_argument("set ", i, ": gradients is null");
        for (uint64_t g = 0; g < set.num_gradients; ++g) {
          if (set.gradients[g] != nullptr) check_tensor(*set.gradients[g], concat("set ", i, ", gradient ", g));
        }
      }
      entry->reduce_gradients(Call{call}, moved.sets, abi.op);
    });
  });
}

// ---- state

stg_error* export_state(stg_strategy* self, const stg_call* call, uint64_t flags, stg_tree* out) {
  return guard([&] {
    run(self, Function::export_state, [&](Entry& entry) {
      check_flags(flags, STG_EXPORT_COPY, "flags");
      required(out, "out");
      *out = entry->export_state(Call{call}, flags).give();
    });
  });
}

stg_error* import_state(stg_strategy* self, const stg_call* call, stg_tree* state, uint64_t flags, stg_tree* report) {
  return guard([&] {
    Tree tree = Tree::receive(required(state, "state"));
    run(self, Function::import_state, [&](Entry& entry) {
      check_flags(flags, STG_IMPORT_STRICT, "flags");
      const ImportReport told = entry->import_state(Call{call}, checked(std::move(tree), "state"), flags);
      if (report != nullptr) *report = report_tree(told);
    });
  });
}

stg_error* save(stg_strategy* self, const stg_call* call, const stg_checkpoint_args* args) {
  return guard([&] {
    run(self, Function::save, [&](Entry& entry) {
      const stg_checkpoint_args abi = read_argument(args, STG_CHECKPOINT_ARGS_MIN_SIZE, "stg_checkpoint_args");
      check_flags(abi.flags, 0, "stg_checkpoint_args.flags");
      entry->save(Call{call}, std::string(checked_text(abi.path, "stg_checkpoint_args.path")),
                  std::string(checked_text(abi.host_json, "stg_checkpoint_args.host_json")));
    });
  });
}

stg_error* load(stg_strategy* self, const stg_call* call, const stg_checkpoint_args* args, stg_tree* host_json, stg_tree* report) {
  return guard([&] {
    run(self, Function::load, [&](Entry& entry) {
      const stg_checkpoint_args abi = read_argument(args, STG_CHECKPOINT_ARGS_MIN_SIZE, "stg_checkpoint_args");
      check_flags(abi.flags, STG_IMPORT_STRICT, "stg_checkpoint_args.flags");
      std::string text;
      const ImportReport told = entry->load(Call{call}, std::string(checked_text(abi.path, "stg_checkpoint_args.path")), abi.flags, text);
      if (host_json != nullptr) *host_json = make_tree(std::move(text)).give();
      if (report != nullptr) *report = report_tree(told);
    });
  });
}

}  // namespace

stg_error* create_instance(Construct construct, const stg_create_args* args, stg_strategy** out) noexcept {
  return guard([&] {
    const stg_create_args abi = read_argument(args, STG_CREATE_ARGS_MIN_SIZE, "stg_create_args");
    check_flags(abi.flags, STG_CREATE_CALLER_THREAD_ONLY, "stg_create_args.flags");
    required(out, "out");
    static std::once_flag fork_handler;
    std::call_once(fork_handler, [] { pthread_atfork(nullptr, nullptr, [] { is_forked_child.store(true); }); });

    CreateArgs create_args;
    try {
      const std::string_view text = checked_text(abi.config_json, "stg_create_args.config_json");
      create_args.config = text.empty() ? nlohmann::json::object() : nlohmann::json::parse(text);
    } catch (const nlohmann::json::exception& error) {
      throw invalid_argument("stg_create_args.config_json is no JSON: ", error.what());
    }
    if (!create_args.config.is_object()) throw invalid_argument("stg_create_args.config_json is a JSON ", create_args.config.type_name(), "; it must be an object");
    create_args.host = Host{abi.host};
    create_args.caller_thread_only = (abi.flags & STG_CREATE_CALLER_THREAD_ONLY) != 0;
    auto instance = std::make_unique<Instance>();
    instance->strategy = construct(create_args);
    *out = reinterpret_cast<stg_strategy*>(instance.release());
  });
}

stg_strategy_api strategy_table(decltype(stg_strategy_api::create) create) {
  constexpr auto validation_step = evaluation_step<Function::validation_step, STG_STAGE_VALIDATE>;
  constexpr auto test_step = evaluation_step<Function::test_step, STG_STAGE_TEST>;
  constexpr auto predict_step = evaluation_step<Function::predict_step, STG_STAGE_PREDICT>;
  stg_strategy_api api = sized<stg_strategy_api>();
  api.create = create;
#define STRATAGEM_SLOT(name, thread, states) api.name = name;
  STG_STRATEGY_FUNCTIONS(STRATAGEM_SLOT)
#undef STRATAGEM_SLOT
  return api;
}

}  // namespace stratagem::sdk
