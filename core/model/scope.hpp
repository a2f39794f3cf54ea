// SPDX-License-Identifier: Apache-2.0
//
// The thread-local state of LibTorch that a replica's code runs under. A strategy may call from any thread, the host's own too, so
// all of it is set when a call begins and put back when it ends.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <stratagem/types.h>

#include <optional>

#include "torch/threads.hpp"
#include "torch/warnings.hpp"

namespace stratagem::sdk {

/// Warnings to the host's log, and the replica's number of intra-op threads (0: as they are).
class ThreadScope {
 public:
  ThreadScope(const Host& host, int num_threads) : warnings_(host), threads_(num_threads) {}

 private:
  WarningScope warnings_;
  IntraOpScope threads_;
};

/// The replica's stream is the current one, as the strategy has said: one of ours has seen to it, one of another author need not. On the
/// CPU there is none.
class StreamScope {
 public:
  StreamScope(c10::Device device, const stg_stream& given);

 private:
  std::optional<c10::StreamGuard> guard_;
};

/// What becomes of the operations: recorded for backward, not recorded, or run in inference mode.
class GradientScope {
 public:
  enum class Mode { record, no_gradient, inference };
  explicit GradientScope(Mode mode) : inference_(mode == Mode::inference), gradient_(mode == Mode::record) {}

 private:
  c10::InferenceMode inference_;
  c10::AutoGradMode gradient_;
};

}  // namespace stratagem::sdk
