// SPDX-License-Identifier: Apache-2.0
//
// What is wrong with a config. Checks add to one list, so that a user sees all of it at once.
#pragma once

#include <stratagem/error.h>

#include <string>
#include <vector>

#include "libstratagem/config/json_text.hpp"

namespace stratagem {

struct Problem {
  std::string pointer;  // where, as a JSON pointer; "" is the whole config
  std::string text;     // the value, what is wrong with it, and what would be right
};

class Problems {
 public:
  /// Does nothing where the same place, or one above it, is known to be wrong already.
  void add(std::string pointer, std::string text);
  bool empty() const { return problems_.empty(); }
  const std::vector<Problem>& all() const { return problems_; }
  /// Throws Error{code} that lists all, if there are any. `source` names the config.
  void raise(const std::string& source, uint32_t code = STG_INVALID_ARGUMENT) const;

 private:
  std::vector<Problem> problems_;
};

/// `did you mean "x"?` or nothing; then "Available: ...".
std::string suggestion(const std::string& name, const std::vector<std::string>& candidates);

/// Checks `value`, which stands at `pointer` of the config, against a JSON Schema (draft 7). `owner` names whose schema it is.
void check_schema(const Json& schema, const Json& value, const std::string& pointer, const std::string& owner,
                  Problems& problems);

}  // namespace stratagem
