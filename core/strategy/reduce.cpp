// SPDX-License-Identifier: Apache-2.0
#include "strategy/reduce.hpp"

#include <stratagem/strategy.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "strategy/elements.hpp"

namespace stratagem {

namespace {

// Sums in a tree, not in a row: the rounding error grows with the logarithm of the count.
template <class Load>
double pairwise_sum(const Load& load, int64_t begin, int64_t count) {
  if (count <= 64) {
    double sum = 0;
    for (int64_t i = begin; i < begin + count; ++i) sum += load(i);
    return sum;
  }
  const int64_t half = count / 2;
  return pairwise_sum(load, begin, half) + pairwise_sum(load, begin + half, count - half);
}

template <class T>
TensorPtr number(T value, stg_dtype dtype) {
  TensorPtr result = allocate_tensor(dtype, {});
  std::memcpy(first_element<>(result->view), &value, sizeof value);
  return result;
}

TensorPtr floating_number(double value, stg_dtype dtype) {
  TensorPtr result = allocate_tensor(dtype, {});
  store_floating(first_element<>(result->view), dtype, value);
  return result;
}

// The first NaN, else the smallest or largest element: bytes are kept, so that nothing is converted.
template <class T>
TensorPtr extreme(const T* elements, int64_t count, bool smallest, stg_dtype dtype) {
  const auto as_number = [](T element) {
    if constexpr (sizeof(T) == 2 && !std::is_integral_v<T>) {
      return static_cast<float>(element);
    } else {
      return element;
    }
  };
  T best = elements[0];
  for (int64_t i = 1; i < count; ++i) {
    if constexpr (!std::is_integral_v<T>) {
      if (std::isnan(as_number(best))) break;
      if (std::isnan(as_number(elements[i]))) best = elements[i];
    }
    const bool is_better = smallest ? as_number(elements[i]) < as_number(best) : as_number(elements[i]) > as_number(best);
    if (is_better) best = elements[i];
  }
  return number(best, dtype);
}

template <class T>
TensorPtr reduce_floating(const T* elements, int64_t count, uint32_t op, stg_dtype dtype) {
  if (op == STG_REDUCE_MIN || op == STG_REDUCE_MAX) return extreme(elements, count, op == STG_REDUCE_MIN, dtype);
  using Number = std::conditional_t<sizeof(T) == 2, float, T>;
  const double sum = pairwise_sum([&](int64_t i) { return static_cast<double>(static_cast<Number>(elements[i])); }, 0, count);
  return floating_number(op == STG_REDUCE_SUM ? sum : sum / static_cast<double>(count), dtype);
}

template <class T>
TensorPtr reduce_complex(const T* parts, int64_t count, uint32_t op, stg_dtype dtype, const KeyPath& path) {
  if (op == STG_REDUCE_MIN || op == STG_REDUCE_MAX)
    throw invalid_argument("reduce: the complex tensor at ", path.text(), " has no min or max");
  using Number = std::conditional_t<sizeof(T) == 2, float, T>;
  const stg_dtype real{STG_DTYPE_FLOAT, static_cast<uint8_t>(dtype.bits / 2), 1};
  TensorPtr result = allocate_tensor(dtype, {});
  for (int64_t part = 0; part < 2; ++part) {
    const double sum =
        pairwise_sum([&](int64_t i) { return static_cast<double>(static_cast<Number>(parts[2 * i + part])); }, 0, count);
    store_floating(first_element<T>(result->view) + part, real, op == STG_REDUCE_SUM ? sum : sum / static_cast<double>(count));
  }
  return result;
}

__extension__ using int128 = __int128;

template <class T>
TensorPtr reduce_integers(const T* elements, int64_t count, uint32_t op, stg_dtype dtype, const KeyPath& path) {
  if (op == STG_REDUCE_MIN || op == STG_REDUCE_MAX) return extreme(elements, count, op == STG_REDUCE_MIN, dtype);
  int128 sum = 0;  // 2^64 elements of 64 bits fit
  for (int64_t i = 0; i < count; ++i) sum += dtype.code == STG_DTYPE_BOOL ? static_cast<T>(elements[i] != 0) : elements[i];
  if (op == STG_REDUCE_MEAN) return number(static_cast<double>(sum) / static_cast<double>(count), float64);
  if (sum > std::numeric_limits<int64_t>::max() || sum < std::numeric_limits<int64_t>::min()) {
    throw Error{STG_OUT_OF_RANGE, concat("reduce: the sum at ", path.text(), " does not fit int64")};
  }
  return number(static_cast<int64_t>(sum), int64);
}

// Calls `body` with a pointer to the elements; complex ones as pairs.
template <class Body>
TensorPtr with_elements(const stg_tensor_view& view, Body&& body) {
  const int bits = view.dtype.code == STG_DTYPE_COMPLEX ? view.dtype.bits / 2 : view.dtype.bits;
  const bool is_signed = view.dtype.code == STG_DTYPE_INT;
  switch (view.dtype.code) {
    case STG_DTYPE_FLOAT:
    case STG_DTYPE_COMPLEX:
      return bits == 64   ? body(first_element<double>(view))
             : bits == 32 ? body(first_element<float>(view))
                          : body(first_element<Half>(view));
    case STG_DTYPE_BFLOAT:
      return body(first_element<BFloat16>(view));
    default:
      switch (bits) {
        case 8:
          return is_signed ? body(first_element<int8_t>(view)) : body(first_element<uint8_t>(view));
        case 16:
          return is_signed ? body(first_element<int16_t>(view)) : body(first_element<uint16_t>(view));
        case 32:
          return is_signed ? body(first_element<int32_t>(view)) : body(first_element<uint32_t>(view));
        default:
          return is_signed ? body(first_element<int64_t>(view)) : body(first_element<uint64_t>(view));
      }
  }
}

template <class T>
TensorPtr mean_through_float(const T* elements, int64_t count, stg_dtype dtype) {
  const double sum = pairwise_sum([&](int64_t i) { return static_cast<double>(static_cast<float>(elements[i])); }, 0, count);
  const auto mean = static_cast<float>(sum / static_cast<double>(count));
  if (is_floating(dtype)) return floating_number(static_cast<double>(mean), dtype);
  if constexpr (std::is_integral_v<T>) {
    if (dtype.code == STG_DTYPE_BOOL) return number(static_cast<uint8_t>(mean != 0), dtype);
    const bool fits =
        mean >= static_cast<float>(std::numeric_limits<T>::min()) && mean < static_cast<float>(std::numeric_limits<T>::max());
    return number(fits ? static_cast<T>(mean) : std::numeric_limits<T>::min(), dtype);
  }
  throw internal("no such type");
}

TensorPtr reduce_tensor(const stg_tensor_view& source, uint32_t op, bool lightning, const KeyPath& path) {
  check_reachable(source, "reduce: the tensor at ", path);
  // A number that somebody asked for is wanted where it can be read.
  if (!is_in_host_memory(source.device)) return reduce_tensor(copy_to_host(source)->view, op, lightning, path);
  const int64_t count = numel(source);
  if (count == 0 && op != STG_REDUCE_SUM && !lightning) {
    throw invalid_argument("reduce: the tensor at ", path.text(), " is empty (", shape_text(source),
                           "): it has no mean, min or max");
  }
  TensorPtr row_major;
  if (!is_contiguous(source)) row_major = copy_tensor(source);
  const stg_tensor_view& view = row_major ? row_major->view : source;
  return with_elements(view, [&]<class T>(const T* elements) -> TensorPtr {
    if (view.dtype.code == STG_DTYPE_COMPLEX) {
      if constexpr (!std::is_integral_v<T>)
        return reduce_complex(elements, count, lightning ? uint32_t{STG_REDUCE_MEAN} : op, view.dtype, path);
    }
    if (lightning) return mean_through_float(elements, count, view.dtype);
    if constexpr (std::is_integral_v<T>) {
      return reduce_integers(elements, count, op, view.dtype, path);
    } else {
      return reduce_floating(elements, count, op, view.dtype);
    }
  });
}

Value reduce_value(const stg_value& value, uint32_t op, bool lightning, const KeyPath& path) {
  switch (value.type) {
    case STG_TENSOR:
      return reduce_tensor(value.as.tensor->view, op, lightning, path);
    case STG_LIST:
    case STG_TUPLE: {
      List items;
      for (uint32_t i = 0; i < value.count; ++i)
        items.push_back(reduce_value(value.as.items[i], op, lightning, {&path, uint64_t{i}}));
      if (value.type == STG_TUPLE) return Tuple{std::move(items)};
      return items;
    }
    case STG_DICT: {
      Dict dict;
      for (uint32_t i = 0; i < value.count; ++i) {
        const std::string_view key = text_of(value.as.entries[i].key);
        dict.emplace_back(key, reduce_value(value.as.entries[i].value, op, lightning, {&path, key}));
      }
      return dict;
    }
    default:
      return take(Tree::view(value));
  }
}

}  // namespace

Tree reduce_leaves(Tree object, uint32_t op, bool lightning) { return make_tree(reduce_value(object.root(), op, lightning, {})); }

}  // namespace stratagem
