// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/loop/predictions.hpp"

#include <minizip/zip.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "base/disk.hpp"
#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "base/npy.hpp"
#include "base/safetensors.hpp"

namespace stratagem {
namespace {

using NamedView = std::pair<std::string, stg_tensor_view>;

void write_npz(const std::filesystem::path& file, const std::vector<NamedView>& arrays) {
  std::vector<std::string> headers;
  for (const auto& [name, view] : arrays) headers.push_back(npy_header(view));
  disk::NewFile output(file);
  errno = 0;  // the library says only that it failed
  zipFile archive = zipOpen64(output.path().c_str(), APPEND_STATUS_CREATE);
  int status = archive == nullptr ? ZIP_ERRNO : ZIP_OK;
  for (size_t i = 0; i < arrays.size() && status == ZIP_OK; ++i) {
    const zip_fileinfo info{};
    const stg_tensor_view& view = arrays[i].second;
    const uint64_t size_bytes = static_cast<uint64_t>(numel(view)) * element_size_bytes(view.dtype);
    // Stored, not compressed, as numpy.savez does; ZIP64, whatever the size.
    status = zipOpenNewFileInZip64(archive, (arrays[i].first + ".npy").c_str(), &info, nullptr, 0, nullptr, 0, nullptr, 0, 0, 1);
    const auto write = [&](const char* data, uint64_t left_bytes) {
      constexpr uint64_t piece_bytes = uint64_t{1} << 30;
      for (; left_bytes != 0 && status == ZIP_OK;) {
        const uint64_t now_bytes = std::min(left_bytes, piece_bytes);
        status = zipWriteInFileInZip(archive, data, static_cast<unsigned>(now_bytes));
        data += now_bytes;
        left_bytes -= now_bytes;
      }
    };
    write(headers[i].data(), headers[i].size());
    write(first_element<const char>(view), size_bytes);
    if (status == ZIP_OK) status = zipCloseFileInZip(archive);
  }
  const int error_number = errno;
  if (archive != nullptr && zipClose(archive, nullptr) != ZIP_OK && status == ZIP_OK) status = ZIP_ERRNO;
  if (status != ZIP_OK) throw disk::errno_error(error_number != 0 ? error_number : EIO, "write", file);
  output.commit();
}

void write_safetensors_file(const std::filesystem::path& file, const std::vector<NamedView>& arrays) {
  std::vector<NamedTensor> tensors;
  for (const auto& [name, view] : arrays) tensors.push_back({name, &view});
  disk::NewFile output(file);
  write_safetensors([&](const void* data, uint64_t size_bytes) { output.append(data, size_bytes); }, tensors);
  output.commit();
}

}  // namespace

std::filesystem::path check_predictions_file(const std::filesystem::path& file) {
  namespace fs = std::filesystem;
  if (file.extension() != ".npz" && file.extension() != ".safetensors")
    throw invalid_argument("predictions are written to a file that ends in .npz or .safetensors, not to ", file.string());
  constexpr int most_links = 40;
  fs::path target = file;
  for (int i = 0; fs::is_symlink(fs::symlink_status(target)); ++i) {
    if (i == most_links) throw invalid_argument(file.string(), " is a link that leads to no file: over ", most_links, " links");
    target = target.parent_path() / fs::read_symlink(target);
  }
  const fs::file_status status = fs::symlink_status(target);
  if (fs::is_directory(status)) throw invalid_argument(target.string(), " is a folder; predictions are written to a file");
  if (fs::exists(status) && !fs::is_regular_file(status))
    throw invalid_argument(target.string(), " is no regular file; predictions are written to one, which is replaced as a whole");
  return target;
}

stg_tensor_view Predictions::Array::view() const {
  stg_tensor_view view{};
  view.data = const_cast<uint8_t*>(bytes.data());
  view.device = {STG_DEVICE_CPU, 0};
  view.num_dims = static_cast<int32_t>(shape.size());
  view.dtype = dtype;
  view.shape = const_cast<int64_t*>(shape.data());
  return view;
}

void Predictions::add(const stg_value& outputs, int64_t num_rows) {
  num_seen_ = 0;
  add_value("", outputs, num_rows);
  if (num_seen_ != arrays_.size()) {
    throw invalid_argument("predict_step gives ", num_seen_, " arrays for one batch and ", arrays_.size(),
                           " for another; each batch must give the same");
  }
  if (arrays_.empty()) throw invalid_argument("predict_step gives nothing to write: no tensor");
  is_first_batch_ = false;
}

void Predictions::add_value(const std::string& name, const stg_value& value, int64_t num_rows) {
  const std::string prefix = name.empty() ? "" : name + ".";
  switch (value.type) {
    case STG_DICT:
      for (uint64_t i = 0; i < value.count; ++i)
        add_value(prefix + std::string(text_of(value.as.entries[i].key)), value.as.entries[i].value, num_rows);
      return;
    case STG_LIST:
    case STG_TUPLE:
      for (uint64_t i = 0; i < value.count; ++i) add_value(prefix + std::to_string(i), value.as.items[i], num_rows);
      return;
    case STG_TENSOR:
      break;
    default:
      throw invalid_argument("predict_step gives a ", type_name(value.type), " as \"", name, "\"; only tensors can be written");
  }
  const stg_tensor_view& piece = value.as.tensor->view;
  if (piece.num_dims == 0 || piece.shape[0] != num_rows) {
    throw invalid_argument("predict_step gives \"", name, "\" of shape ", shape_text(piece), " for a batch of ", num_rows,
                           " samples; predictions have one row per sample");
  }
  Array& array = array_for(name.empty() ? "predictions" : name, piece);
  const TensorPtr row_major = is_contiguous(piece) ? nullptr : copy_tensor(piece);
  const auto* data = first_element<const uint8_t>(row_major == nullptr ? piece : row_major->view);
  const auto num_bytes = static_cast<uint64_t>(numel(piece)) * element_size_bytes(piece.dtype);
  if (same_dtype(array.dtype, piece.dtype)) {
    array.bytes.insert(array.bytes.end(), data, data + num_bytes);
  } else {
    // A bfloat16 is the upper half of a float32.
    for (uint64_t at = 0; at < num_bytes; at += 2) array.bytes.insert(array.bytes.end(), {0, 0, data[at], data[at + 1]});
  }
  array.shape[0] += num_rows;
}

Predictions::Array& Predictions::array_for(const std::string& name, const stg_tensor_view& piece) {
  ++num_seen_;
  const auto found = std::find_if(arrays_.begin(), arrays_.end(), [&](const Array& array) { return array.name == name; });
  if (found == arrays_.end()) {
    if (!is_first_batch_) throw invalid_argument("predict_step gives \"", name, "\", which it didn't give for the first batch");
    arrays_.push_back({name, piece.dtype, dtype_in_file(name, piece), {piece.shape, piece.shape + piece.num_dims}, {}});
    arrays_.back().shape[0] = 0;
    return arrays_.back();
  }
  const bool same_rows = static_cast<size_t>(piece.num_dims) == found->shape.size() &&
                         std::equal(found->shape.begin() + 1, found->shape.end(), piece.shape + 1);
  if (!same_rows || !same_dtype(found->given_dtype, piece.dtype)) {
    throw invalid_argument("predict_step gives \"", name, "\" as ", dtype_name(piece.dtype), " of shape ", shape_text(piece),
                           "; for batches before it was ", dtype_name(found->given_dtype), " with rows like those of ",
                           shape_text(found->view()));
  }
  return *found;
}

/// Told with the first batch, not after the last one, where the file can't hold it.
stg_dtype Predictions::dtype_in_file(const std::string& name, const stg_tensor_view& piece) {
  constexpr stg_dtype bfloat16 = {STG_DTYPE_BFLOAT, 16, 1};
  if (is_npz_ && same_dtype(piece.dtype, bfloat16)) {
    notes_.push_back(concat("the predictions \"", name,
                            "\" are bfloat16, which an .npz file can't hold; they are written as float32 ",
                            "(a .safetensors file keeps them)"));
    return float32;
  }
  try {
    if (is_npz_) {
      static_cast<void>(npy_header(piece));
    } else {
      write_safetensors([](const void*, uint64_t) {}, {{name, &piece}});
    }
  } catch (const Error& error) {
    throw invalid_argument("predict_step gives \"", name, "\" as ", dtype_name(piece.dtype), ": ", error.message,
                           is_npz_ ? "" : "; an .npz file holds complex128");
  }
  return piece.dtype;
}

void Predictions::write(const std::filesystem::path& file) const {
  std::vector<NamedView> views;
  for (const Array& array : arrays_) views.emplace_back(array.name, array.view());
  const std::filesystem::path target = check_predictions_file(file);
  is_npz_ ? write_npz(target, views) : write_safetensors_file(target, views);
}

Json Predictions::shapes() const {
  Json shapes = Json::object();
  for (const Array& array : arrays_) shapes[array.name] = array.shape;
  return shapes;
}

}  // namespace stratagem
