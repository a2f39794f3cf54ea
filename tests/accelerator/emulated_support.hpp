// SPDX-License-Identifier: Apache-2.0
//
// What the tests of the emulated accelerator share. LibTorch has a CHECK, too: its headers first, then Catch's.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#undef CHECK

#include <string>
#include <vector>

#include "accelerator/emulated/emulated.hpp"
#include "support/catch.hpp"

namespace {

inline at::Device device(int index) { return {at::kPrivateUse1, static_cast<at::DeviceIndex>(index)}; }

inline at::TensorOptions on(int index) { return at::TensorOptions().device(device(index)); }

inline c10::Stream new_stream(int index) {
  return c10::impl::VirtualGuardImpl(at::kPrivateUse1).getStreamFromGlobalPool(device(index), false);
}

inline c10::Stream default_stream(int index) { return c10::Stream(c10::Stream::DEFAULT, device(index)); }

/// From what is queued on `from` to what will be on `to`.
inline void order(const c10::Stream& from, const c10::Stream& to) {
  c10::Event event(at::kPrivateUse1);
  event.record(from);
  event.block(to);
}

inline void synchronize(int index) {
  c10::impl::VirtualGuardImpl(at::kPrivateUse1).synchronizeDevice(static_cast<at::DeviceIndex>(index));
}

inline at::Tensor on_host(const at::Tensor& tensor) { return tensor.to(at::kCPU); }

/// Nothing is left of the test before, and nothing is left to the next one.
struct Fresh {
  Fresh() { clear(); }
  ~Fresh() { clear(); }
  static void clear() {
    emulated::set_delays(0, std::chrono::microseconds(0));
    emulated::release_ranks();
    emulated::heal();
    emulated::fail_transport_call(0, "");
    emulated::drain();
    emulated::take_reports();
    emulated::take_transport_log();
  }
};

/// All reports in one text.
inline std::string reports() {
  std::string all;
  for (const std::string& report : emulated::take_reports()) all += report + "\n";
  return all;
}

}  // namespace
