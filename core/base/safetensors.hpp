// SPDX-License-Identifier: Apache-2.0
//
// The safetensors format: 8 bytes with the header's length, a header in JSON (name -> dtype, shape, offsets; "__metadata__" ->
// texts), then the data of all tensors, without gaps.
//
// We write the header in the given order, and the data with the widest elements first (within a width in the given order): so every
// tensor is aligned for its type in the file, as PyTorch's reader needs it, and the same tensors give the same bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/dlpack.hpp"
#include "base/storage.hpp"

namespace stratagem {

struct NamedTensor {
  std::string name;
  const stg_tensor_view* tensor;  ///< in host memory; any strides
};

struct WrittenFile {
  uint64_t size_bytes = 0;
  std::string checksum;  ///< of the whole file, see checksum.hpp
};

/// Gives the file's bytes to `append`, piece by piece, tensor by tensor (a strided one is copied while it is written). Names must differ.
WrittenFile write_safetensors(const std::function<void(const void* data, uint64_t size_bytes)>& append,
                              const std::vector<NamedTensor>& tensors, const std::map<std::string, std::string>& metadata = {});
/// The same as `file` of the transaction.
WrittenFile write_safetensors(Transaction& transaction, const std::string& file, const std::vector<NamedTensor>& tensors,
                              const std::map<std::string, std::string>& metadata = {});

/// A safetensors file of whoever's making: the header is checked in full before anything is allocated for a tensor.
class SafetensorsFile {
 public:
  struct Entry {
    std::string name;
    stg_dtype dtype{};
    std::vector<int64_t> shape;
    uint64_t offset_bytes = 0;  ///< from the start of the file
    uint64_t size_bytes = 0;
  };

  /// STG_DATA_LOSS, with the path and the numbers, for a file that is cut off, damaged, or something else.
  explicit SafetensorsFile(StorageFile file);

  const std::string& path() const { return file_.path(); }
  /// In the header's order.
  const std::vector<Entry>& entries() const { return entries_; }
  /// Null if there is none of that name.
  const Entry* find(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  /// The tensor, in new host memory.
  TensorPtr read(const Entry& entry) const;

 private:
  StorageFile file_;
  std::vector<Entry> entries_;
  std::unordered_map<std::string_view, const Entry*> by_name_;  // views of entries_' names
  std::map<std::string, std::string> metadata_;
};

}  // namespace stratagem
