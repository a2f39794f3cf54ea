// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace stratagem {

/// One function object of several, for std::visit.
template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;  // Clang 16 doesn't deduce it

}  // namespace stratagem
