// SPDX-License-Identifier: Apache-2.0
//
// How an operator is queued: its results' shapes are asked of its Meta kernel, or, where C++ has none, of a trial of the CPU's kernel on
// ones; memory for them is allocated; and a job runs the CPU's kernel over the arguments' memory and copies what comes out to the results.
//
// Operators whose results' shapes depend on values can't be queued: the host waits for the stream and runs them, as on a GPU.
#include "accelerator/emulated/fallback.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "accelerator/emulated/arguments.hpp"
#include "accelerator/emulated/generator.hpp"
#include "accelerator/emulated/plain.hpp"
#include "base/text.hpp"

namespace emulated {

using stratagem::concat;

namespace {

struct Shape {
  bool is_defined = false;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType dtype = at::kFloat;
};

// The tensors of one return value; a list has several.
struct Result {
  bool is_list = false;
  std::vector<Shape> shapes;
};

Shape shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

bool is_written(const c10::Argument& result) { return result.alias_info() != nullptr && result.alias_info()->isWrite(); }

bool is_async(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) return false;
  for (const c10::Argument& result : op.schema().returns()) {
    const c10::TypeKind kind = result.type()->kind();
    const bool is_list = kind == c10::TypeKind::ListType &&
                         result.type()->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
    if (kind != c10::TypeKind::TensorType && !is_list) return false;
  }
  return true;
}

void refuse_views(const c10::OperatorHandle& op) {
  for (const c10::Argument& result : op.schema().returns())
    TORCH_CHECK(result.alias_info() == nullptr || is_written(result), "emulated: the view ", op.schema().name(),
                " isn't emulated");
}

// The values stay alive besides: kernels with several out= arguments return references into what the dispatcher has dropped by then.
torch::jit::Stack call(const c10::OperatorHandle& op, const Values& values, std::optional<c10::DispatchKey> key = {}) {
  torch::jit::Stack stack(values.begin(), values.end());
  if (key) {
    op.redispatchBoxed(c10::DispatchKeySet(*key), &stack);
  } else {
    op.callBoxed(stack);
  }
  return stack;
}

std::vector<Result> results_of(const torch::jit::Stack& stack) {
  std::vector<Result> all;
  for (const c10::IValue& value : stack) {
    Result result{value.isTensorList(), {}};
    if (value.isTensor()) result.shapes.push_back(shape_of(value.toTensor()));
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) result.shapes.push_back(shape_of(tensor));
    all.push_back(std::move(result));
  }
  return all;
}

// ---- what comes out

struct Shapes {
  std::mutex mutex;
  std::map<std::string, std::vector<Result>> known;  // of trials
};

Shapes& shapes() {
  static auto* instance = new Shapes;
  return *instance;
}

// Nothing: the kernel doesn't take ones, so its shapes can't be told without running it.
std::optional<std::vector<Result>> try_out(const c10::OperatorHandle& op, const Arguments& arguments) {
  const std::string key = arguments.shape_key();
  {
    const std::lock_guard lock(shapes().mutex);
    if (const auto known = shapes().known.find(key); known != shapes().known.end()) return known->second;
  }
  try {
    const Values ones = arguments.like(c10::kCPU, 1);
    std::vector<Result> results = results_of(call(op, ones));
    const std::lock_guard lock(shapes().mutex);
    return shapes().known[key] = std::move(results);
  } catch (const c10::Error&) {
    return {};
  }
}

bool are_all_in_place(const c10::OperatorHandle& op) {
  for (const c10::Argument& argument : op.schema().arguments())
    if (argument.is_out()) return false;
  for (const c10::Argument& result : op.schema().returns())
    if (!is_written(result)) return false;
  return true;
}

// The generator moves on as if the kernel had run; the job gets it as it was.
std::optional<std::vector<Result>> draw(const c10::OperatorHandle& op, const Arguments& arguments,
                                        std::optional<at::Generator>& before) {
  const size_t index = *arguments.generator_index();
  const c10::IValue& given = arguments.values()[index];
  at::Generator device = given.isNone() ? default_generator(arguments.device()) : given.toGenerator();
  at::Generator cpu = cpu_generator(device);
  const std::lock_guard lock(device.mutex());
  before = cpu.clone();
  Values ones = arguments.like(c10::kCPU, 1);
  ones[index] = cpu;
  return results_of(call(op, ones));
}

std::optional<std::vector<Result>> shapes_of(const c10::OperatorHandle& op, const Arguments& arguments,
                                             std::optional<at::Generator>& generator) {
  if (arguments.generator_index()) return draw(op, arguments, generator);
  TORCH_CHECK(!op.hasTag(at::Tag::nondeterministic_seeded), "emulated: ", op.schema().name(), " takes no generator");
  if (are_all_in_place(op)) return std::vector<Result>(op.schema().returns().size());
  if (op.hasKernelForDispatchKey(c10::DispatchKey::Meta)) {
    const Values metas = arguments.like(c10::kMeta, 0);
    return results_of(call(op, metas, c10::DispatchKey::Meta));
  }
  return try_out(op, arguments);
}

// ---- the results

at::Tensor make(const Shape& shape, int device) {
  if (!shape.is_defined) return {};
  return at::empty_strided(shape.sizes, shape.strides, at::TensorOptions().dtype(shape.dtype).device(device_of(device)));
}

// An argument that is written and returned.
const c10::IValue& returned(const c10::OperatorHandle& op, const c10::Argument& result, const Arguments& arguments) {
  for (size_t i = 0; i < arguments.values().size(); ++i) {
    const c10::AliasInfo* alias = op.schema().arguments()[i].alias_info();
    if (alias != nullptr && alias->beforeSets() == result.alias_info()->beforeSets()) return arguments.values()[i];
  }
  TORCH_CHECK(false, "emulated: ", op.schema().name(), " returns an argument that its schema doesn't have");
}

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensorList()) return value.toTensorVector();
  return value.isTensor() ? std::vector{value.toTensor()} : std::vector<at::Tensor>();
}

// Device tensors for each return value. An out= argument that has another shape is resized.
torch::jit::Stack make_results(const c10::OperatorHandle& op, const Arguments& arguments, const std::vector<Result>& results) {
  torch::jit::Stack made;
  const auto& returns = op.schema().returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    if (is_written(returns[i])) {
      const c10::IValue& value = returned(op, returns[i], arguments);
      const std::vector<at::Tensor> outs = tensors_of(value);
      for (size_t k = 0; k < outs.size() && k < results[i].shapes.size(); ++k)
        if (outs[k].sizes() != results[i].shapes[k].sizes) outs[k].resize_(results[i].shapes[k].sizes);
      made.push_back(value);
    } else if (results[i].is_list) {
      c10::List<at::Tensor> list;
      for (const Shape& shape : results[i].shapes) list.push_back(make(shape, arguments.device()));
      made.emplace_back(list);
    } else {
      made.emplace_back(make(results[i].shapes.at(0), arguments.device()));
    }
  }
  return made;
}

// Whether the kernel writes its i-th return value to memory of its own, from where it is copied.
bool is_copied(const c10::OperatorHandle& op, size_t i) {
  const c10::Argument& result = op.schema().returns()[i];
  if (!is_written(result)) return true;
  for (const c10::Argument& argument : op.schema().arguments())
    if (argument.alias_info() != nullptr && argument.alias_info()->beforeSets() == result.alias_info()->beforeSets())
      return argument.is_out();
  return false;
}

struct Targets {
  std::vector<std::vector<std::optional<Plain>>> tensors;  // by return value; empty: nothing to copy

  void copy(const torch::jit::Stack& results) const {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].empty()) continue;
      const std::vector<at::Tensor> from = tensors_of(results[i]);
      for (size_t k = 0; k < tensors[i].size(); ++k)
        if (tensors[i][k]) tensors[i][k]->tensor().copy_(from.at(k));
    }
  }
};

// Where a kernel's results go, and that they are written.
Targets targets_of(const c10::OperatorHandle& op, const torch::jit::Stack& made, std::vector<Span>& spans) {
  Targets targets;
  for (size_t i = 0; i < made.size(); ++i) {
    targets.tensors.emplace_back();
    if (!is_copied(op, i)) continue;
    for (const at::Tensor& tensor : tensors_of(made[i])) {
      targets.tensors.back().push_back(tensor.defined() ? std::optional(plain(tensor)) : std::nullopt);
      if (tensor.defined()) spans.push_back(span(tensor, true));
    }
  }
  return targets;
}

std::string short_name(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return name.starts_with("aten::") ? name.substr(6) : name;
}

torch::jit::Stack queue_up(const c10::OperatorHandle& op, const Arguments& arguments, const std::vector<Result>& results,
                           const std::optional<at::Generator>& generator) {
  torch::jit::Stack made = make_results(op, arguments, results);
  std::vector<Span> spans = arguments.spans();
  Targets targets = targets_of(op, made, spans);
  Arguments::Late late = arguments.late();
  late.generator = generator;
  launch(current_queue(arguments.device()), short_name(op), spans, [op, late = std::move(late), targets = std::move(targets)] {
    const Running running;
    const Values values = late.make();
    targets.copy(call(op, values));
  });
  return made;
}

// The host waits and runs the kernel itself; its results are copied to the device.
torch::jit::Stack run_now(const c10::OperatorHandle& op, const Arguments& arguments) {
  Queue& queue = current_queue(arguments.device());
  launch(queue, short_name(op), arguments.spans(), [] {});
  wait_for(queue);
  const Values values = arguments.late().make();
  const torch::jit::Stack results = call(op, values);
  for (const c10::IValue& result : results)
    if (!result.isTensor() && !result.isTensorList()) return results;
  torch::jit::Stack made = make_results(op, arguments, results_of(results));
  std::vector<Span> spans;
  const Targets targets = targets_of(op, made, spans);
  launch(queue, short_name(op) + " (results)", spans, [targets, results] { targets.copy(results); });
  return made;
}

}  // namespace

void run_on_device(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  refuse_views(op);
  const size_t num_arguments = op.schema().arguments().size();
  const Arguments arguments(op, Values(stack.end() - num_arguments, stack.end()));
  throw_if_failed(arguments.device());
  torch::jit::drop(stack, num_arguments);
  std::optional<at::Generator> generator;
  std::optional<std::vector<Result>> results;
  if (is_async(op)) results = shapes_of(op, arguments, generator);
  torch::jit::Stack made = results ? queue_up(op, arguments, *results, generator) : run_now(op, arguments);
  for (c10::IValue& value : made) stack.push_back(std::move(value));
}

namespace {

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { run_on_device(op, *stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace

}  // namespace emulated
