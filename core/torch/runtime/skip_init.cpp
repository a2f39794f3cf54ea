// SPDX-License-Identifier: Apache-2.0
#include "torch/runtime/skip_init.hpp"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "torch/runtime/generator_argument.hpp"

namespace stratagem {

namespace {

constexpr auto key = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

thread_local SkipInit* innermost = nullptr;

bool is_in_place(const c10::FunctionSchema& schema) {
  if (schema.arguments().empty() || schema.returns().size() != 1) return false;
  const c10::AliasInfo* written = schema.arguments().front().alias_info();
  return written != nullptr && written->isWrite() && schema.returns().front().alias_info() != nullptr;
}

// What constructors do to tensors that they have filled. Others that work in place change sizes or flags, which are needed.
bool only_writes_values(std::string_view name) {
  constexpr std::array<std::string_view, 9> names{"aten::fill_", "aten::zero_", "aten::copy_",  "aten::mul_",   "aten::add_",
                                                  "aten::sub_",  "aten::div_",  "aten::clamp_", "aten::erfinv_"};
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_over(const at::Tensor& tensor, const c10::Storage& storage) {
  return tensor.defined() && tensor.has_storage() && tensor.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
}

void handle(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto go_on = [&] { op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key), stack); };
  SkipInit* current = SkipInit::current();
  if (current == nullptr) return go_on();  // a thread that took this one's dispatch keys over
  SkipInit& scope = *current;
  const c10::FunctionSchema& schema = op.schema();
  const size_t num_arguments = schema.arguments().size();
  const bool is_random = generator_argument(schema).has_value();
  if (is_in_place(schema)) {
    const at::Tensor self = (*stack)[stack->size() - num_arguments].toTensor();
    if (is_random || (only_writes_values(schema.name()) && scope.has_skipped(self))) {
      if (is_random) scope.note_skipped(self);
      stack->resize(stack->size() - num_arguments);
      stack->emplace_back(self);
      return;
    }
  }
  go_on();
  // A factory made of an empty tensor and a fill came through here once more, with the fill.
  const bool is_skipped_factory =
      is_random && schema.returns().size() == 1 && stack->back().isTensor() && scope.has_skipped(stack->back().toTensor());
  if (is_random && !is_skipped_factory) scope.note_drawn();
}

void register_kernel() {
  // Never freed: the kernel stays for as long as the process.
  static auto& registrations = *new std::vector<c10::RegistrationHandleRAII>;
  registrations.push_back(c10::Dispatcher::singleton().registerFallback(
      key, c10::KernelFunction::makeFromBoxedFunction<&handle>(), "stratagem: no initial values"));
}

// Returns the key, once its kernel is there: an included key without one would be an error in every operator.
c10::DispatchKey registered_key() {
  static const bool once = (register_kernel(), true);
  static_cast<void>(once);
  return key;
}

}  // namespace

SkipInit::SkipInit() : included_(registered_key()) { innermost = this; }

SkipInit::~SkipInit() { innermost = nullptr; }

SkipInit* SkipInit::current() { return innermost; }

void SkipInit::note_skipped(const at::Tensor& tensor) {
  if (has_skipped(tensor)) return;
  skipped_.push_back(tensor.storage());
  skipped_.back().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "read while a model is made without initial values");
}

bool SkipInit::has_skipped(const at::Tensor& tensor) const {
  return std::any_of(skipped_.begin(), skipped_.end(), [&](const c10::Storage& own) { return is_over(tensor, own); });
}

bool SkipInit::is_covered_by(at::TensorList tensors) const {
  return !has_drawn_ && std::all_of(skipped_.begin(), skipped_.end(), [&](const c10::Storage& own) {
    const auto theirs =
        std::count_if(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) { return is_over(tensor, own); });
    return own.use_count() == static_cast<size_t>(theirs) + 1;
  });
}

}  // namespace stratagem
