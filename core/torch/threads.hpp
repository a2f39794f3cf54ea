// SPDX-License-Identifier: Apache-2.0
//
// Intra-op threads for one replica's thread. at::set_num_threads is no good for that: it also changes what every thread that is
// started later gets.
#pragma once

namespace stratagem {

/// LibTorch's operators use up to `num_threads` threads when the calling thread runs them; other threads are not affected. Does
/// nothing in a LibTorch that was built without OpenMP.
void set_thread_intra_op(int num_threads);

}  // namespace stratagem
