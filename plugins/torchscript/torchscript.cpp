// SPDX-License-Identifier: Apache-2.0
//
// A TorchScript file as a model. Each replica loads the file for itself (a copy of a loaded module has parameters that autograd takes for
// results). A step is
//   the module's own method of that name (training_step, validation_step, test_step, predict_step), where it has one: it takes the batch as
//       a Dict[str, Tensor], or the inputs, or inputs and targets, and gives a loss or a Dict[str, Tensor] with one
//   else forward(inputs), and the loss that the options name between that and the targets; predict_step needs none
//
// The graph executor does not specialise: a module that it had seen run would compute other bits than one that was just loaded, and a
// resumed run would differ from an unbroken one.
#include <ATen/ops/binary_cross_entropy_with_logits.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/l1_loss.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/nll_loss.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>

#include "base/error.hpp"
#include "model/tensor_model.hpp"

namespace {

using stratagem::Batch;
using stratagem::concat;
using stratagem::invalid_argument;
using stratagem::StepContext;
using stratagem::StepOutput;
using stratagem::TensorTree;

// PyTorch would broadcast: 8 predictions of shape (8, 1) against 8 targets of shape (8) make 64 differences.
void check_same_shape(const char* loss, const at::Tensor& predicted, const at::Tensor& targets) {
  if (predicted.sizes() == targets.sizes()) return;
  const bool is_one_column = predicted.numel() == targets.numel();
  throw invalid_argument(loss, " compares element by element, and forward gives ", c10::str(predicted.sizes()),
                         " for targets of ", c10::str(targets.sizes()), "; the shapes must be equal: ",
                         is_one_column ? "let forward end in .reshape(...) or .squeeze(1), or store the targets in its shape"
                                       : "let forward give one prediction for each target");
}

struct Loss {
  const char* name;
  at::Tensor (*of)(const at::Tensor& predicted, const at::Tensor& targets);
  bool has_classes;  // the largest of a row's outputs is the prediction
};

constexpr Loss losses[] = {
    {"cross_entropy", [](const at::Tensor& p, const at::Tensor& t) { return at::cross_entropy_loss(p, t); }, true},
    {"nll_loss", [](const at::Tensor& p, const at::Tensor& t) { return at::nll_loss(p, t); }, true},
    {"mse_loss", [](const at::Tensor& p, const at::Tensor& t) { return at::mse_loss(p, t); }, false},
    {"l1_loss", [](const at::Tensor& p, const at::Tensor& t) { return at::l1_loss(p, t); }, false},
    {"binary_cross_entropy_with_logits",
     [](const at::Tensor& p, const at::Tensor& t) { return at::binary_cross_entropy_with_logits(p, t); }, false},
};

const Loss* loss_of(const nlohmann::json& options) {
  const std::string name = options.value("loss", "");
  for (const Loss& loss : losses) {
    if (name == loss.name) return &loss;
  }
  return nullptr;
}

torch::jit::Module load(const std::string& path) {
  try {
    return torch::jit::load(path, at::kCPU);
  } catch (const c10::Error& error) {
    throw invalid_argument(path, " can't be loaded as TorchScript: ", error.what_without_backtrace());
  }
}

TensorTree tree_of(const c10::IValue& value, const std::string& method) {
  if (value.isTensor()) return value.toTensor();
  if (value.isDouble()) return value.toDouble();
  if (value.isInt()) return value.toInt();
  if (value.isBool()) return value.toBool();
  if (value.isString()) return value.toStringRef();
  if (value.isNone()) return {};
  if (value.isTuple()) {
    TensorTree::Tuple tuple;
    for (const c10::IValue& item : value.toTupleRef().elements()) tuple.items.push_back(tree_of(item, method));
    return tuple;
  }
  if (value.isList()) {
    TensorTree::List list;
    for (const c10::IValue& item : value.toListRef()) list.push_back(tree_of(item, method));
    return list;
  }
  if (value.isGenericDict()) {
    TensorTree::Dict dict;
    for (const auto& entry : value.toGenericDict()) {
      if (!entry.key().isString()) throw invalid_argument(method, " gives a dict with a key that is no text");
      dict.emplace_back(entry.key().toStringRef(), tree_of(entry.value(), method));
    }
    return dict;
  }
  throw invalid_argument(method, " gives a ", value.tagKind(),
                         "; tensors, numbers, texts, and tuples, lists and dicts of them are known");
}

class TorchScriptModel : public stratagem::TensorModel {
 public:
  explicit TorchScriptModel(const nlohmann::json& options)
      : module_(load(options.at("path").get<std::string>())),
        loss_(loss_of(options)),
        loss_is_sum_(options.value("loss_is_sum", false)) {
    if (module_.named_parameters().size() == 0)
      throw invalid_argument(options.at("path").get<std::string>(), " has no parameters (was the module frozen?)");
    if (loss_ == nullptr && !module_.find_method("training_step")) {
      throw invalid_argument(
          "the module has no method training_step; name a loss between forward(inputs) and the targets, as in ",
          R"({"loss": "cross_entropy"})");
    }
  }

  static stratagem::ModelInfo info() {
    return {"a TorchScript file", R"json({
  "type": "object",
  "required": ["path"],
  "additionalProperties": false,
  "properties": {
    "path": {"description": "the file", "type": "string", "minLength": 1},
    "loss": {
      "description": "between forward(inputs) and the targets, where the module has no training_step",
      "enum": ["cross_entropy", "nll_loss", "mse_loss", "l1_loss", "binary_cross_entropy_with_logits"]
    },
    "loss_is_sum": {"description": "the module's training_step gives a sum over the rows, not their mean", "type": "boolean", "default": false}
  }
})json"};
  }

  uint64_t loss_kind() const override { return loss_is_sum_ ? STG_LOSS_SUM : STG_LOSS_MEAN; }

  void set_training(bool training) override {
    TensorModel::set_training(training);
    module_.train(training);
  }

  std::vector<stratagem::NamedTensor> named_tensors() const override {
    std::vector<stratagem::NamedTensor> all;
    for (const auto& [name, tensor] : module_.named_parameters()) all.push_back({name, tensor, true});
    for (const auto& [name, tensor] : module_.named_buffers()) all.push_back({name, tensor, false});
    return all;
  }

  StepOutput training_step(const Batch& batch, const StepContext&) override {
    if (const auto method = module_.find_method("training_step")) return {run(*method, batch)};
    return loss(forward(batch), targets(batch));
  }
  StepOutput validation_step(const Batch& batch, const StepContext&) override { return evaluate("validation_step", batch); }
  StepOutput test_step(const Batch& batch, const StepContext&) override {
    return evaluate(module_.find_method("test_step") ? "test_step" : "validation_step", batch);
  }
  StepOutput predict_step(const Batch& batch, const StepContext&) override {
    if (const auto method = module_.find_method("predict_step")) return {run(*method, batch)};
    return forward(batch);
  }

 private:
  static at::Tensor targets(const Batch& batch) { return batch["targets"].tensor(); }

  at::Tensor forward(const Batch& batch) {
    const c10::IValue result = call(module_.get_method("forward"), {batch["inputs"].tensor()});
    if (!result.isTensor()) throw invalid_argument("forward gives a ", result.tagKind(), "; a tensor is needed for the loss");
    return result.toTensor();
  }

  at::Tensor loss(const at::Tensor& predicted, const at::Tensor& targets) const {
    if (!loss_->has_classes) check_same_shape(loss_->name, predicted, targets);
    return loss_->of(predicted, targets);
  }

  StepOutput evaluate(const std::string& stage, const Batch& batch) {
    if (const auto method = module_.find_method(stage)) return {run(*method, batch)};
    if (loss_ == nullptr) {
      throw invalid_argument("the module has neither a method ", stage,
                             " nor, in the options, a loss between forward(inputs) and the targets");
    }
    const at::Tensor predicted = forward(batch);
    const at::Tensor value = loss(predicted, targets(batch));
    if (!loss_->has_classes) return {{"loss", value}};
    at::Tensor labels = targets(batch);
    if (labels.sizes() == predicted.sizes()) labels = labels.argmax(1);  // cross_entropy takes a probability for each class, too
    return {{"loss", value}, {"accuracy", predicted.argmax(1).eq(labels).to(value.scalar_type()).mean()}};
  }

  TensorTree run(const torch::jit::Method& method, const Batch& batch) {
    const auto& arguments = method.function().getSchema().arguments();  // the first is the module
    const bool takes_dict = arguments.size() == 2 && arguments[1].type()->kind() == c10::TypeKind::DictType;
    std::vector<c10::IValue> values;
    if (takes_dict) {
      c10::Dict<std::string, at::Tensor> dict;
      for (const auto& [key, value] : std::get<TensorTree::Dict>(batch.tree().data)) {
        if (const auto* tensor = std::get_if<at::Tensor>(&value.data)) dict.insert(key, *tensor);
      }
      values.emplace_back(dict);
    } else if (arguments.size() == 2 || arguments.size() == 3) {
      values.emplace_back(batch["inputs"].tensor());
      if (arguments.size() == 3) values.emplace_back(targets(batch));
    } else {
      throw invalid_argument(method.name(), " takes ", arguments.size() - 1,
                             " arguments; known are (batch: Dict[str, Tensor]), (inputs) and (inputs, targets)");
    }
    return tree_of(call(method, std::move(values)), method.name());
  }

  static c10::IValue call(const torch::jit::Method& method, std::vector<c10::IValue> arguments) {
    const torch::jit::GraphOptimizerEnabledGuard no_specialising(false);
    return method(std::move(arguments));
  }

  torch::jit::Module module_;
  const Loss* loss_;
  bool loss_is_sum_;
};

}  // namespace

STRATAGEM_MODEL_PLUGIN("torchscript", "1.0.0", TorchScriptModel);
