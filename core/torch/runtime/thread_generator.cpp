// SPDX-License-Identifier: Apache-2.0
#include "torch/runtime/thread_generator.hpp"

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <utility>
#include <vector>

#include "torch/runtime/generator_argument.hpp"

namespace stratagem {

namespace {

constexpr auto key = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local const ThreadGenerator* innermost = nullptr;

// Where an operator will draw its numbers: on the device of its first tensor, else on the one that it is asked for, else on the CPU.
at::Device device_of(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<at::Device> asked;
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined()) return argument.toTensor().device();
    if (argument.isDevice()) asked = argument.toDevice();
  }
  return asked.value_or(at::Device(at::kCPU));
}

// The kernel for one operator.
class GiveGenerator : public c10::OperatorKernel {
 public:
  explicit GiveGenerator(size_t argument) : argument_(argument) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    const size_t num_arguments = op.schema().arguments().size();
    c10::IValue& generator = (*stack)[stack->size() - num_arguments + argument_];
    if (generator.isNone()) {
      const at::Generator* own =
          ThreadGenerator::find(device_of(c10::ArrayRef<c10::IValue>(*stack).slice(stack->size() - num_arguments)));
      if (own != nullptr) generator = *own;
    }
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key), stack);
  }

 private:
  size_t argument_;
};

void register_kernels() {
  // Never freed: the kernels stay for as long as the process.
  static auto& registrations = *new std::vector<c10::RegistrationHandleRAII>();
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  registrations.push_back(dispatcher.registerFallback(key, c10::KernelFunction::makeFallthrough(), "stratagem: no generator"));
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value() || name.name.rfind("aten::", 0) != 0) continue;
    const std::optional<size_t> argument = generator_argument(op->schema());
    if (!argument.has_value()) continue;
    auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<GiveGenerator>(*argument));
    registrations.push_back(
        dispatcher.registerImpl(name, key, std::move(kernel), std::nullopt, nullptr, "stratagem: a generator per thread"));
  }
}

// Returns the key, once the kernels are there: an included key without them would be an error in every operator.
c10::DispatchKey registered_key() {
  static const bool once = (register_kernels(), true);
  static_cast<void>(once);
  return key;
}

}  // namespace

ThreadGenerator::ThreadGenerator(at::Generator generator)
    : generator_(std::move(generator)), outer_(innermost), included_(registered_key()) {
  innermost = this;
}

ThreadGenerator::~ThreadGenerator() { innermost = outer_; }

const at::Generator* ThreadGenerator::find(at::Device device) {
  for (const ThreadGenerator* scope = innermost; scope != nullptr; scope = scope->outer_) {
    const at::Device own = scope->generator_.device();
    if (own.type() == device.type() && (own.is_cpu() || !device.has_index() || own.index() == device.index()))
      return &scope->generator_;
  }
  return nullptr;
}

}  // namespace stratagem
