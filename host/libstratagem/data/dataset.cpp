// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/data/dataset.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "libstratagem/data/arrays.hpp"

namespace stratagem {
namespace {

template <class T>
void copy_labels(const stg_tensor_view& view, const std::string& file, int64_t* out) {
  const T* labels = first_element<const T>(view);
  for (int64_t i = 0; i < view.shape[0]; ++i) {
    if (labels[i] < 0 || !std::in_range<int64_t>(labels[i]))
      throw invalid_argument(file, ": label ", i, " is ", +labels[i], "; labels count from 0, and are below 2^63");
    out[i] = static_cast<int64_t>(labels[i]);
  }
}

template <class Signed, class Unsigned>
void copy_labels_of_either(const stg_tensor_view& view, const std::string& file, int64_t* out) {
  view.dtype.code == STG_DTYPE_INT ? copy_labels<Signed>(view, file, out) : copy_labels<Unsigned>(view, file, out);
}

/// One whole number per sample is a class label: int64 for the model, whatever the file's width, and never negative.
TensorPtr as_labels(TensorPtr array, const std::string& file) {
  const stg_tensor_view& view = array->view;
  const bool whole = view.dtype.code == STG_DTYPE_INT || view.dtype.code == STG_DTYPE_UINT;
  if (!whole || view.num_dims != 1) return array;
  TensorPtr labels = allocate_tensor(int64, {view.shape[0]});
  auto* out = first_element<int64_t>(labels->view);
  switch (view.dtype.bits) {
    case 8:
      copy_labels_of_either<int8_t, uint8_t>(view, file, out);
      break;
    case 16:
      copy_labels_of_either<int16_t, uint16_t>(view, file, out);
      break;
    case 32:
      copy_labels_of_either<int32_t, uint32_t>(view, file, out);
      break;
    default:
      copy_labels_of_either<int64_t, uint64_t>(view, file, out);
  }
  return labels;
}

uint64_t row_bytes_of(const stg_tensor_view& view) {
  return static_cast<uint64_t>(numel(view) / view.shape[0]) * element_size_bytes(view.dtype);
}

TensorPtr gather(const stg_tensor_view& array, std::span<const int64_t> rows) {
  std::vector<int64_t> shape(shape_of(array).begin(), shape_of(array).end());
  shape.front() = static_cast<int64_t>(rows.size());
  TensorPtr tensor = allocate_tensor(array.dtype, std::move(shape));
  const uint64_t row_bytes = row_bytes_of(array);
  const auto* from = first_element<const uint8_t>(array);
  auto* out = first_element<uint8_t>(tensor->view);
  for (const int64_t row : rows) {
    if (row_bytes != 0) std::memcpy(out, from + static_cast<uint64_t>(row) * row_bytes, row_bytes);
    out += row_bytes;
  }
  return tensor;
}

}  // namespace

Dataset::Dataset(const DatasetConfig& config)
    : inputs_(read_array(config.format, config.inputs, "inputs", config.targets ? &*config.targets : nullptr)) {
  if (config.targets) {
    targets_ = read_array(config.format, *config.targets, "targets", &config.inputs);
    if (targets_->view.shape[0] != inputs_->view.shape[0]) {
      throw invalid_argument("inputs and targets differ in length: ", inputs_->view.shape[0], " samples in ",
                             config.inputs.path.string(), ", ", targets_->view.shape[0], " in ", config.targets->path.string());
    }
    targets_ = as_labels(std::move(targets_), config.targets->path.string());
  }
  num_samples_ = std::min(inputs_->view.shape[0], config.limit.value_or(std::numeric_limits<int64_t>::max()));
}

Dataset::Dataset(const DatasetConfig& config, std::shared_ptr<DataSource> source)
    : source_(std::move(source)),
      num_samples_(std::min(source_->num_samples(), config.limit.value_or(std::numeric_limits<int64_t>::max()))),
      reads_ahead_(source_->any_thread()) {}

Tree Dataset::batch(std::span<const int64_t> rows) const {
  if (source_ != nullptr) return source_->read(rows);
  Dict dict;
  dict.emplace_back("inputs", gather(inputs_->view, rows));
  if (targets_) dict.emplace_back("targets", gather(targets_->view, rows));
  return make_tree(std::move(dict));
}

int64_t num_batches(int64_t num_samples, int64_t batch_size) {
  return num_samples / batch_size + (num_samples % batch_size != 0 ? 1 : 0);
}

}  // namespace stratagem
