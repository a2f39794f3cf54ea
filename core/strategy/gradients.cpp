// SPDX-License-Identifier: Apache-2.0
#include "strategy/gradients.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>

#include "strategy/elements.hpp"
#include "strategy/kernels.hpp"

namespace stratagem {

namespace {

constexpr int64_t block_numel = 4096;

int64_t num_blocks(int64_t numel) { return (numel + block_numel - 1) / block_numel; }

// Complex elements are walked as pairs of reals.
stg_dtype real_dtype(stg_dtype dtype) {
  if (dtype.code != STG_DTYPE_COMPLEX) return dtype;
  return {STG_DTYPE_FLOAT, static_cast<uint8_t>(dtype.bits / 2), 1};
}

// Calls `body` with a null pointer of the element's type: how a dtype picks a kernel.
template <class Body>
auto with_floating(stg_dtype dtype, Body&& body) {
  const stg_dtype real = real_dtype(dtype);
  if (same_dtype(real, float32)) return body(static_cast<float*>(nullptr));
  if (same_dtype(real, float64)) return body(static_cast<double*>(nullptr));
  if (real.code == STG_DTYPE_BFLOAT) return body(static_cast<BFloat16*>(nullptr));
  return body(static_cast<Half*>(nullptr));
}

template <class T>
constexpr bool is_half = sizeof(T) == 2;

template <class T>
void scale_elements(T* values, int64_t begin, int64_t end, double factor) {
  using Number = std::conditional_t<is_half<T>, float, T>;
  const auto by = static_cast<Number>(factor);
  for (int64_t i = begin; i < end; ++i) values[i] = as_element<T>(static_cast<Number>(values[i]) * by);
}

// With a weight for each source; without any, all are 1.
template <class T>
void reduce_sources(T* out, std::span<const T* const> sources, std::span<const double> weights, int64_t begin, int64_t end,
                    double divisor) {
  if (!weights.empty()) {
    kernels::reduce_weighted(out, sources, weights, begin, end, divisor);
  } else if constexpr (is_half<T>) {
    kernels::reduce_mean_half(out, sources, begin, end, static_cast<float>(divisor));
  } else {
    kernels::reduce_mean(out, sources, begin, end, static_cast<T>(divisor));
  }
}

}  // namespace

int64_t flat_numel(const stg_tensor_view& view) { return numel(view) * (view.dtype.code == STG_DTYPE_COMPLEX ? 2 : 1); }

bool FlatLayout::fits(const stg_tensor_view& view) const {
  const stg_tensor_view own{nullptr,
                            {},
                            static_cast<int32_t>(shape.size()),
                            dtype,
                            const_cast<int64_t*>(shape.data()),
                            const_cast<int64_t*>(strides.data()),
                            0};
  return is_dense(view) && same_layout(own, view);
}

TensorPtr FlatLayout::allocate() const {
  std::shared_ptr<stg_tensor> memory{allocate_tensor(dtype, shape)};
  void* data = memory->view.data;
  return make_strided_tensor(std::move(memory), data, dtype, shape, strides, 0, {STG_DEVICE_CPU, 0});
}

TensorPtr FlatLayout::copy(const stg_tensor_view& source) const {
  TensorPtr result = allocate();
  copy_elements(result->view, source);
  return result;
}

FlatLayout flat_layout(const stg_tensor_view& parameter) {
  FlatLayout layout{{parameter.shape, parameter.shape + parameter.num_dims}, strides_of(parameter), parameter.dtype};
  if (is_dense(parameter)) return layout;
  stg_tensor_view row_major = parameter;
  row_major.strides = nullptr;
  layout.strides = strides_of(row_major);
  return layout;
}

void add_elements(stg_dtype dtype, void* sum, const void* values, int64_t count) {
  with_floating(dtype, [&]<class T>(T*) {
    T* to = static_cast<T*>(sum);
    const T* from = static_cast<const T*>(values);
    using Number = std::conditional_t<is_half<T>, float, T>;
    for (int64_t i = 0; i < count; ++i) to[i] = as_element<T>(static_cast<Number>(to[i]) + static_cast<Number>(from[i]));
  });
}

void scale_flat(const stg_tensor_view& values, double factor) {
  with_floating(values.dtype, [&]<class T>(T*) { scale_elements(first_element<T>(values), 0, flat_numel(values), factor); });
}

std::vector<std::vector<FlatRange>> partition(const std::vector<int64_t>& numels, size_t num_workers) {
  const int64_t total = std::accumulate(numels.begin(), numels.end(), int64_t{0},
                                        [](int64_t sum, int64_t count) { return sum + num_blocks(count); });
  std::vector<std::vector<FlatRange>> ranges(num_workers);
  int64_t first = 0;  // of the parameter's blocks, among all
  for (size_t p = 0; p < numels.size(); ++p) {
    const int64_t last = first + num_blocks(numels[p]);
    for (size_t worker = 0; worker < num_workers; ++worker) {
      const auto w = static_cast<int64_t>(worker);
      const auto workers = static_cast<int64_t>(num_workers);
      const int64_t begin = std::max(first, total * w / workers);
      const int64_t end = std::min(last, total * (w + 1) / workers);
      if (begin >= end) continue;
      ranges[worker].push_back({p, (begin - first) * block_numel, std::min(numels[p], (end - first) * block_numel)});
    }
    first = last;
  }
  return ranges;
}

ReducedGradients::ReducedGradients(const ReplicaSlot& root, size_t num_workers, bool makes_dense)
    : tensors_(root.parameters.size()),
      is_present_(root.parameters.size()),
      sources_(root.parameters.size()),
      weights_(root.parameters.size()),
      have_overflow_(num_workers),
      makes_dense_(makes_dense),
      sparse_(root.parameters.size()),
      sparse_sources_(root.parameters.size()) {
  std::vector<int64_t> numels(root.parameters.size());
  int64_t blocks = 0;
  for (size_t p = 0; p < tensors_.size(); ++p) {
    first_block_.push_back(blocks);
    if (!root.parameter_infos[p].requires_grad) continue;
    const stg_dtype dtype = root.parameter_infos[p].dtype;
    if (!is_floating(real_dtype(dtype))) {
      throw unimplemented("parameter ", root.parameter_infos[p].names[0], " is ", dtype_name(dtype),
                          " and requires a gradient; that can't be reduced");
    }
    tensors_[p] = flat_layout(root.parameters[p]->view).allocate();
    numels[p] = flat_numel(tensors_[p]->view);
    blocks += num_blocks(numels[p]);
  }
  ranges_ = partition(numels, num_workers);
  block_squares_.resize(static_cast<size_t>(blocks));
}

const stg_tensor* ReducedGradients::tensor(size_t parameter) {
  if (!is_present_[parameter]) return nullptr;
  const TensorPtr& dense = tensors_[parameter];
  if (const SparseRows* rows = sparse(parameter)) {
    std::memset(first_element<>(dense->view), 0, static_cast<size_t>(numel(dense->view)) * element_size_bytes(dense->view.dtype));
    add_sparse_to(dense->view, *rows);
  }
  return dense.get();
}

void ReducedGradients::begin(Replicas& replicas, double divisor, double loss_scale) {
  divisor_ = divisor;
  loss_scale_ = loss_scale;
  std::frexp(divisor, &exponent_);
  std::vector<int64_t> sparse_numels(tensors_.size());
  for (size_t p = 0; p < tensors_.size(); ++p) {
    begin_parameter(replicas, p);
    if (sparse(p) != nullptr) sparse_numels[p] = flat_numel(sparse_[p].values->view);
  }
  sparse_ranges_ = partition(sparse_numels, ranges_.size());
}

void ReducedGradients::begin_parameter(Replicas& replicas, size_t p) {
  std::vector<const void*>& dense = sources_[p];
  std::vector<const SparseRows*>& sparse = sparse_sources_[p];
  std::vector<double>& weights = weights_[p];
  dense.clear();
  sparse.clear();
  weights.clear();
  sparse_[p] = {};
  bool has_dense = false;
  for (size_t i = 0; i < replicas.size(); ++i) {
    const ReplicaSlot& slot = replicas[i];
    has_dense = has_dense || slot.gradients[p] != nullptr;
    if (slot.sparse_gradients[p]) sparse.push_back(&*slot.sparse_gradients[p]);
    if (slot.gradients[p] || slot.sparse_gradients[p]) weights.push_back(slot.gradients_weight);
  }
  is_present_[p] = !weights.empty();
  normalise(weights);
  for (const SparseRows* rows : sparse) has_dense = has_dense || rows->num_sparse_dims != sparse.front()->num_sparse_dims;
  if (!has_dense) {
    if (!sparse.empty()) begin_sparse(p);
    return;
  }
  sparse.clear();
  for (size_t i = 0; i < replicas.size(); ++i) {
    replicas[i].make_dense(p);
    if (replicas[i].gradients[p]) dense.push_back(first_element<>(replicas[i].gradients[p]->view));
  }
}

// Denominators may be larger than float32 has numbers, and so may their sum times the loss scale. Divided by a power of two, sums come
// out to the same bits, and the divisor is at most the scale.
void ReducedGradients::normalise(std::vector<double>& weights) const {
  if (loss_scale_ == 1 && std::all_of(weights.begin(), weights.end(), [](double weight) { return weight == 1; })) {
    weights.clear();
  }
  for (double& weight : weights) weight = std::ldexp(weight, -exponent_);
}

double ReducedGradients::divisor(size_t parameter) const {
  return weights_[parameter].empty() ? divisor_ : std::ldexp(divisor_, -exponent_) * loss_scale_;
}

void ReducedGradients::begin_sparse(size_t p) {
  SparseRows& result = sparse_[p];
  for (const SparseRows* source : sparse_sources_[p]) {
    std::vector<int64_t> rows;
    std::ranges::set_union(result.rows, source->rows, std::back_inserter(rows));
    result.rows = std::move(rows);
  }
  if (!makes_dense_) result.values = allocate_rows(result.num_rows(), sparse_sources_[p].front()->values->view);
}

template <class Body>
void ReducedGradients::for_each_range(size_t worker, Body&& body) const {
  for (const FlatRange& range : ranges_[worker]) {
    if (is_present_[range.parameter] && sparse(range.parameter) == nullptr) body(range);
  }
  for (const FlatRange& range : sparse_ranges_[worker]) body(range);
}

void ReducedGradients::reduce(size_t worker, bool measured) {
  for_each_range(worker, [&](const FlatRange& range) {
    sparse_sources_[range.parameter].empty() ? reduce_range(range) : reduce_rows(range);
  });
  if (measured) measure(worker);
}

void ReducedGradients::reduce_range(const FlatRange& range) {
  const stg_tensor_view& view = tensors_[range.parameter]->view;
  with_floating(view.dtype, [&]<class T>(T*) {
    const auto* begin = reinterpret_cast<const T* const*>(sources_[range.parameter].data());
    reduce_sources(first_element<T>(view), {begin, sources_[range.parameter].size()}, weights_[range.parameter], range.begin,
                   range.end, divisor(range.parameter));
  });
}

// The rows that lie in the range, of a sparse result or of a dense one (whose other elements are 0).
void ReducedGradients::reduce_rows(const FlatRange& range) {
  const size_t p = range.parameter;
  const bool is_dense = sparse(p) == nullptr;
  const std::vector<int64_t>& rows = sparse_[p].rows;
  const int64_t row_numel = sparse_sources_[p].front()->row_numel();
  with_floating(values(p).dtype, [&]<class T>(T*) {
    T* out = first_element<T>(values(p));
    if (is_dense) std::fill(out + range.begin, out + range.end, T{});
    std::vector<const T*> sources;
    std::vector<double> weights;
    const int64_t first = range.begin / row_numel;  // by its place among the values, or in the parameter
    auto row = static_cast<size_t>(is_dense ? std::ranges::lower_bound(rows, first) - rows.begin() : first);
    for (; row < rows.size(); ++row) {
      const int64_t begin = (is_dense ? rows[row] : static_cast<int64_t>(row)) * row_numel;
      if (begin >= range.end) break;
      const int64_t from = std::max(begin, range.begin);
      const int64_t to = std::min(begin + row_numel, range.end);
      sources.clear();
      weights.clear();
      for (size_t s = 0; s < sparse_sources_[p].size(); ++s) {
        const SparseRows& source = *sparse_sources_[p][s];
        const auto found = std::ranges::lower_bound(source.rows, rows[row]);
        if (found == source.rows.end() || *found != rows[row]) continue;
        const T* its_row = first_element<const T>(source.values->view) + (found - source.rows.begin()) * row_numel;
        sources.push_back(its_row + (from - begin));
        if (!weights_[p].empty()) weights.push_back(weights_[p][s]);
      }
      reduce_sources<T>(out + from, sources, weights, 0, to - from, divisor(p));
    }
  });
}

void ReducedGradients::measure(size_t worker) {
  for_each_range(worker, [&](const FlatRange& range) {
    const stg_tensor_view& view = values(range.parameter);
    with_floating(view.dtype, [&]<class T>(T*) {
      const T* elements = first_element<const T>(view);
      auto block = static_cast<size_t>(first_block_[range.parameter] + range.begin / block_numel);
      for (int64_t at = range.begin; at < range.end; at += block_numel, ++block) {
        block_squares_[block] = kernels::sum_of_squares(elements + at, std::min(block_numel, range.end - at));
      }
    });
  });
}

double ReducedGradients::norm() const {
  double sum = 0;
  for (size_t p = 0; p < tensors_.size(); ++p) {
    if (!is_present_[p]) continue;
    const auto first = static_cast<size_t>(first_block_[p]);
    const auto count = static_cast<size_t>(num_blocks(flat_numel(values(p))));
    sum = std::accumulate(block_squares_.begin() + static_cast<ptrdiff_t>(first),
                          block_squares_.begin() + static_cast<ptrdiff_t>(first + count), sum);
  }
  return std::sqrt(sum);
}

void ReducedGradients::scale(size_t worker, double factor) {
  for_each_range(worker, [&](const FlatRange& range) {
    const stg_tensor_view& view = values(range.parameter);
    with_floating(view.dtype, [&]<class T>(T*) { scale_elements(first_element<T>(view), range.begin, range.end, factor); });
  });
}

void ReducedGradients::clamp(size_t worker, double limit) {
  for_each_range(worker, [&](const FlatRange& range) {
    const stg_tensor_view& view = values(range.parameter);
    with_floating(view.dtype, [&]<class T>(T*) {
      using Number = std::conditional_t<is_half<T>, float, T>;
      T* elements = first_element<T>(view);
      const auto most = static_cast<Number>(limit);
      for (int64_t i = range.begin; i < range.end; ++i) {
        // Written so that a NaN stays one.
        const auto value = static_cast<Number>(elements[i]);
        elements[i] = as_element<T>(value > most ? most : value < -most ? -most : value);
      }
    });
  });
}

void ReducedGradients::look_for_overflow(size_t worker) {
  bool is_found = false;
  for_each_range(worker, [&](const FlatRange& range) {
    const stg_tensor_view& view = values(range.parameter);
    with_floating(view.dtype, [&]<class T>(T*) {
      is_found = !kernels::all_finite(first_element<const T>(view) + range.begin, range.end - range.begin) || is_found;
    });
  });
  have_overflow_[worker] = static_cast<char>(is_found);
}

bool ReducedGradients::have_overflow() const {
  return std::find(have_overflow_.begin(), have_overflow_.end(), 1) != have_overflow_.end();
}

void ReducedGradients::clear() {
  std::fill(is_present_.begin(), is_present_.end(), false);
  std::fill(have_overflow_.begin(), have_overflow_.end(), 0);
  for (SparseRows& rows : sparse_) rows = {};
  Gradients::clear();
}

}  // namespace stratagem
