// SPDX-License-Identifier: Apache-2.0
//
// CSV files of numbers, plain or gzipped: a row per sample, a column per number; fields may be quoted (RFC 4180). The first row holds the
// columns' names where any of its fields is no number.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace stratagem {

struct CsvTable {
  std::vector<std::string> names;  ///< empty where the file has none
  std::vector<std::vector<double>> columns;
  std::vector<bool> is_whole;  ///< by column: every field is written as a whole number that a double holds exactly
};

/// Throws Error{INVALID_ARGUMENT} with file, row and column for a field that is no number, rows of different length, a quote that
/// stays open, and two columns of one name.
CsvTable read_csv(const std::filesystem::path& file);

}  // namespace stratagem
