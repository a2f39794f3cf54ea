// SPDX-License-Identifier: Apache-2.0
//
// Sparse gradients: of an embedding, the rows that a batch has looked up. Kept coalesced, each row once and in ascending order, so that
// sums don't depend on who makes them. Each element of a sum has the operands of the dense sum in the same order, without its zeros.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/dlpack.hpp"
#include "base/model.hpp"

namespace stratagem {

/// Rows of a parameter that lies row-major: slices under its leading dimensions, numbered row-major.
struct SparseRows {
  std::vector<int64_t> rows;  ///< ascending, each once
  int64_t num_sparse_dims = 0;
  TensorPtr values;  ///< (number of rows, the other dimensions), row-major

  int64_t num_rows() const { return static_cast<int64_t>(rows.size()); }
  /// Elements of a row; complex ones count twice.
  int64_t row_numel() const;
};

/// Checks what a model gave for the parameter `name`, and coalesces it.
SparseRows read_sparse(const SparseGradient& gradient, const std::string& name, const stg_tensor_view& parameter);

/// The union of rows; common ones are a + b. Both have the same number of sparse dimensions.
SparseRows add_sparse(const SparseRows& a, const SparseRows& b);

/// Room for the values of `num_rows` rows like those in `like`.
TensorPtr allocate_rows(int64_t num_rows, const stg_tensor_view& like);

/// dense += rows. `dense` is row-major.
void add_sparse_to(const stg_tensor_view& dense, const SparseRows& rows);

}  // namespace stratagem
