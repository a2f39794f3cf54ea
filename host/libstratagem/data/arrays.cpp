// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/data/arrays.hpp"

#include <algorithm>
#include <limits>
#include <string_view>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "base/npy.hpp"
#include "base/safetensors.hpp"
#include "libstratagem/data/bytes.hpp"
#include "libstratagem/data/csv.hpp"
#include "libstratagem/data/idx.hpp"
#include "libstratagem/data/npz.hpp"

namespace stratagem {
namespace {

TensorPtr read_npy_file(const std::filesystem::path& file) {
  if (!is_gzip(file)) return read_npy(file);
  const std::vector<uint8_t> bytes = ByteReader(file).read(std::numeric_limits<uint64_t>::max());
  return read_npy(bytes, file.string());
}

bool holds(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Which of a file's arrays is meant: the one of that name, or of the role's, or the only one.
std::string choose(const std::vector<std::string>& names, const ArrayConfig& array, const std::string& role) {
  if (array.name) {
    if (holds(names, *array.name)) return *array.name;
    throw invalid_argument("no array \"", *array.name, "\" in ", array.path.string(), suggestion(*array.name, names));
  }
  if (holds(names, role)) return role;
  if (names.size() == 1) return names.front();
  throw invalid_argument("which array of ", array.path.string(), " are the ", role, R"(? Say so with {"path": ..., "name": ...})",
                         suggestion(role, names));
}

TensorPtr read_npz_array(const ArrayConfig& array, const char* role) {
  const NpzFile file(array.path);
  return file.read(choose(file.names(), array, role));
}

TensorPtr read_safetensors_array(const ArrayConfig& array, const char* role) {
  const SafetensorsFile file(Storage().open(array.path.string()));
  std::vector<std::string> names;
  for (const SafetensorsFile::Entry& entry : file.entries()) names.push_back(entry.name);
  return file.read(*file.find(choose(names, array, role)));
}

size_t column_of(const CsvTable& table, const std::string& name, const std::filesystem::path& file) {
  const auto found = std::find(table.names.begin(), table.names.end(), name);
  if (found != table.names.end()) return static_cast<size_t>(found - table.names.begin());
  if (table.names.empty())
    throw invalid_argument(file.string(), " has no row of names; a column can't be chosen by \"", name, '"');
  throw invalid_argument("no column \"", name, "\" in ", file.string(), suggestion(name, table.names));
}

TensorPtr read_csv_array(const ArrayConfig& array, std::string_view role, const ArrayConfig* other) {
  const CsvTable table = read_csv(array.path);
  std::vector<size_t> chosen;
  for (const std::string& name : array.columns) chosen.push_back(column_of(table, name, array.path));
  if (array.columns.empty()) {
    std::vector<size_t> others;
    if (other != nullptr && other->path == array.path) {
      for (const std::string& name : other->columns) others.push_back(column_of(table, name, array.path));
      if (others.empty()) {
        throw invalid_argument(array.path.string(),
                               R"( holds inputs and targets; say which columns are which with {"path": ..., "columns": [...]})");
      }
    }
    for (size_t column = 0; column < table.columns.size(); ++column) {
      if (std::find(others.begin(), others.end(), column) == others.end()) chosen.push_back(column);
    }
  }
  if (chosen.empty()) throw invalid_argument("no columns in ", array.path.string(), " for the ", role);
  const size_t num_rows = table.columns.front().size();
  if (role == "targets" && chosen.size() == 1 && table.is_whole[chosen.front()]) {
    TensorPtr labels = allocate_tensor(int64, {static_cast<int64_t>(num_rows)});
    std::transform(table.columns[chosen.front()].begin(), table.columns[chosen.front()].end(),
                   first_element<int64_t>(labels->view), [](double value) { return static_cast<int64_t>(value); });
    return labels;
  }
  TensorPtr result = allocate_tensor(float32, {static_cast<int64_t>(num_rows), static_cast<int64_t>(chosen.size())});
  auto* out = first_element<float>(result->view);
  for (size_t row = 0; row < num_rows; ++row) {
    for (const size_t column : chosen) *out++ = static_cast<float>(table.columns[column][row]);
  }
  return result;
}

}  // namespace

TensorPtr read_array(const std::string& format, const ArrayConfig& array, const char* role, const ArrayConfig* other) {
  TensorPtr read = format == "idx"           ? read_idx(array.path)
                   : format == "npy"         ? read_npy_file(array.path)
                   : format == "npz"         ? read_npz_array(array, role)
                   : format == "safetensors" ? read_safetensors_array(array, role)
                                             : read_csv_array(array, role, other);
  if (read->view.num_dims == 0)
    throw invalid_argument(array.path.string(), " holds one number without dimensions; samples lie along the first dimension");
  if (read->view.shape[0] == 0) throw invalid_argument("no samples in ", array.path.string());
  return read;
}

}  // namespace stratagem
