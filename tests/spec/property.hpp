// SPDX-License-Identifier: Apache-2.0
//
// Cases drawn at random. One that fails is made as small as it still fails, and printed with what replays it:
//
//   property_test --rng-seed SEED     the same cases again; `--rng-seed time` for others
//   STRATAGEM_NUM_CASES=1000          more of them
#pragma once

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "base/text.hpp"
#include "support/catch.hpp"

namespace stratagem::test {

using Random = std::mt19937;
using Sizes = std::vector<int64_t>;

inline int64_t draw_between(Random& random, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
}
inline bool draw_chance(Random& random, int percent) { return draw_between(random, 1, 100) <= percent; }

inline int num_cases(int usual) {
  const char* wanted = std::getenv("STRATAGEM_NUM_CASES");
  return wanted == nullptr ? usual : std::atoi(wanted);
}

// Runs as many cases as asked for. A case has draw(random), text(), simpler() and failure(), which is empty if all is well.
template <class Case, class... Arguments>
void check_cases(int count, const Arguments&... arguments) {
  const auto seed = static_cast<unsigned>(Catch::rngSeed());
  for (int i = 0; i < count; ++i) {
    std::seed_seq seeds{seed, static_cast<unsigned>(i)};
    Random random(seeds);
    Case failing = Case::draw(random);
    if (failing.failure(arguments...).empty()) continue;
    for (bool is_smaller = true; is_smaller;) {
      is_smaller = false;
      for (Case& next : failing.simpler()) {
        if (next.failure(arguments...).empty()) continue;
        failing = std::move(next);
        is_smaller = true;
        break;
      }
    }
    FAIL("case " << i << " of --rng-seed " << seed << ", made smaller: " << failing.text() << "\n  "
                 << failing.failure(arguments...));
  }
  SUCCEED();
}

// A copy of `cases` for each part that can be left out.
template <class Case, class Part>
void leave_one_out(std::vector<Case>& out, const Case& whole, std::vector<Part> Case::*parts) {
  for (size_t i = 0; i < (whole.*parts).size(); ++i) {
    Case next = whole;
    (next.*parts).erase((next.*parts).begin() + static_cast<std::ptrdiff_t>(i));
    out.push_back(std::move(next));
  }
}

inline std::string list_text(const Sizes& sizes) {
  std::vector<std::string> words;
  for (const int64_t size : sizes) words.push_back(std::to_string(size));
  return "(" + join(words) + ")";
}

}  // namespace stratagem::test
