// SPDX-License-Identifier: Apache-2.0
//
// A data set, and batches of it: from files, in memory, a dict of "inputs" and, where the config names them, "targets"; or from a source
// of the host's own.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/value.hpp"
#include "libstratagem/config/config.hpp"
#include "libstratagem/data/source.hpp"

namespace stratagem {

class Dataset {
 public:
  /// Reads the files. Throws Error{INVALID_ARGUMENT or DATA_LOSS} with file and reason, also for inputs and targets of different
  /// length, negative labels, and no samples.
  explicit Dataset(const DatasetConfig& config);
  /// Of a source; the config says how it is used.
  Dataset(const DatasetConfig& config, std::shared_ptr<DataSource> source);

  int64_t num_samples() const { return num_samples_; }
  /// Whether a thread of its own may make batches, ahead.
  bool reads_ahead() const { return reads_ahead_; }
  void read_on_callers_thread() { reads_ahead_ = false; }
  /// A new batch of the samples `rows`, in that order; the tensors own their memory.
  Tree batch(std::span<const int64_t> rows) const;

 private:
  // Row-major, samples along the first dimension. `targets_` may be null.
  TensorPtr inputs_;
  TensorPtr targets_;
  std::shared_ptr<DataSource> source_;  // in the place of both
  int64_t num_samples_ = 0;
  bool reads_ahead_ = true;
};

/// How many batches `num_samples` make; the last may be smaller.
int64_t num_batches(int64_t num_samples, int64_t batch_size);

}  // namespace stratagem
