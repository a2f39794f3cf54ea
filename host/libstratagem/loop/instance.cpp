// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/loop/instance.hpp"

#include <algorithm>
#include <numeric>

#include "base/dlpack.hpp"
#include "base/structs.hpp"

namespace stratagem {
namespace {

StepOutcome take_outcome(stg_step_result& result) {
  StepOutcome outcome{Tree(result.outputs), {}};
  if (result.num_weights != 0) outcome.weights.assign(result.weights, result.weights + result.num_weights);
  return outcome;
}

stg_step_args step_args(StepBatch& batch, StepPlace place) {
  auto args = sized<stg_step_args>();
  args.announced = batch.announced;
  if (batch.announced == 0) args.batch = batch.batch.argument();
  args.batch_index = place.batch_index;
  args.global_step = place.global_step;
  return args;
}

/// What a load that isn't strict has left out or found missing, each once.
std::vector<std::string> misfits_of(const stg_value& report) {
  std::vector<std::string> names;
  for (const char* kind : {"missing", "unexpected"}) {
    const stg_value* list = report.type == STG_DICT ? find(report, kind) : nullptr;
    for (uint32_t i = 0; list != nullptr && list->type == STG_LIST && i < list->count; ++i) {
      if (list->as.items[i].type == STG_STRING) names.emplace_back(text_of(list->as.items[i]));
    }
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

bool is_unimplemented(const ErrorPtr& error) { return error != nullptr && error->code == STG_UNIMPLEMENTED; }

}  // namespace

double StepOutcome::total_weight() const { return std::accumulate(weights.begin(), weights.end(), 0.0); }

template <class Function, class... Arguments>
void StrategyInstance::call(Function* function, const char* name, Arguments... arguments) const {
  if (function == nullptr) throw unimplemented("the strategy \"", name_, "\" has no function ", name);
  check(function(instance_.get(), arguments...));
}

template <class Function, class... Arguments>
void StrategyInstance::call_wanted(Function* function, const char* name, Arguments... arguments) const {
  try {
    call(function, name, arguments...);
  } catch (const Error& error) {
    if (error.code != STG_UNIMPLEMENTED || function == nullptr) throw;
    throw error.within(concat(name, " of the strategy \"", name_, "\""), error.replica, error.device);
  }
}

stg_call StrategyInstance::call_args() const {
  auto args = sized<stg_call>();
  if (cancel_ == nullptr) return args;
  if (cancel_->load() != 0) throw Error(STG_CANCELLED, "the run is cancelled");
  static_assert(sizeof *cancel_ == sizeof *args.cancel && std::atomic<uint32_t>::is_always_lock_free);
  args.cancel = reinterpret_cast<const uint32_t*>(cancel_);
  return args;
}

StrategyInstance::StrategyInstance(const stg_strategy_factory& factory, const Json& config, const stg_host* host,
                                   const std::atomic<uint32_t>* cancel, uint64_t flags)
    : name_(text_of(factory.name)),
      table_(factory.api),
      api_(read_table(factory.api, STG_STRATEGY_API_MIN_SIZE, "the strategy's table")),
      cancel_(cancel) {
  if (api_.create == nullptr || api_.destroy == nullptr) {
    throw failed_precondition("the strategy \"", name_, "\" has no create or no destroy in its table");
  }
  const std::string text = config.dump();
  auto args = sized<stg_create_args>();
  args.config_json = to_abi(text);
  args.host = host;
  args.flags = flags;
  stg_strategy* instance = nullptr;
  check(api_.create(&args, &instance));
  instance_ = std::shared_ptr<stg_strategy>(instance, api_.destroy);
}

void StrategyInstance::setup(const stg_model* model, uint64_t stage, Tree state) {
  auto args = sized<stg_setup_args>();
  args.model = model;
  if (state.root().type != STG_NONE) args.state = state.argument();
  args.stage = stage;
  const stg_call how = call_args();
  call(api_.setup, "setup", &how, &args);
}

void StrategyInstance::teardown() { call(api_.teardown, "teardown", nullptr); }

std::vector<std::string> StrategyInstance::devices() const {
  const stg_device* devices = nullptr;
  uint64_t num_devices = 0;
  call(api_.devices, "devices", &devices, &num_devices);
  std::vector<std::string> names;
  for (uint64_t i = 0; i < num_devices; ++i) {
    const bool logical_cpu = devices[i].kind == STG_DEVICE_CPU;
    names.push_back(logical_cpu ? concat("cpu:", devices[i].index) : device_name(devices[i]));
  }
  return names;
}

stg_status StrategyInstance::status() const {
  auto status = sized<stg_status>();
  if (api_.status != nullptr) call(api_.status, "status", &status);
  return status;
}

StepOutcome StrategyInstance::train(StepBatch batch, StepPlace place, const stg_update_args* update, stg_update_result& result) {
  stg_step_args args = step_args(batch, place);
  args.update = update;
  args.flags = update == nullptr ? 0 : STG_BATCH_LAST_MICRO_BATCH;
  const stg_call how = call_args();
  if (!has_train_batch_.has_value() && batch.announced == 0) {
    // Lent, not moved: a plugin that answers "unimplemented" must leave us the batch for the other way.
    Tree lent = Tree::view(batch.batch.root());
    args.batch = lent.argument();
    auto outcome = sized<stg_step_result>();
    const ErrorPtr error(api_.train_batch == nullptr ? to_abi(unimplemented("train_batch"))
                                                     : api_.train_batch(instance_.get(), &how, &args, &outcome, &result));
    has_train_batch_ = !is_unimplemented(error);
    if (*has_train_batch_) {
      check(const_cast<ErrorPtr&>(error).release());
      return take_outcome(outcome);
    }
    args.batch = batch.batch.argument();
  }
  if (!has_train_batch_.value_or(true)) return train_in_three_calls(args, update, result);
  auto outcome = sized<stg_step_result>();
  call(api_.train_batch, "train_batch", &how, &args, &outcome, &result);
  return take_outcome(outcome);
}

StepOutcome StrategyInstance::train_in_three_calls(stg_step_args args, const stg_update_args* update, stg_update_result& result) {
  args.update = nullptr;
  const stg_call how = call_args();
  auto step = sized<stg_step_result>();
  call(api_.training_step, "training_step", &how, &args, &step);
  StepOutcome outcome = take_outcome(step);
  call(api_.backward, "backward", &how, args.flags);
  if (update != nullptr) call(api_.optimizer_step, "optimizer_step", &how, update, &result);
  return outcome;
}

StepOutcome StrategyInstance::evaluate(StepBatch batch, StepPlace place, uint64_t stage) {
  const stg_step_args args = step_args(batch, place);
  const stg_call how = call_args();
  auto outcome = sized<stg_step_result>();
  if (stage == STG_STAGE_VALIDATE) {
    call_wanted(api_.validation_step, "validation_step", &how, &args, &outcome);
  } else if (stage == STG_STAGE_TEST) {
    call_wanted(api_.test_step, "test_step", &how, &args, &outcome);
  } else {
    call_wanted(api_.predict_step, "predict_step", &how, &args, &outcome);
  }
  return take_outcome(outcome);
}

bool StrategyInstance::takes_announcements() {
  if (!takes_announcements_) {
    const stg_device* devices = nullptr;
    uint64_t num_devices = 0;
    if (api_.announce_batch != nullptr) call(api_.devices, "devices", &devices, &num_devices);
    takes_announcements_ = num_devices != 0 && devices[0].kind != STG_DEVICE_CPU;
  }
  return *takes_announcements_;
}

uint64_t StrategyInstance::announce(Tree batch, uint64_t stage) {
  auto args = sized<stg_transfer_args>();
  args.batch = batch.argument();
  args.device = {STG_DEVICE_NONE, -1};
  const stg_call how = call_args();
  uint64_t ticket = 0;
  ErrorPtr error(api_.announce_batch(instance_.get(), &how, &args, static_cast<uint32_t>(stage), &ticket));
  if (is_unimplemented(error)) {
    takes_announcements_ = false;
    return 0;
  }
  check(error.release());
  return ticket;
}

Tree StrategyInstance::to_host(Tree tree) {
  const stg_call how = call_args();
  stg_tree out{};
  call(api_.to_host, "to_host", &how, tree.argument(), &out);
  return Tree(out);
}

bool StrategyInstance::decide(bool own, uint32_t mode) {
  if (api_.reduce_boolean_decision == nullptr) return own;
  const stg_call how = call_args();
  uint32_t decision = own ? 1 : 0;
  ErrorPtr error(api_.reduce_boolean_decision(instance_.get(), &how, decision, mode, &decision));
  if (is_unimplemented(error)) return own;
  check(error.release());
  return decision != 0;
}

Tree StrategyInstance::side_state() {
  if (api_.export_state == nullptr || api_.import_state == nullptr || api_.describe_parameters == nullptr) return {};
  stg_tree exported{};
  ErrorPtr error(api_.export_state(instance_.get(), nullptr, 0, &exported));
  if (is_unimplemented(error)) return {};
  check(error.release());
  const Tree whole(exported);
  auto description = sized<stg_model_description>();
  call(api_.describe_parameters, "describe_parameters", &description);
  Dict buffers;
  const stg_value* model = find(whole.root(), "model");
  for (uint64_t i = 0; i < description.num_buffers; ++i) {
    const stg_parameter& buffer = *description.buffers[i];
    // One that is not persistent is not part of a state; one that is not pinned, or read-only, can't be written.
    const std::string name(text_of(buffer.names[0]));
    const stg_value* value = model == nullptr ? nullptr : find(*model, name);
    const bool is_writable = (buffer.flags & STG_PARAMETER_PINNED) != 0 && (buffer.tensor->flags & STG_TENSOR_READ_ONLY) == 0;
    if (is_writable && value != nullptr && value->type == STG_TENSOR)
      buffers.emplace_back(name, copy_tensor(value->as.tensor->view));
  }
  List generators;
  const stg_value* given = find(whole.root(), "generators");
  for (uint32_t i = 0; given != nullptr && given->type == STG_LIST && i < given->count; ++i) {
    const stg_value& generator = given->as.items[i];
    generators.emplace_back(Bytes{{generator.as.bytes, generator.as.bytes + generator.count}});
  }
  Dict state;
  state.emplace_back("format", int64_t{STG_STATE_FORMAT});
  state.emplace_back("model", std::move(buffers));
  state.emplace_back("generators", std::move(generators));
  return make_tree(std::move(state));
}

bool StrategyInstance::put_back(Tree side_state) {
  if (side_state.root().type == STG_NONE) return false;
  ErrorPtr error(api_.import_state(instance_.get(), nullptr, side_state.argument(), 0, nullptr));
  if (is_unimplemented(error)) return false;
  check(error.release());
  return true;
}

Tree StrategyInstance::export_state(uint64_t flags) {
  stg_tree state{};
  call(api_.export_state, "export_state", nullptr, flags, &state);
  return Tree(state);
}

void StrategyInstance::save(const std::string& folder, const Json& host_state) {
  const std::string text = host_state.dump();
  auto args = sized<stg_checkpoint_args>();
  args.path = to_abi(folder);
  args.host_json = to_abi(text);
  call_wanted(api_.save, "save", nullptr, &args);
}

Json StrategyInstance::load(const std::string& folder, std::vector<std::string>& misfits) {
  auto args = sized<stg_checkpoint_args>();
  args.path = to_abi(folder);
  args.flags = STG_IMPORT_STRICT;
  stg_tree text{};
  try {
    call_wanted(api_.load, "load", nullptr, &args, &text, nullptr);
  } catch (const Error& refusal) {
    if (refusal.code != STG_INVALID_ARGUMENT) throw;
    args.flags = 0;
    stg_tree report{};
    call_wanted(api_.load, "load", nullptr, &args, &text, &report);
    misfits = misfits_of(Tree(report).root());
    const auto is_optimizers = [](const std::string& name) { return name == "optimizer" || name.starts_with("optimizer."); };
    if (misfits.empty() || !std::all_of(misfits.begin(), misfits.end(), is_optimizers)) {
      const Tree unused(text);
      throw;
    }
  }
  const Tree owned(text);
  if (owned.root().type != STG_STRING || owned.root().count == 0) return nullptr;
  try {
    return Json::parse(text_of(owned.root()));
  } catch (const Json::exception& error) {
    throw data_loss(folder, ": the loop's state in it is not JSON: ", error.what());
  }
}

}  // namespace stratagem
