// SPDX-License-Identifier: Apache-2.0
//
// The order of samples in an epoch. It is part of what a checkpoint promises (a resumed run sees the same batches), so it is defined
// here to the last bit, not left to std::shuffle, which each standard library does in its own way:
//
//   generator  std::mt19937_64, seeded with mix(mix(seed) + epoch), where mix is the finaliser of SplitMix64
//   shuffle    Fisher-Yates from the back: for i = n-1 ... 1 swap element i with element j, j uniform in [0, i]
//   uniform    the generator's output x is drawn again while x >= 2^64 - 2^64 mod (i+1); then j = x mod (i+1)
#pragma once

#include <cstdint>
#include <vector>

namespace stratagem {

/// The samples 0 ... num_samples-1 in the order of this epoch.
std::vector<int64_t> permutation(int64_t num_samples, uint64_t seed, int64_t epoch);

}  // namespace stratagem
