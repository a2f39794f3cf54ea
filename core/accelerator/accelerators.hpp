// SPDX-License-Identifier: Apache-2.0
//
// The kinds of accelerators that the plugins know. A test build links another file in place of accelerators.cpp, which adds the
// emulated one.
#pragma once

#include <c10/core/DeviceType.h>

#include <span>
#include <string>
#include <vector>

#include "accelerator/transport.hpp"

namespace stratagem {

struct Accelerator {
  const char* name;      ///< as a config says it: "cuda"
  uint32_t device_kind;  ///< STG_DEVICE_*
  c10::DeviceType torch_type;

  struct Found {
    std::vector<std::string> names;  ///< of the devices, by index
    std::string missing;             ///< why there are none, and what to do; empty where there are
  };
  /// Looks for devices, without a call of LibTorch.
  Found (*find)();
  /// Opens the transport, once per process: before the first call of LibTorch. Throws STG_FAILED_PRECONDITION with what is missing.
  const TransportApi& (*open)();
};

std::span<const Accelerator> accelerators();

}  // namespace stratagem
