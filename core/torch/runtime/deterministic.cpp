// SPDX-License-Identifier: Apache-2.0
#include "torch/runtime/deterministic.hpp"

#include <ATen/Context.h>

#include <mutex>

namespace stratagem {

namespace {

std::mutex mutex;
int num_wanting = 0;
bool was_deterministic = false;
bool was_warning_only = false;

}  // namespace

DeterministicScope::DeterministicScope(bool is_wanted) : is_wanted_(is_wanted) {
  if (!is_wanted_) return;
  const std::lock_guard lock(mutex);
  if (num_wanting++ != 0) return;
  at::Context& context = at::globalContext();
  was_deterministic = context.deterministicAlgorithms();
  was_warning_only = context.deterministicAlgorithmsWarnOnly();
  context.setDeterministicAlgorithms(true, false);
}

DeterministicScope::~DeterministicScope() {
  if (!is_wanted_) return;
  const std::lock_guard lock(mutex);
  if (--num_wanting == 0) at::globalContext().setDeterministicAlgorithms(was_deterministic, was_warning_only);
}

}  // namespace stratagem
