// SPDX-License-Identifier: Apache-2.0
//
// Loops over flat memory of one element type. Plain enough for the compiler to vectorise (this is compiled with -O3); each element's
// result depends on its operands and their order only, so that any partition of the range gives the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "strategy/elements.hpp"

namespace stratagem::kernels {

inline constexpr int64_t block_numel = 1024;  // per step: small enough to stay in the first cache

/// x / divisor, by the reciprocal where that is exact (a power of two, as most batch sizes are).
template <class T>
void divide(T* values, int64_t count, T divisor) {
  if (divisor == T{1}) return;
  int exponent = 0;
  if (std::frexp(divisor, &exponent) == T{0.5}) {
    const T factor = T{1} / divisor;
    for (int64_t i = 0; i < count; ++i) values[i] *= factor;
  } else {
    for (int64_t i = 0; i < count; ++i) values[i] /= divisor;
  }
}

template <class T>
void add(T* __restrict sum, const T* __restrict values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] += values[i];
}

template <class T>
void add_scaled(T* __restrict sum, const T* __restrict values, int64_t count, T factor) {
  for (int64_t i = 0; i < count; ++i) sum[i] += values[i] * factor;
}

template <class T, class U>
void load(T* __restrict to, const U* __restrict from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
}

template <class T>
double sum_of_squares(const T* values, int64_t count) {
  // Eight sums side by side: a fixed order that vectorises.
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int64_t k = 0; k < 8; ++k) {
      const auto value = static_cast<double>(static_cast<std::conditional_t<sizeof(T) == 2, float, T>>(values[i + k]));
      sums[k] += value * value;
    }
  }
  for (int64_t k = 0; i < count; ++i, ++k) {
    const auto value = static_cast<double>(static_cast<std::conditional_t<sizeof(T) == 2, float, T>>(values[i]));
    sums[k] += value * value;
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

template <class T>
bool all_finite(const T* values, int64_t count) {
  using Number = std::conditional_t<sizeof(T) == 2, float, T>;
  int is_other = 0;  // no early end: this vectorises
  for (int64_t i = 0; i < count; ++i) {
    is_other |= !(std::abs(static_cast<Number>(values[i])) <= std::numeric_limits<Number>::max());
  }
  return is_other == 0;
}

/// out = (sources[0] + sources[1] + ...) / divisor, in this order. float and double.
template <class T>
void reduce_mean(T* out, std::span<const T* const> sources, int64_t begin, int64_t end, T divisor) {
  for (int64_t at = begin; at < end; at += block_numel) {
    const int64_t count = std::min(block_numel, end - at);
    std::copy_n(sources[0] + at, count, out + at);
    for (const T* source : sources.subspan(1)) add(out + at, source + at, count);
    divide(out + at, count, divisor);
  }
}

/// The same for half precision, summed and divided in float.
template <class T>
void reduce_mean_half(T* out, std::span<const T* const> sources, int64_t begin, int64_t end, float divisor) {
  float sums[block_numel];
  float values[block_numel];
  for (int64_t at = begin; at < end; at += block_numel) {
    const int64_t count = std::min(block_numel, end - at);
    load(sums, sources[0] + at, count);
    for (const T* source : sources.subspan(1)) {
      load(values, source + at, count);
      add(sums, values, count);
    }
    divide(sums, count, divisor);
    for (int64_t i = 0; i < count; ++i) out[at + i] = T::from(sums[i]);
  }
}

/// The same with a weight for each source. Any element type; halves are summed and divided in float.
template <class T>
void reduce_weighted(T* out, std::span<const T* const> sources, std::span<const double> weights, int64_t begin, int64_t end,
                     double divisor) {
  using Number = std::conditional_t<sizeof(T) == 2, float, T>;
  Number sums[block_numel];
  Number values[block_numel];
  for (int64_t at = begin; at < end; at += block_numel) {
    const int64_t count = std::min(block_numel, end - at);
    std::fill_n(sums, count, Number{0});
    for (size_t s = 0; s < sources.size(); ++s) {
      load(values, sources[s] + at, count);
      add_scaled(sums, values, count, static_cast<Number>(weights[s]));
    }
    divide(sums, count, static_cast<Number>(divisor));
    for (int64_t i = 0; i < count; ++i) out[at + i] = as_element<T>(sums[i]);
  }
}

}  // namespace stratagem::kernels
