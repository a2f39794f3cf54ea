// SPDX-License-Identifier: Apache-2.0
//
// LibTorch's deterministic algorithms, while somebody wants them. The setting is the process's, so those who want it are counted, over
// all plugins: the first one sets it, the last one puts it back.
#pragma once

namespace stratagem {

class __attribute__((visibility("default"))) DeterministicScope {
 public:
  explicit DeterministicScope(bool is_wanted);
  DeterministicScope(const DeterministicScope&) = delete;
  DeterministicScope& operator=(const DeterministicScope&) = delete;
  ~DeterministicScope();

 private:
  bool is_wanted_;
};

}  // namespace stratagem
