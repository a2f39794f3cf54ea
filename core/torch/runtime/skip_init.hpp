// SPDX-License-Identifier: Apache-2.0
//
// Making a model whose values will be written over at once, without drawing them: most of the time that a constructor takes is random
// numbers.
//
// How: a second spare dispatch key (thread_generator.hpp tells of the first), included in the thread while the model is made, sees every
// operator. A random fill in place is left out, its storage noted, and all data pointers of that storage are refused from then on.
// What such tensors go through in place afterwards is left out too, views of them are made as ever, and whatever would read them fails.
// So a model is never made of values that aren't there: whoever gets an error here, or finds is_covered_by false, makes the model anew
// without this scope.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

namespace stratagem {

/// While it lives, the calling thread's random fills in place are left out. One per thread.
class __attribute__((visibility("default"))) SkipInit {
 public:
  SkipInit();
  SkipInit(const SkipInit&) = delete;
  SkipInit& operator=(const SkipInit&) = delete;
  ~SkipInit();

  /// Whether nothing is missing once `tensors`, each given once, are written: what was left out is theirs alone or gone, and no number
  /// was drawn (it would be another one than after the draws that were left out).
  bool is_covered_by(at::TensorList tensors) const;
  /// Whether the tensor's memory is refused.
  bool has_skipped(const at::Tensor& tensor) const;

  /// Whether the calling thread has such a scope, for the kernel; notes what it left out or did.
  static SkipInit* current();
  void note_skipped(const at::Tensor& tensor);
  void note_drawn() { has_drawn_ = true; }

 private:
  std::vector<c10::Storage> skipped_;
  bool has_drawn_ = false;
  c10::impl::IncludeDispatchKeyGuard included_;
};

}  // namespace stratagem
