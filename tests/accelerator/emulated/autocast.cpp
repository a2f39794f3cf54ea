// SPDX-License-Identifier: Apache-2.0
//
// Autocast for the emulated devices: LibTorch's lists of operators, as CUDA has them.
#include <ATen/autocast_mode.h>

// Where the macros that LibTorch has for it can be used.
namespace at::autocast {

namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

#define EMULATED_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define EMULATED_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define EMULATED_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define EMULATED_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(EMULATED_LOWER)
  AT_FORALL_FP32(EMULATED_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(EMULATED_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(EMULATED_PROMOTE)
}

}  // namespace

}  // namespace at::autocast
