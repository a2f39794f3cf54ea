// SPDX-License-Identifier: Apache-2.0
#include "model/scope.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "torch/dtypes.hpp"

namespace stratagem::sdk {

namespace {

// CUDA's handles for the legacy default stream and for the thread's own, for which LibTorch has no name without CUDA's headers.
constexpr uintptr_t cuda_legacy_stream = 1, cuda_stream_per_thread = 2;

}  // namespace

StreamScope::StreamScope(c10::Device device, const stg_stream& given) {
  if (device.is_cpu() || given.device.kind == STG_DEVICE_NONE) return;
  if (to_device(given.device) != device) {
    throw invalid_argument("stg_step_context.stream is on ", device_name(given.device), "; the replica is on ", device.str());
  }
  const c10::impl::VirtualGuardImpl impl(device.type());
  const auto handle =
      given.kind == STG_STREAM_PER_THREAD_DEFAULT ? cuda_stream_per_thread : reinterpret_cast<uintptr_t>(given.handle);
  if (handle == reinterpret_cast<uintptr_t>(impl.getStreamNativeHandle(impl.getStream(device)))) return;
  // LibTorch has no function for it that serves all devices; where it knows foreign streams, their id is their handle.
  const bool is_default = handle == 0 || (device.is_cuda() && handle == cuda_legacy_stream);
  guard_.emplace(is_default ? impl.getDefaultStream(device)
                            : c10::Stream(c10::Stream::UNSAFE, device, static_cast<c10::StreamId>(handle)));
}

}  // namespace stratagem::sdk
