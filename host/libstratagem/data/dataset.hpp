// SPDX-License-Identifier: Apache-2.0
//
// A data set in memory, and batches of it: a dict of "inputs" and, where the config names them, "targets".
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/value.hpp"
#include "libstratagem/config/config.hpp"

namespace stratagem {

class Dataset {
 public:
  /// Reads the files. Throws Error{INVALID_ARGUMENT or DATA_LOSS} with file and reason, also for inputs and targets of different
  /// length, negative labels, and no samples.
  explicit Dataset(const DatasetConfig& config);

  int64_t num_samples() const { return num_samples_; }
  /// A new batch of the samples `rows`, in that order; the tensors own their memory.
  Tree batch(std::span<const int64_t> rows) const;

 private:
  // Row-major, samples along the first dimension. `targets_` may be null.
  TensorPtr inputs_;
  TensorPtr targets_;
  int64_t num_samples_ = 0;
};

/// How many batches `num_samples` make; the last may be smaller.
int64_t num_batches(int64_t num_samples, int64_t batch_size);

}  // namespace stratagem
