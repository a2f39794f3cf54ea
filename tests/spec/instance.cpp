// SPDX-License-Identifier: Apache-2.0
#include "spec/instance.hpp"

#include "support/beside.hpp"

namespace stratagem::test {

namespace {

const stg_strategy_api& api_of(const std::string& strategy) {
  return strategy_api(load_plugin(beside(strategy + ".so")), strategy);
}

std::string tensor_bytes(const stg_value& value) {
  std::string bytes;
  for_each_leaf(value, [&](const KeyPath&, const stg_value& leaf) {
    if (leaf.type != STG_TENSOR) return;
    const TensorPtr copy = copy_tensor(leaf.as.tensor->view);
    bytes.append(first_element<const char>(copy->view),
                 static_cast<size_t>(numel(copy->view)) * element_size_bytes(copy->view.dtype));
  });
  return bytes;
}

}  // namespace

double StepOutcome::loss() const {
  const stg_value* loss = outputs.root().type == STG_DICT ? find(outputs.root(), "loss") : &outputs.root();
  return read_element(loss->as.tensor->view, 0);
}

LoggingHost::LoggingHost() {
  table.self = this;
  table.log = [](void* self, uint32_t level, stg_string message, const stg_tree*) {
    if (level < STG_LOG_WARNING) return;
    static_cast<LoggingHost*>(self)->messages.emplace_back(text_of(message));
  };
}

Instance::Instance(const std::string& strategy, const std::string& config, const stg_host* host, uint64_t flags)
    : Instance(api_of(strategy), config, host, flags) {}

Instance::Instance(const stg_strategy_api& table, const std::string& config, const stg_host* host, uint64_t flags) : api(table) {
  stg_create_args args = sized<stg_create_args>();
  args.config_json = to_abi(config);
  args.host = host;
  args.flags = flags;
  check(api.create(&args, &self));
}

void Instance::setup(const stg_model* model, uint64_t stage, Tree state) {
  stg_setup_args args = sized<stg_setup_args>();
  args.model = model;
  args.stage = stage;
  args.state = state.root().type == STG_NONE ? nullptr : state.argument();
  check(api.setup(self, nullptr, &args));
}

StepOutcome Instance::run_batch(Tree batch, const stg_update_args* update, uint64_t flags) {
  stg_step_args args = sized<stg_step_args>();
  args.batch = batch.argument();
  args.flags = flags;
  args.update = update;
  stg_step_result result = sized<stg_step_result>();
  StepOutcome outcome;
  check(api.train_batch(self, nullptr, &args, &result, &outcome.update));
  outcome.outputs = Tree{result.outputs};
  outcome.weights.assign(result.weights, result.weights + result.num_weights);
  return outcome;
}

StepOutcome Instance::train(Tree batch, double lr, uint64_t clip, double clip_limit) {
  stg_update_args update = sized<stg_update_args>();
  update.lr = lr;
  update.clip = clip;
  update.clip_limit = clip_limit;
  return run_batch(std::move(batch), &update, STG_BATCH_LAST_MICRO_BATCH);
}

StepOutcome Instance::accumulate(Tree batch) { return run_batch(std::move(batch), nullptr, 0); }

StepOutcome Instance::evaluate(decltype(stg_strategy_api::validation_step) function, Tree batch) {
  stg_step_args args = sized<stg_step_args>();
  args.batch = batch.argument();
  stg_step_result result = sized<stg_step_result>();
  check(function(self, nullptr, &args, &result));
  StepOutcome outcome;
  outcome.outputs = Tree{result.outputs};
  outcome.weights.assign(result.weights, result.weights + result.num_weights);
  return outcome;
}

StepOutcome Instance::training_step(Tree batch) { return evaluate(api.training_step, std::move(batch)); }

stg_update_result Instance::optimizer_step(double lr, uint64_t clip, double clip_limit) {
  stg_update_args update = sized<stg_update_args>();
  update.lr = lr;
  update.clip = clip;
  update.clip_limit = clip_limit;
  stg_update_result result = sized<stg_update_result>();
  check(api.optimizer_step(self, nullptr, &update, &result));
  return result;
}

Tree Instance::gradients() {
  stg_tree out{};
  check(api.gradients(self, nullptr, &out));
  return Tree{out};
}

Tree Instance::reduce(Tree object, uint32_t op) {
  stg_tree out{};
  check(api.reduce(self, nullptr, object.argument(), op, &out));
  return Tree{out};
}

Tree Instance::export_state(uint64_t flags) {
  stg_tree out{};
  check(api.export_state(self, nullptr, flags, &out));
  return Tree{out};
}

Tree Instance::import_state(Tree state, uint64_t flags) {
  stg_tree report{};
  check(api.import_state(self, nullptr, state.argument(), flags, &report));
  return Tree{report};
}

stg_status Instance::status() {
  stg_status status = sized<stg_status>();
  check(api.status(self, &status));
  return status;
}

std::vector<double> Instance::values(const std::string& name) {
  stg_model_description description = sized<stg_model_description>();
  check(api.describe_parameters(self, &description));
  for (uint64_t i = 0; i < description.num_parameters + description.num_buffers; ++i) {
    const stg_parameter& parameter =
        i < description.num_parameters ? *description.parameters[i] : *description.buffers[i - description.num_parameters];
    if (text_of(parameter.names[0]) != name) continue;
    stg_value value{};
    value.type = STG_TENSOR;
    value.as.tensor = parameter.tensor;
    return numbers(value);
  }
  throw not_found("no parameter ", name);
}

std::string sgd_config(size_t num_devices, const std::string& more) {
  return concat("{\"devices\": ", num_devices, R"(, "optimizer": {"name": "sgd", "lr": 1})", more, "}");
}

Tree batch_of(const std::vector<double>& values, stg_dtype dtype) {
  Dict batch;
  batch.emplace_back("x", tensor_of(values, {static_cast<int64_t>(values.size())}, dtype));
  return make_tree(std::move(batch));
}

std::vector<double> numbers(const stg_value& value) {
  if (value.type == STG_DOUBLE) return {value.as.f64};
  if (value.type == STG_INT64 || value.type == STG_BOOL) return {static_cast<double>(value.as.i64)};
  std::vector<double> out;
  for (int64_t i = 0; i < numel(value.as.tensor->view); ++i) out.push_back(read_element(value.as.tensor->view, i));
  return out;
}

std::vector<int64_t> shape(const stg_value& value) {
  const auto sizes = shape_of(value.as.tensor->view);
  return {sizes.begin(), sizes.end()};
}

std::string model_bytes(const Tree& state) { return tensor_bytes(*find(state.root(), "model")); }
std::string optimizer_bytes(const Tree& state) { return tensor_bytes(*find(state.root(), "optimizer")); }

Tree with_scaler(Tree state, double scale, int64_t good_steps) {
  Dict dict = std::get<Dict>(take(std::move(state)).data);
  Dict scaler;
  scaler.emplace_back("scale", scale);
  scaler.emplace_back("good_steps", good_steps);
  for (auto& [key, value] : dict) {
    if (key == "scaler") value = std::move(scaler);
  }
  return make_tree(std::move(dict));
}

}  // namespace stratagem::test
