// SPDX-License-Identifier: Apache-2.0
//
// Which NVIDIA GPUs there are, asked of the driver alone. Not of CUDA's runtime or LibTorch: which of their libraries to load is
// decided by the answer, and a machine without a GPU shall neither wait for them nor need them.
#pragma once

#include <string>
#include <vector>

namespace stratagem {

struct Gpus {
  enum class State { found, no_driver, broken_driver, no_gpu };
  State state = State::no_driver;
  std::vector<std::string> names;  ///< by index, as CUDA_VISIBLE_DEVICES leaves them
  int cuda_version = 0;            ///< the newest CUDA that the driver has: 13020 for 13.2; 0: not known
  std::string missing;             ///< why there are none, and the way out; empty where there are
};

/// Opens the driver's library, which stays open, and asks it. Takes milliseconds without a driver; with one it is initialised for this
/// process. Any thread.
Gpus find_gpus(const char* driver_library = "libcuda.so.1");

/// "13.2" of 13020.
std::string cuda_version_text(int version);

}  // namespace stratagem
