// SPDX-License-Identifier: Apache-2.0
//
// Catch2 under the name that this Debian gives it: version 2 in Debian 12, version 3 in 13.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
namespace Catch {
/// As version 2 calls it.
inline auto Contains(const std::string& part) { return Matchers::ContainsSubstring(part); }
inline auto rngSeed() { return getSeed(); }
}  // namespace Catch
#else
#include <catch2/catch.hpp>
#endif
