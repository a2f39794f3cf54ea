// SPDX-License-Identifier: Apache-2.0
//
// NPZ: a ZIP archive of NPY files, as numpy.savez and savez_compressed write it. The archive's central directory says what is where, so
// one that was written to a pipe is read, too.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "base/value.hpp"

namespace stratagem {

class NpzFile {
 public:
  /// Throws Error{INVALID_ARGUMENT or DATA_LOSS} with the file where it is no archive.
  explicit NpzFile(std::filesystem::path path);

  /// The arrays' names, without ".npy", in the archive's order.
  const std::vector<std::string>& names() const { return names_; }
  /// The array, row-major, in new memory; requires: one of the names. The archive's check sum must be right.
  TensorPtr read(const std::string& name) const;

 private:
  std::filesystem::path path_;
  std::vector<std::string> names_;
};

}  // namespace stratagem
