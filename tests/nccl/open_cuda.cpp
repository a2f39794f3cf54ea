// SPDX-License-Identifier: Apache-2.0
//
// usage: open_cuda [--after-libtorch]
//
// Opens CUDA's transport as a plugin does, from beside this program; prints its name or the error. --after-libtorch: after LibTorch has
// looked for its CUDA part.
#include <ATen/detail/CUDAHooksInterface.h>

#include <iostream>

#include "accelerator/accelerators.hpp"
#include "base/error.hpp"

int main(int argc, char**) {
  using namespace stratagem;
  if (argc > 1) at::detail::getCUDAHooks();
  try {
    const TransportApi& transport = accelerators().front().open();
    std::cout << "opened " << transport.name << "\n";
  } catch (const Error& error) {
    std::cout << code_name(error.code) << ": " << error.message << "\n";
  }
}
