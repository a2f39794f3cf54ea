// SPDX-License-Identifier: Apache-2.0
#include "torch/errors.hpp"

#include <c10/util/Exception.h>

#include <string_view>

#include "base/error.hpp"

namespace stratagem {

namespace {

uint32_t code_of(const c10::Error& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr) return STG_RESOURCE_EXHAUSTED;
  if (dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr) return STG_UNIMPLEMENTED;
  if (dynamic_cast<const c10::IndexError*>(&error) != nullptr || dynamic_cast<const c10::ValueError*>(&error) != nullptr ||
      dynamic_cast<const c10::TypeError*>(&error) != nullptr) {
    return STG_INVALID_ARGUMENT;
  }
  // The CPU's allocator throws a plain c10::Error.
  if (std::string_view(error.what_without_backtrace()).find("DefaultCPUAllocator: ") != std::string_view::npos) {
    return STG_RESOURCE_EXHAUSTED;
  }
  return STG_INTERNAL;
}

Error translate(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const c10::Error& error) {
    return {code_of(error), error.what_without_backtrace()};
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
