// SPDX-License-Identifier: Apache-2.0
//
// Arrays in files, as a config names them.
#pragma once

#include <string>

#include "base/value.hpp"
#include "libstratagem/config/config.hpp"

namespace stratagem {

/// The array, row-major, samples along the first dimension. `role` ("inputs", "targets") is the name that it has in a file of several
/// arrays, where the config gives none. Of a CSV file: inputs are float32 (rows, columns), all columns but those of `other` in the same
/// file; targets of one column of whole numbers are int64 (rows), others float32 (rows, columns). Throws Error{INVALID_ARGUMENT or
/// DATA_LOSS} with the file and the reason.
TensorPtr read_array(const std::string& format, const ArrayConfig& array, const char* role, const ArrayConfig* other);

}  // namespace stratagem
