// SPDX-License-Identifier: Apache-2.0
//
// Vector clocks: for each stream, by its number, how many of its operations come before.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulated {

class Clock {
 public:
  uint64_t at(size_t number) const { return number < times_.size() ? times_[number] : 0; }
  uint64_t tick(size_t number) {
    if (times_.size() <= number) times_.resize(number + 1);
    return ++times_[number];
  }
  void join(const Clock& other) {
    if (times_.size() < other.times_.size()) times_.resize(other.times_.size());
    for (size_t i = 0; i < other.times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
  }
  bool covers(const Clock& other) const {
    for (size_t i = 0; i < other.times_.size(); ++i)
      if (at(i) < other.times_[i]) return false;
    return true;
  }

 private:
  std::vector<uint64_t> times_;
};

}  // namespace emulated
