// SPDX-License-Identifier: Apache-2.0
//
// Intra-op threads for one replica's thread. at::set_num_threads is no good for that: it also changes what every thread that is
// started later gets.
#pragma once

namespace stratagem {

/// LibTorch's operators use up to `num_threads` threads when the calling thread runs them; other threads are not affected. Does
/// nothing in a LibTorch that was built without OpenMP.
void set_thread_intra_op(int num_threads);

/// The same for as long as it lives; then the thread has its number back. 0: as it is.
class IntraOpScope {
 public:
  explicit IntraOpScope(int num_threads);
  IntraOpScope(const IntraOpScope&) = delete;
  IntraOpScope& operator=(const IntraOpScope&) = delete;
  ~IntraOpScope();

 private:
  int before_ = 0;
};

}  // namespace stratagem
