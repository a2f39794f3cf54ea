// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/data/permutation.hpp"

#include <exception>
#include <numeric>
#include <random>
#include <utility>

#include "base/error.hpp"

namespace stratagem {
namespace {

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t uniform(std::mt19937_64& generator, uint64_t bound) {
  const uint64_t rest = (~uint64_t{0} % bound + 1) % bound;  // 2^64 mod bound
  uint64_t x = generator();
  while (rest != 0 && x >= ~uint64_t{0} - rest + 1) x = generator();
  return x % bound;
}

}  // namespace

std::vector<int64_t> permutation(int64_t num_samples, uint64_t seed, int64_t epoch) {
  std::vector<int64_t> order;
  try {
    order.resize(static_cast<size_t>(num_samples));
  } catch (const std::exception&) {
    throw Error{STG_RESOURCE_EXHAUSTED,
                concat("no memory for the order of ", num_samples, " samples, 8 bytes each; give a limit, or ",
                       "\"shuffle\": false and shuffle in the source")};
  }
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 generator(mix(mix(seed) + static_cast<uint64_t>(epoch)));
  for (size_t i = order.size(); i-- > 1;) std::swap(order[i], order[uniform(generator, i + 1)]);
  return order;
}

}  // namespace stratagem
