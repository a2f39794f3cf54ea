// SPDX-License-Identifier: Apache-2.0
#include "model/step.hpp"

#include <ATen/ops/isnan.h>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "model/autocast.hpp"
#include "model/scope.hpp"
#include "torch/bridge.hpp"
#include "torch/dtypes.hpp"
#include "torch/runtime/deterministic.hpp"

namespace stratagem::sdk {

namespace {

const char* step_name(uint32_t stage) {
  switch (stage) {
    case STG_STAGE_FIT:
      return "training_step";
    case STG_STAGE_VALIDATE:
      return "validation_step";
    case STG_STAGE_TEST:
      return "test_step";
    case STG_STAGE_PREDICT:
      return "predict_step";
    default:
      throw invalid_argument("stage ", stage, "; there are 0 (fit) to 3 (predict)");
  }
}

StepOutput call_step(TensorModel& model, const Batch& batch, const StepContext& context) {
  switch (context.stage) {
    case STG_STAGE_FIT:
      return model.training_step(batch, context);
    case STG_STAGE_VALIDATE:
      return model.validation_step(batch, context);
    case STG_STAGE_TEST:
      return model.test_step(batch, context);
    default:
      return model.predict_step(batch, context);
  }
}

GradientScope::Mode gradient_mode(uint32_t flags) {
  constexpr uint32_t known = STG_STEP_GRADIENT | STG_STEP_INFERENCE | STG_STEP_DETECT_ANOMALY | STG_STEP_DETERMINISTIC;
  if ((flags & ~known) != 0) throw unimplemented("step flags ", flags, "; this model knows ", known);
  if ((flags & STG_STEP_GRADIENT) != 0 && (flags & STG_STEP_INFERENCE) != 0) {
    throw invalid_argument("a step can't keep a graph (STG_STEP_GRADIENT) in inference mode (STG_STEP_INFERENCE)");
  }
  if ((flags & STG_STEP_GRADIENT) != 0) return GradientScope::Mode::record;
  return (flags & STG_STEP_INFERENCE) != 0 ? GradientScope::Mode::inference : GradientScope::Mode::no_gradient;
}

// The loss of a training step's outputs.
at::Tensor find_loss(const TensorTree& outputs) {
  const auto* loss = std::get_if<at::Tensor>(&outputs.data);
  if (const auto* dict = std::get_if<TensorTree::Dict>(&outputs.data)) {
    for (const auto& [key, value] : *dict) {
      if (key == "loss") loss = std::get_if<at::Tensor>(&value.data);
    }
  }
  if (loss == nullptr || !loss->defined()) {
    throw invalid_argument("training_step gave no loss: it must return a 0-dim tensor, or a dict with one under \"loss\"");
  }
  if (loss->dim() != 0 || !loss->is_floating_point()) {
    throw invalid_argument("training_step gave a loss that is ", dtype_name(from_scalar_type(loss->scalar_type())), " with ",
                           loss->dim(), " dimensions; it must be a 0-dim floating tensor (take its mean or sum)");
  }
  return *loss;
}

std::unique_ptr<Graph> make_graph(const TensorTree& outputs, const stg_step_context& given) {
  const at::Tensor loss = find_loss(outputs);
  if (!loss.requires_grad()) {
    throw invalid_argument("training_step gave a loss without a gradient: it was computed from no parameter that requires one");
  }
  return std::make_unique<Graph>(Graph{loss, given.flags, given.stream});
}

void refuse_nan(const TensorTree& outputs) {
  for_each_tensor(outputs, "outputs", [](const std::string& path, const at::Tensor& tensor) {
    if ((tensor.is_floating_point() || tensor.is_complex()) && at::isnan(tensor).any().item<bool>()) {
      throw Error{STG_OUT_OF_RANGE, path + " has a NaN"};
    }
  });
}

// LibTorch doesn't know read-only memory. It counts writes, though.
void refuse_writes(const ReadOnly& read_only, const char* name) {
  for (const auto& [path, tensor] : read_only) {
    if (tensor._version() != 0) throw failed_precondition(name, " wrote to batch", path, ", which is read-only; clone it first");
  }
}

void set_denominator(const TensorTree& denominator, StepResult& result) {
  if (const auto* tensor = std::get_if<at::Tensor>(&denominator.data)) {
    if (!tensor->defined() || tensor->dim() != 0)
      throw invalid_argument("the step's denominator must be a number or a 0-dim tensor");
    result.denominator_owner = to_dlpack(*tensor);
    result.denominator.type = STG_TENSOR;
    result.denominator.as.tensor = result.denominator_owner.get();
  } else if (!std::holds_alternative<std::monostate>(denominator.data)) {
    result.denominator.type = STG_DOUBLE;
    result.denominator.as.f64 = Batch(denominator, "the step's denominator").number();
  }
}

}  // namespace

StepResult run_step(ModelReplica& replica, const stg_step_context& given, Tree batch_tree) {
  const char* name = step_name(given.stage);
  const ThreadScope thread(replica.host(), replica.num_threads());
  const StreamScope stream(replica.device(), given.stream);
  const bool is_borrowed = batch_tree.borrowed();
  validate(batch_tree.root(), "batch");
  // Before inference mode: tensors made inside it could not be told from the model's own.
  ReadOnly read_only;
  const TensorTree batch = import_tree(std::move(batch_tree), replica.floating_dtype(), read_only);
  const StepContext context{replica.host(), replica.device(),  given.replica,          given.num_replicas,
                            given.stage,    given.batch_index, given.dataloader_index, given.global_step};
  std::optional<at::ScalarType> autocast_dtype;
  if (!same_dtype(given.autocast_dtype, {})) autocast_dtype = to_scalar_type(given.autocast_dtype);

  const ReplicaGenerators::Scope generators(replica.generators());
  const GradientScope gradients(gradient_mode(given.flags));
  const DeterministicScope deterministic((given.flags & STG_STEP_DETERMINISTIC) != 0);
  StepOutput output = [&] {
    const AutocastScope autocast(replica.device().type(), autocast_dtype, replica.is_alone());
    return call_step(replica.model(), Batch(batch, concat(name, ": batch")), context);
  }();

  refuse_writes(read_only, name);
  if ((given.flags & STG_STEP_DETECT_ANOMALY) != 0) refuse_nan(output.outputs);
  StepResult result;
  if ((given.flags & STG_STEP_GRADIENT) != 0) result.graph = make_graph(output.outputs, given);
  set_denominator(output.denominator, result);
  result.outputs = export_tree(output.outputs, is_borrowed ? &batch : nullptr);
  return result;
}

}  // namespace stratagem::sdk
