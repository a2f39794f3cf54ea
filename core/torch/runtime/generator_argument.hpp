// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/function_schema.h>

#include <optional>

namespace stratagem {

/// Which argument of an operator is the optional generator that it draws from; none: it draws nothing, or always from the default one.
inline std::optional<size_t> generator_argument(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::TypePtr& type = schema.arguments()[i].type();
    if (const auto optional = type->cast<c10::OptionalType>();
        optional != nullptr && optional->getElementType()->kind() == c10::TypeKind::GeneratorType) {
      return i;
    }
  }
  return std::nullopt;
}

}  // namespace stratagem
