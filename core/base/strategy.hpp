// SPDX-License-Identifier: Apache-2.0
//
// The SDK for authors of strategies: derive from Strategy, export with one macro.
//
//   class Mine : public stratagem::Strategy { ... };
//   STRATAGEM_STRATEGY_PLUGIN("mine", "1.0.0", Mine);
//
// Mine needs a constructor Mine(const CreateArgs&) and `static StrategyInfo info()`. The SDK makes
// the function table, the probe and the ELF note; checks sizes, states (abi/stratagem/states.h), threads and fork; validates every
// tree that comes in; and turns exceptions into errors. An author throws stratagem::Error (or anything) and never sees a struct size.
//
// Functions that are not overridden answer as one process does (ranks, broadcast, all_gather, reduce_boolean_decision, to_host of host
// tensors), or STG_UNIMPLEMENTED. `save` alone has no slot then, since a host must know before it trains what it could not keep.
#pragma once

#include <stratagem/plugin.h>

#include <array>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "base/host.hpp"
#include "base/model.hpp"
#include "base/value.hpp"

namespace stratagem {

struct StrategyInfo {
  const char* summary = "";                ///< one line
  const char* options_schema = "{}";       ///< JSON Schema of "options"
  std::array<uint32_t, 4> device_kinds{};  ///< STG_DEVICE_*, filled from the front
  uint64_t capabilities = 0;               ///< STG_CAPABILITY_*
};

struct CreateArgs {
  nlohmann::json config;  ///< an object; see stg_create_args
  Host host;
  bool caller_thread_only = false;
};

/// For a strategy that has one way of doing things: refuses a config that asks for another than `only` has under the same key, by its
/// JSON pointer, and one with an unknown key. The seed, the learning rate (it comes with each update) and `threads` are anybody's.
void accept_only(const nlohmann::json& config, const nlohmann::json& only);

struct StepArgs {
  Tree batch;              ///< owned or borrowed, validated; empty with `announced`
  uint64_t announced = 0;  ///< a ticket, or 0
  int64_t batch_index = 0;
  int64_t dataloader_index = 0;
  int64_t global_step = 0;
  uint64_t flags = 0;                     ///< STG_BATCH_*
  std::optional<stg_update_args> update;  ///< train_batch of the last micro-batch
};

struct StepResult {
  Tree outputs;
  std::vector<double> weights;  ///< one per replica that ran
};

struct UpdateResult {
  uint64_t outcome = STG_UPDATE_NONE;
  double gradient_norm = std::numeric_limits<double>::quiet_NaN();
  double total_weight = 0;
  double loss_scale = 1;
};

/// What import_state and load tell. All empty: everything fitted.
struct ImportReport {
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  std::vector<std::string> unknown_keys;
};

/// A strategy instance. The SDK calls it with one caller at a time and only in the states of the table; but for `abort`, which any
/// thread may call at any time, and `devices` and `ranks`, which must be constant from construction on.
class Strategy {
 public:
  Strategy() = default;
  Strategy(const Strategy&) = delete;
  Strategy& operator=(const Strategy&) = delete;
  virtual ~Strategy() = default;

  /// The first is the root.
  virtual const std::vector<stg_device>& devices() const = 0;
  virtual stg_ranks ranks() const;
  virtual void abort() noexcept {}
  /// Whether the calling thread is one of the strategy's own: from there an instance can't be destroyed, since no thread joins itself.
  /// Any thread.
  virtual bool is_own_thread() const noexcept { return false; }

  /// `model` is empty for STG_STATE_MODELLESS. On an exception the instance must be as before.
  virtual void setup(const Call& call, Model model, Tree state, uint32_t stage) = 0;
  virtual void teardown(const Call& call) = 0;
  virtual stg_model_description describe_parameters();
  /// Filled in by the strategy: micro-batches, updates, whether a graph waits. The SDK adds state and stage. Any thread.
  virtual void fill_status(stg_status&) const {}

  virtual void model_to_device(const Call& call);
  virtual Tree batch_to_device(const Call& call, Tree batch, stg_device target, int64_t dataloader_index);
  virtual Tree broadcast(const Call& call, Tree object, int32_t src);
  virtual Tree all_gather(const Call& call, Tree object);
  virtual Tree reduce(const Call& call, Tree object, uint32_t op);
  virtual bool reduce_boolean_decision(const Call& call, bool decision, uint32_t mode);
  virtual void barrier(const Call& call, std::string_view name);
  virtual Tree to_host(const Call& call, Tree object);
  virtual uint64_t announce_batch(const Call& call, Tree batch, int64_t dataloader_index, uint32_t stage);

  virtual StepResult training_step(const Call& call, StepArgs args);
  virtual void backward(const Call& call, uint64_t flags);
  virtual UpdateResult optimizer_step(const Call& call, const stg_update_args& args);
  /// Not overridden: the three in turn.
  virtual StepResult train_batch(const Call& call, StepArgs args, UpdateResult& update);
  virtual void zero_grad(const Call& call);
  virtual Tree gradients(const Call& call);
  virtual void parameters_changed(const Call& call);
  /// validation_step, test_step and predict_step: `stage` tells which.
  virtual StepResult evaluation_step(const Call& call, StepArgs args, uint32_t stage);
  virtual void reduce_gradients(const Call& call, const std::vector<stg_gradient_set*>& sets, uint64_t op);

  virtual Tree export_state(const Call& call, uint64_t flags);
  virtual ImportReport import_state(const Call& call, Tree state, uint64_t flags);
  virtual void save(const Call& call, const std::string& path, const std::string& host_json);
  virtual ImportReport load(const Call& call, const std::string& path, uint64_t flags, std::string& host_json);
};

namespace sdk {

using Construct = std::unique_ptr<Strategy> (*)(const CreateArgs&);

/// Makes an instance: the strategy, with its state and its caller.
stg_error* create_instance(Construct construct, const stg_create_args* args, stg_strategy** out) noexcept;

/// The table but for `create`.
stg_strategy_api strategy_table(decltype(stg_strategy_api::create) create);

/// Answers a probe by the rules of plugin.h.
uint32_t answer_probe(const stg_probe_request* request, stg_probe_reply* reply, const stg_plugin& plugin) noexcept;
/// Refuses, since the plugin `name` could not make its table: the exception that is being handled says why.
uint32_t refuse_probe(stg_probe_reply* reply, const char* name) noexcept;

/// A plugin of one strategy. Static and trivially destroyed: a probe allocates nothing, and nothing of it ends before the process.
struct StrategyPlugin {
  StrategyPlugin(const char* name, const char* version, const StrategyInfo& described, decltype(stg_strategy_api::create) create,
                 bool can_save);

  StrategyInfo info;
  stg_strategy_api api;
  stg_strategy_factory factory;
  const stg_strategy_factory* factories[1];
  stg_plugin plugin;
};

template <class S>
std::unique_ptr<Strategy> construct(const CreateArgs& args) {
  return std::make_unique<S>(args);
}

template <class S>
stg_error* create(const stg_create_args* args, stg_strategy** out) {
  return create_instance(&construct<S>, args, out);
}

// An override changes the type that a member's address has.
template <class S>
constexpr bool can_save = !std::is_same_v<decltype(&S::save), decltype(&Strategy::save)>;

}  // namespace sdk
}  // namespace stratagem

#ifdef STRATAGEM_LIBTORCH_VERSION
#define STRATAGEM_NOTE_BUILT_WITH ", \"libtorch\": \"" STRATAGEM_LIBTORCH_VERSION "\""
#else
#define STRATAGEM_NOTE_BUILT_WITH ""
#endif

/// The ELF note of a plugin; `strategies` and `models` are the insides of JSON lists.
#define STRATAGEM_NOTE(name, version, strategies, models)                                                         \
  STG_PLUGIN_NOTE("{\"name\": \"" name "\", \"version\": \"" version                                              \
                  "\", \"abi\": {\"major\": 1, \"min_minor\": 0, \"max_minor\": 0}, \"strategies\": [" strategies \
                  "], \"models\": [" models "]" STRATAGEM_NOTE_BUILT_WITH "}")

/// Makes a shared library a strategy plugin. `name` and `version` are string literals; once per library, outside any namespace.
#define STRATAGEM_STRATEGY_PLUGIN(name, version, Class)                                                                  \
  STRATAGEM_NOTE(name, version, "\"" name "\"", "");                                                                     \
  extern "C" STG_EXPORT uint32_t stg_plugin_probe(const stg_probe_request* request, stg_probe_reply* reply) {            \
    try {                                                                                                                \
      static const ::stratagem::sdk::StrategyPlugin made(name, version, Class::info(), &::stratagem::sdk::create<Class>, \
                                                         ::stratagem::sdk::can_save<Class>);                             \
      return ::stratagem::sdk::answer_probe(request, reply, made.plugin);                                                \
    } catch (...) {                                                                                                      \
      return ::stratagem::sdk::refuse_probe(reply, name);                                                                \
    }                                                                                                                    \
  }                                                                                                                      \
  static_assert(STG_ABI_MAJOR == 1 && STG_ABI_MINOR == 0, "STRATAGEM_NOTE says 1.0")
