// SPDX-License-Identifier: Apache-2.0
//
// Our files as they lie beside a test program: in a build folder, and in a pack that was made of one and carried to another machine.
#pragma once

#include <filesystem>
#include <string>

namespace stratagem::test {

/// ../lib/stratagem/`name` from the folder of this program.
inline std::string beside(const std::string& name) {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() / "lib" / "stratagem" / name).string();
}

}  // namespace stratagem::test
