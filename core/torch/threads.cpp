// SPDX-License-Identifier: Apache-2.0
#include "torch/threads.hpp"

#include <ATen/Parallel.h>
#include <dlfcn.h>

namespace stratagem {

namespace {

using SetNumThreads = void (*)(int);

// The function of the very OpenMP library that LibTorch is linked to: the process may hold another one besides.
SetNumThreads find_omp_set_num_threads() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&at::get_num_threads), &info) == 0) return nullptr;
  void* libtorch = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  if (libtorch == nullptr) return nullptr;
  auto* found = reinterpret_cast<SetNumThreads>(dlsym(libtorch, "omp_set_num_threads"));
  dlclose(libtorch);
  return found;
}

}  // namespace

void set_thread_intra_op(int num_threads) {
  static const SetNumThreads omp_set_num_threads = find_omp_set_num_threads();
  // LibTorch sets each thread's number at its first use there; after this call it won't come again.
  at::get_num_threads();
  if (omp_set_num_threads != nullptr) omp_set_num_threads(num_threads);
}

IntraOpScope::IntraOpScope(int num_threads) {
  if (num_threads == 0) return;
  const int before = at::get_num_threads();
  if (before == num_threads) return;
  set_thread_intra_op(num_threads);
  before_ = before;
}

IntraOpScope::~IntraOpScope() {
  if (before_ != 0) set_thread_intra_op(before_);
}

}  // namespace stratagem
