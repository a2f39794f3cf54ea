// SPDX-License-Identifier: Apache-2.0
//
// What a step and an update carry from part to part (engine_parts.cpp, engine_steps.cpp). Both are shared by the phases of a run: a
// replica that comes back late, after its run was given up, still finds them.
#pragma once

#include "strategy/elements.hpp"
#include "strategy/engine.hpp"
#include "torch/warnings.hpp"

namespace stratagem {

// One batch on its way through the replicas.
struct Engine::Step {
  Shares shares;
  std::vector<Arrival> arrivals;  // by share, of an announced batch on its way to an accelerator; else empty
  stg_step_context context{};
  size_t num_shares = 0;
  // By share; each written by its worker.
  std::vector<double> weights;  // rows or denominator: what the loop weighs metrics with
  std::vector<double> scales;   // of the share's gradient in the sum
  std::vector<char> has_denominator;
  std::vector<at::Tensor> device_weights;  // on an accelerator, what the host hasn't read yet
  std::vector<char> weighs_gradients;      // with the scale, since the loss hasn't the range or the digits for it
  // Serial.
  bool reads_late = false;        // denominators on devices are read when all is queued
  bool weighs_on_device = false;  // there are such ones
  double divisor_before = 0;      // of the window
  double total_weight_before = 0;
  bool is_sum = false;
  double divisor = 0;  // of the scaled losses and gradients
  Tree outputs;
  bool detects_anomalies = false;  // in losses, and in gradients but where an overflow is nothing unusual

  StepResult result() { return {std::move(outputs), weights}; }
};

void check_denominator(double weight);

// What surrounds a part on a replica's thread: the host's trace, and LibTorch's warnings in the host's log. In parts that a deadline
// doesn't end (reduce, update) only the calling thread has one with a host: nobody could be rescued from a callback that waits there.
class PartScope {
 public:
  PartScope(const Host& host, const char* phase, size_t worker)
      : host_(host), phase_(phase), replica_(static_cast<int32_t>(worker)), warnings_(host) {
    host_.trace_begin(phase_, replica_);
  }
  PartScope(const PartScope&) = delete;
  PartScope& operator=(const PartScope&) = delete;
  ~PartScope() { host_.trace_end(phase_, replica_); }

 private:
  const Host& host_;
  const char* phase_;
  int32_t replica_;
  WarningScope warnings_;
};

// One update of the parameters.
struct Engine::Update {
  stg_update_args args{};
  UpdateResult result;
  DeviceOptimizer::Found found;  // the root's, on an accelerator
  bool is_skipped = false;
};

// Around what writes parameters: after an error part of them has been written, and nobody can tell which.
template <class Body>
void Engine::irrevocably(Body&& body) {
  try {
    body();
  } catch (...) {
    const Error cause = describe_exception(std::current_exception());
    Error error{cause.code, "the update failed half-way, the weights are lost: " + cause.message};
    error.flags = STG_ERROR_INSTANCE_DRAINING;
    throw error;
  }
}

}  // namespace stratagem
