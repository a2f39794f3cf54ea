// SPDX-License-Identifier: Apache-2.0
#include "torch/errors.hpp"

#include <c10/util/Exception.h>

#include <stdexcept>
#include <string_view>

#include "base/error.hpp"

namespace stratagem {

namespace {

// The CPU's allocator throws a plain c10::Error, which TorchScript's interpreter makes a std::runtime_error of in LibTorch 2.11.
bool is_cpu_out_of_memory(std::string_view text) { return text.find("DefaultCPUAllocator: ") != std::string_view::npos; }

uint32_t code_of(const c10::Error& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr) return STG_RESOURCE_EXHAUSTED;
  if (dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr) return STG_UNIMPLEMENTED;
  if (dynamic_cast<const c10::IndexError*>(&error) != nullptr || dynamic_cast<const c10::ValueError*>(&error) != nullptr ||
      dynamic_cast<const c10::TypeError*>(&error) != nullptr) {
    return STG_INVALID_ARGUMENT;
  }
  return is_cpu_out_of_memory(error.what_without_backtrace()) ? STG_RESOURCE_EXHAUSTED : STG_INTERNAL;
}

Error translate(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const c10::Error& error) {
    return {code_of(error), error.what_without_backtrace()};
  } catch (const std::runtime_error& error) {
    if (!is_cpu_out_of_memory(error.what())) throw;
    return {STG_RESOURCE_EXHAUSTED, error.what()};
  }
}

}  // namespace

void initialise_torch() noexcept {
  static const bool installed = [] {
    translate_foreign_exception = &translate;
    return true;
  }();
  static_cast<void>(installed);
}

}  // namespace stratagem
