// SPDX-License-Identifier: Apache-2.0
//
// NumPy's NPY format, versions 1.0 to 3.0: a magic number, a header that is a Python dict ({'descr': '<f4', 'fortran_order': False,
// 'shape': (3, 4)}), the data. Big-endian data is swapped, column-major data put in row-major order; what has no tensor type here
// (text, objects, structures, dates, long doubles) is refused by name.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "base/dlpack.hpp"

namespace stratagem {

struct NpyHeader {
  stg_dtype dtype{};
  bool is_swapped = false;  ///< big-endian
  bool is_fortran_order = false;
  std::vector<int64_t> shape;
  uint64_t data_offset_bytes = 0;  ///< from the start of the file
  uint64_t data_size_bytes = 0;
};

/// What the file is, without reading its data. The file's size must be exactly what the header says.
NpyHeader read_npy_header(const std::filesystem::path& path);
/// The array, row-major, in this machine's byte order, in new memory.
TensorPtr read_npy(const std::filesystem::path& path);
/// The same of a file in memory; `where` names it in errors.
TensorPtr read_npy(std::span<const uint8_t> file, const std::string& where);

/// What stands before the row-major data of such a tensor in an NPY file.
std::string npy_header(const stg_tensor_view& tensor);
/// Writes a host tensor as an NPY file: whole or not at all.
void write_npy(const std::filesystem::path& path, const stg_tensor_view& tensor);

}  // namespace stratagem
