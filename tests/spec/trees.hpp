// SPDX-License-Identifier: Apache-2.0
//
// Trees written down in a test.
#pragma once

#include <string>
#include <utility>

#include "spec/toy_model.hpp"

namespace stratagem::test {

template <class... Entries>
Dict dict_of(Entries... entries) {
  Dict dict;
  (dict.push_back(std::move(entries)), ...);
  return dict;
}

inline std::pair<std::string, Value> entry(const char* key, Value value) { return {key, std::move(value)}; }

template <class... Items>
Tuple tuple_of(Items... items) {
  return Tuple{make_list(std::move(items)...)};
}

// 0, 1, 2, ... in the first column, the rest of a row likewise, a hundred further each.
inline TensorPtr rows(int64_t num_rows, int64_t num_columns = 1, stg_dtype dtype = float32) {
  std::vector<double> values;
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int64_t j = 0; j < num_columns; ++j) values.push_back(static_cast<double>(i + 100 * j));
  }
  return tensor_of(values, {num_rows, num_columns}, dtype);
}

}  // namespace stratagem::test
