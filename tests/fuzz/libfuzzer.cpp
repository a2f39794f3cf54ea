// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer's entry. FUZZ_TARGET, by the compiler's command line, is the target's name.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "targets.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size_bytes);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size_bytes) {
  for (const stratagem::fuzz::Target& target : stratagem::fuzz::targets) {
    if (std::string_view(target.name) == FUZZ_TARGET) stratagem::fuzz::run(target, {data, size_bytes});
  }
  return 0;
}
