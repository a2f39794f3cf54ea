// SPDX-License-Identifier: Apache-2.0
//
// The batches of one pass over a data set, on their way to a strategy: where it trains on an accelerator, the batch after next is announced
// to it before a step, and so copied to the devices while they compute that step.
#pragma once

#include "libstratagem/data/batches.hpp"
#include "libstratagem/loop/instance.hpp"

namespace stratagem {

class BatchFeed {
 public:
  /// The rest is BatchStream's. `strategy` and `dataset` outlive it.
  BatchFeed(StrategyInstance& strategy, uint64_t stage, const Dataset& dataset, std::optional<std::vector<int64_t>> order,
            int64_t batch_size, int64_t first_batch, int64_t end_batch);

  /// What the next step is to be given, or nothing after the last batch. Announces the one after it, where that is ready: a reader that is
  /// slow, or fails, holds up no step before its own.
  std::optional<StepBatch> next();
  /// A strategy that goes, or is given other batches in between, has the announced one no more: it is read again.
  void take_back();

 private:
  void announce();
  void open();

  StrategyInstance& strategy_;
  const uint64_t stage_;
  const Dataset& dataset_;
  const std::optional<std::vector<int64_t>> order_;
  const int64_t batch_size_;
  int64_t next_batch_;
  const int64_t end_batch_;
  std::optional<BatchStream> stream_;
  uint64_t announced_ = 0;  // the ticket of batch `next_batch_`, or 0
};

}  // namespace stratagem
