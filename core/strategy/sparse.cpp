// SPDX-License-Identifier: Apache-2.0
#include "strategy/sparse.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <numeric>

#include "base/error.hpp"
#include "strategy/gradients.hpp"

namespace stratagem {

namespace {

class Reader {
 public:
  Reader(const SparseGradient& gradient, const std::string& name, const stg_tensor_view& parameter)
      : gradient_(gradient), name_(name), parameter_(parameter) {}

  void check() const {
    check_shape();
    check_indices();
    check_values();
  }

  int64_t num_sparse_dims() const { return gradient_.indices->view.shape[0]; }

  // The number of the row that each column of the indices names.
  std::vector<int64_t> row_numbers() const {
    const TensorPtr indices = copy_tensor(gradient_.indices->view);
    const int64_t count = indices->view.shape[1];
    std::vector<int64_t> numbers(static_cast<size_t>(count), 0);
    for (int64_t d = 0; d < num_sparse_dims(); ++d) {
      const int64_t size = parameter_.shape[d];
      const int64_t* of_dim = first_element<const int64_t>(indices->view) + d * count;
      for (int64_t i = 0; i < count; ++i) {
        if (of_dim[i] < 0 || of_dim[i] >= size) {
          refuse("has the index ", of_dim[i], " in dimension ", d, " (entry ", i, "); the parameter is ", shape_text(parameter_));
        }
        numbers[static_cast<size_t>(i)] = numbers[static_cast<size_t>(i)] * size + of_dim[i];
      }
    }
    return numbers;
  }

 private:
  template <class... Why>
  [[noreturn]] void refuse(const Why&... why) const {
    throw invalid_argument("the sparse gradient of ", name_, " ", why...);
  }

  void check_shape() const {
    if (gradient_.indices == nullptr || gradient_.values == nullptr) {
      refuse("has no ", gradient_.indices == nullptr ? "indices" : "values",
             "; a parameter without a gradient is reported by ready");
    }
    if (gradient_.num_dims != static_cast<uint64_t>(parameter_.num_dims)) {
      refuse("has ", gradient_.num_dims, " dimensions; the parameter is ", shape_text(parameter_));
    }
    if (gradient_.num_dims != 0 && gradient_.shape == nullptr) refuse("has a null shape");
    const std::vector<int64_t> shape(gradient_.shape, gradient_.shape + gradient_.num_dims);
    if (!std::ranges::equal(shape, shape_of(parameter_))) {
      refuse("is ", join_shape(shape), "; the parameter is ", shape_text(parameter_));
    }
  }

  void check_indices() const {
    const stg_tensor_view& indices = gradient_.indices->view;
    check_in_host_memory(indices, "the indices of the sparse gradient of ", name_);
    if (!same_dtype(indices.dtype, int64)) refuse("has ", dtype_name(indices.dtype), " indices; they must be int64");
    if (indices.num_dims != 2 || indices.shape[0] > parameter_.num_dims) {
      refuse("has indices of the shape ", shape_text(indices), "; they must be (sparse dimensions, entries), with at most ",
             parameter_.num_dims, " sparse dimensions");
    }
  }

  void check_values() const {
    const stg_tensor_view& values = gradient_.values->view;
    check_in_host_memory(values, "the values of the sparse gradient of ", name_);
    if (!same_dtype(values.dtype, parameter_.dtype)) {
      refuse("has ", dtype_name(values.dtype), " values; the parameter is ", dtype_name(parameter_.dtype));
    }
    std::vector<int64_t> expected{gradient_.indices->view.shape[1]};
    expected.insert(expected.end(), parameter_.shape + num_sparse_dims(), parameter_.shape + parameter_.num_dims);
    if (!std::ranges::equal(expected, shape_of(values))) {
      refuse("has values of the shape ", shape_text(values), "; with indices of the shape ", shape_text(gradient_.indices->view),
             " they must be ", join_shape(expected));
    }
  }

  static std::string join_shape(std::vector<int64_t> shape) {
    stg_tensor_view view{};
    view.num_dims = static_cast<int32_t>(shape.size());
    view.shape = shape.data();
    return shape_text(view);
  }

  const SparseGradient& gradient_;
  const std::string& name_;
  const stg_tensor_view& parameter_;
};

// The rows of a tensor, by their place in it.
struct RowMemory {
  explicit RowMemory(const stg_tensor_view& view)
      : data(first_element<char>(view)),
        numel(std::accumulate(view.shape + 1, view.shape + view.num_dims, int64_t{view.dtype.code == STG_DTYPE_COMPLEX ? 2 : 1},
                              std::multiplies<>())),
        size_bytes(static_cast<size_t>(numel) * element_size_bytes(view.dtype) / (view.dtype.code == STG_DTYPE_COMPLEX ? 2 : 1)) {
  }
  char* operator[](size_t row) const { return data + row * size_bytes; }

  char* data;
  int64_t numel;
  size_t size_bytes;
};

}  // namespace

TensorPtr allocate_rows(int64_t num_rows, const stg_tensor_view& like) {
  std::vector<int64_t> shape(like.shape, like.shape + like.num_dims);
  shape[0] = num_rows;
  return allocate_tensor(like.dtype, std::move(shape));
}

int64_t SparseRows::row_numel() const { return RowMemory(values->view).numel; }

SparseRows read_sparse(const SparseGradient& gradient, const std::string& name, const stg_tensor_view& parameter) {
  const Reader reader(gradient, name, parameter);
  reader.check();
  const std::vector<int64_t> numbers = reader.row_numbers();
  std::vector<size_t> order(numbers.size());
  std::iota(order.begin(), order.end(), size_t{0});
  // Stable: a row that stands several times is summed in the order of its entries.
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return numbers[a] < numbers[b]; });

  SparseRows result{{}, reader.num_sparse_dims(), nullptr};
  for (const size_t entry : order) {
    if (result.rows.empty() || result.rows.back() != numbers[entry]) result.rows.push_back(numbers[entry]);
  }
  const TensorPtr given = copy_tensor(gradient.values->view);
  result.values = allocate_rows(result.num_rows(), given->view);
  const RowMemory from(given->view);
  const RowMemory to(result.values->view);
  size_t num_done = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i > 0 && numbers[order[i]] == numbers[order[i - 1]]) {
      add_elements(parameter.dtype, to[num_done - 1], from[order[i]], to.numel);
    } else {
      std::memcpy(to[num_done++], from[order[i]], to.size_bytes);
    }
  }
  return result;
}

SparseRows add_sparse(const SparseRows& a, const SparseRows& b) {
  SparseRows sum{{}, a.num_sparse_dims, nullptr};
  sum.rows.reserve(a.rows.size() + b.rows.size());
  std::ranges::set_union(a.rows, b.rows, std::back_inserter(sum.rows));
  sum.values = allocate_rows(sum.num_rows(), a.values->view);
  const RowMemory to(sum.values->view);
  const RowMemory from_a(a.values->view);
  const RowMemory from_b(b.values->view);
  size_t in_a = 0;
  size_t in_b = 0;
  for (size_t row = 0; row < sum.rows.size(); ++row) {
    const bool is_in_a = in_a < a.rows.size() && a.rows[in_a] == sum.rows[row];
    const bool is_in_b = in_b < b.rows.size() && b.rows[in_b] == sum.rows[row];
    std::memcpy(to[row], is_in_a ? from_a[in_a] : from_b[in_b], to.size_bytes);
    if (is_in_a && is_in_b) add_elements(sum.values->view.dtype, to[row], from_b[in_b], to.numel);
    in_a += is_in_a ? 1 : 0;
    in_b += is_in_b ? 1 : 0;
  }
  return sum;
}

void add_sparse_to(const stg_tensor_view& dense, const SparseRows& rows) {
  const RowMemory from(rows.values->view);
  char* to = first_element<char>(dense);
  for (size_t row = 0; row < rows.rows.size(); ++row) {
    add_elements(dense.dtype, to + static_cast<size_t>(rows.rows[row]) * from.size_bytes, from[row], from.numel);
  }
}

}  // namespace stratagem
