// SPDX-License-Identifier: Apache-2.0
//
// In place of core/accelerator/accelerators.cpp: the emulated one alone.
#include "accelerator/accelerators.hpp"

#include <array>

#include "accelerator/emulated/emulated.hpp"

namespace stratagem {

std::span<const Accelerator> accelerators() {
  static constexpr std::array<Accelerator, 1> list{
      {{"emulated", STG_DEVICE_EXTENSION, c10::DeviceType::PrivateUse1, &emulated::find, &emulated::open}}};
  return list;
}

}  // namespace stratagem
