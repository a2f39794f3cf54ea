// SPDX-License-Identifier: Apache-2.0
//
// A table whose rows a batch looks up: "table", (rows, columns), with gradients that are sparse, dense or none at all, as a test says.
#pragma once

#include <cmath>

#include "spec/instance.hpp"

namespace stratagem::test {

enum class Kind { sparse, dense, none };

struct TableOptions {
  int64_t num_rows = 40;
  int64_t num_columns = 5;
  stg_dtype dtype = float32;
  /// What the gradient of this share is.
  std::function<Kind(const stg_step_context&)> kind = [](const stg_step_context&) { return Kind::sparse; };
};

inline std::function<Kind(const stg_step_context&)> always(Kind kind) {
  return [kind](const stg_step_context&) { return kind; };
}

/// In row x of the table the loss of the sample x has this gradient.
inline double table_gradient(double x, int64_t column) { return std::sin(0.7 * x + static_cast<double>(column)); }

inline ToySparse sparse_rows(const std::vector<double>& rows, const std::vector<double>& values, std::vector<int64_t> shape,
                             stg_dtype dtype = float32) {
  const auto count = static_cast<int64_t>(rows.size());
  return {tensor_of(rows, {1, count}, int64), tensor_of(values, {count, shape[1]}, dtype), shape};
}

inline std::unique_ptr<ToyModel> table_model(const TableOptions& options) {
  const auto numel = static_cast<size_t>(options.num_rows * options.num_columns);
  ToyParameter table{{"table"}, {options.num_rows, options.num_columns}, {}};
  if (numel < 1000000) table.values.assign(numel, 1);  // else all 0
  table.dtype = options.dtype;
  return std::make_unique<ToyModel>(
      std::vector<ToyParameter>{table}, [options, numel](ToyReplica&, const stg_step_context& context, const stg_value& batch) {
        const Kind kind = options.kind(context);
        const int64_t count = num_rows(batch, "x");
        std::vector<double> rows, values;
        std::vector<double> dense(kind == Kind::dense ? numel : 0);
        for (int64_t i = 0; i < count; ++i) {
          rows.push_back(element(batch, "x", i));
          for (int64_t c = 0; c < options.num_columns; ++c) {
            values.push_back(
                read_element(scalar(table_gradient(rows.back(), c) / static_cast<double>(count), options.dtype)->view, 0));
            if (kind == Kind::dense)
              dense[static_cast<size_t>(static_cast<int64_t>(rows.back()) * options.num_columns + c)] += values.back();
          }
        }
        ToyStep step;
        step.outputs = scalar(0);
        step.gradients = {dense};
        if (kind == Kind::sparse)
          step.sparse_gradients[0] = sparse_rows(rows, values, {options.num_rows, options.num_columns}, options.dtype);
        return step;
      });
}

}  // namespace stratagem::test
