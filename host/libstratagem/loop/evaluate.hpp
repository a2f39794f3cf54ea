// SPDX-License-Identifier: Apache-2.0
//
// One pass over a data set without gradients.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "libstratagem/data/dataset.hpp"
#include "libstratagem/loop/instance.hpp"

namespace stratagem {

struct Evaluation {
  std::map<std::string, double> metrics;
  bool stopped = false;  // before the end: the metrics are of a part only
};

/// `stage` is STG_STAGE_VALIDATE or STG_STAGE_TEST. `go_on(batches done, batches)` is asked after each batch.
Evaluation evaluate(StrategyInstance& strategy, const Dataset& data, int64_t batch_size, uint64_t stage, int64_t global_step,
                    const std::function<bool(int64_t, int64_t)>& go_on);

}  // namespace stratagem
