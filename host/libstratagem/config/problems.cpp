// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/config/problems.hpp"

#include "base/error.hpp"
#include "base/text.hpp"

namespace stratagem {

void Problems::add(std::string pointer, std::string text) {
  for (const Problem& known : problems_) {
    if (pointer == known.pointer || pointer.rfind(known.pointer + "/", 0) == 0) return;
  }
  problems_.push_back({std::move(pointer), std::move(text)});
}

void Problems::raise(const std::string& source, uint32_t code) const {
  if (problems_.empty()) return;
  std::string message = source + ":";
  for (const Problem& problem : problems_) {
    message += concat("\n  ", problem.pointer.empty() ? "(whole config)" : problem.pointer, ": ", problem.text);
  }
  throw Error(code, message);
}

std::string suggestion(const std::string& name, const std::vector<std::string>& candidates) {
  const std::string best = nearest(name, candidates);
  return concat(best.empty() ? "" : concat("; did you mean \"", best, "\"?"), best.empty() ? "; " : " ",
                "Available: ", join(candidates));
}

}  // namespace stratagem
