// SPDX-License-Identifier: Apache-2.0
//
// IDX, the format of MNIST and its successors: two zero bytes, a type code, the number of dimensions, each dimension as a big-endian
// uint32, then the elements, big-endian. Plain or gzipped.
#pragma once

#include <filesystem>

#include "base/value.hpp"

namespace stratagem {

/// The array, row-major, in this machine's byte order. Throws Error{INVALID_ARGUMENT or DATA_LOSS} with the file and what was expected and found.
TensorPtr read_idx(const std::filesystem::path& file);

}  // namespace stratagem
