// SPDX-License-Identifier: Apache-2.0
//
// What a strategy's members do when its author did not override them: what one process does, or "unimplemented".
#include "base/strategy.hpp"

#include "base/dlpack.hpp"

namespace stratagem {

namespace {

[[noreturn]] void missing(const char* function) { throw unimplemented("this strategy has no ", function); }

// An output never aliases a borrowed argument.
Tree same_object(Tree object) { return object.borrowed() ? copy_tree(object.root()) : std::move(object); }

}  // namespace

void accept_only(const nlohmann::json& config, const nlohmann::json& only) {
  for (const auto& [key, given] : config.items()) {
    if (key == "seed" || key == "threads") continue;
    if (!only.contains(key)) throw invalid_argument("config at /", key, ": unknown key");
    nlohmann::json value = given;
    if (key == "optimizer" && value.is_object()) value.erase("lr");
    if (value != only[key]) throw unimplemented("config at /", key, ": this strategy has only ", only[key].dump());
  }
}

stg_ranks Strategy::ranks() const {
  stg_ranks ranks = sized<stg_ranks>();
  ranks.world_size = 1;
  return ranks;
}

stg_model_description Strategy::describe_parameters() { missing("describe_parameters"); }
void Strategy::model_to_device(const Call&) { missing("model_to_device"); }
Tree Strategy::batch_to_device(const Call&, Tree, stg_device, int64_t) { missing("batch_to_device"); }

Tree Strategy::broadcast(const Call&, Tree object, int32_t src) {
  if (src != 0) throw invalid_argument("broadcast from rank ", src, ": this strategy runs in one process, whose rank is 0");
  return same_object(std::move(object));
}

Tree Strategy::all_gather(const Call&, Tree object) { return same_object(std::move(object)); }
Tree Strategy::reduce(const Call&, Tree, uint32_t) { missing("reduce"); }
bool Strategy::reduce_boolean_decision(const Call&, bool decision, uint32_t) { return decision; }
void Strategy::barrier(const Call&, std::string_view) {}

Tree Strategy::to_host(const Call&, Tree object) {
  for_each_leaf(std::as_const(object).root(), [](const KeyPath& path, const stg_value& leaf) {
    if (leaf.type != STG_TENSOR) return;
    check_in_host_memory(leaf.as.tensor->view, "to_host: the tensor at ", path);
  });
  return same_object(std::move(object));
}

uint64_t Strategy::announce_batch(const Call&, Tree, int64_t, uint32_t) { missing("announce_batch"); }
StepResult Strategy::training_step(const Call&, StepArgs) { missing("training_step"); }
void Strategy::backward(const Call&, uint64_t) { missing("backward"); }
UpdateResult Strategy::optimizer_step(const Call&, const stg_update_args&) { missing("optimizer_step"); }

StepResult Strategy::train_batch(const Call& call, StepArgs args, UpdateResult& update) {
  const uint64_t flags = args.flags;
  const std::optional<stg_update_args> update_args = args.update;
  StepResult result = training_step(call, std::move(args));
  backward(call, flags);
  if (update_args) update = optimizer_step(call, *update_args);
  return result;
}

void Strategy::zero_grad(const Call&) { missing("zero_grad"); }
Tree Strategy::gradients(const Call&) { missing("gradients"); }
void Strategy::parameters_changed(const Call&) { missing("parameters_changed"); }
StepResult Strategy::evaluation_step(const Call&, StepArgs, uint32_t stage) {
  missing(stage == STG_STAGE_VALIDATE ? "validation_step" : stage == STG_STAGE_TEST ? "test_step" : "predict_step");
}
void Strategy::reduce_gradients(const Call&, const std::vector<stg_gradient_set*>&, uint64_t) { missing("reduce_gradients"); }
Tree Strategy::export_state(const Call&, uint64_t) { missing("export_state"); }
ImportReport Strategy::import_state(const Call&, Tree, uint64_t) { missing("import_state"); }
void Strategy::save(const Call&, const std::string&, const std::string&) { missing("save"); }
ImportReport Strategy::load(const Call&, const std::string&, uint64_t, std::string&) { missing("load"); }

}  // namespace stratagem
