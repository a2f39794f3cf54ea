// SPDX-License-Identifier: Apache-2.0
//
// Backward, and the hand-over of gradients. A gradient goes to the strategy as autograd made it: `.grad` is undefined before backward,
// so autograd adopts the new tensor instead of adding to an old one; a post-accumulate hook takes it out again at once, so that
// nobody else refers to it, and the strategy can reduce it while the rest of backward runs.
#pragma once

#include <stratagem/model.h>

#include <unordered_set>
#include <vector>

#include "model/replica.hpp"

namespace stratagem::sdk {

class GradientReporter {
 public:
  explicit GradientReporter(ModelReplica& replica);
  GradientReporter(const GradientReporter&) = delete;
  GradientReporter& operator=(const GradientReporter&) = delete;
  ~GradientReporter();

  /// Runs backward from `loss` times `scale`; each parameter that requires a gradient is reported once, with null if it got none.
  void run(const at::Tensor& loss, double scale, const stg_gradient_sink& sink, bool detect_anomaly);

  /// Called by the hooks, on autograd's thread: parameter `index` has its gradient.
  void accumulated(uint64_t index);

 private:
  void report(uint64_t index, at::Tensor gradient);
  void report_sparse(uint64_t index, const at::Tensor& gradient);
  void report_late(uint64_t index);
  /// Throws an error that the sink gave, as the cause of one that names the parameter.
  void taken(uint64_t index, stg_error* error);
  void drop_gradients();

  ModelReplica& replica_;
  const stg_gradient_sink* sink_ = nullptr;
  bool detect_anomaly_ = false;
  std::vector<uint8_t> reported_;
  std::unordered_set<const void*> handed_over_;  // storages, in this backward
};

}  // namespace stratagem::sdk
