// SPDX-License-Identifier: Apache-2.0
//
// What predict_step gives, batch after batch, joined along the first dimension and written to a file.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "base/value.hpp"
#include "libstratagem/config/json_text.hpp"

namespace stratagem {

/// Whether predictions can be written to a file of that name: .npz or .safetensors, a regular one or none yet. Throws
/// Error{INVALID_ARGUMENT} otherwise. Returns where they will stand: where the file is a link, its target.
std::filesystem::path check_predictions_file(const std::filesystem::path& file);

class Predictions {
 public:
  /// `file`: where they will be written, which decides what can be kept.
  explicit Predictions(const std::filesystem::path& file) : is_npz_(file.extension() == ".npz") {}

  /// Takes the outputs of a step on `num_rows` samples, in host memory: tensors with a row per sample. A bare tensor is called
  /// "predictions", others by their keys ("logits", "boxes.0"). Throws Error{INVALID_ARGUMENT} with name and place for anything else, and
  /// where a batch gives other arrays than the first.
  void add(const stg_value& outputs, int64_t num_rows);
  /// Writes the file (where it is a link, its target): whole or not at all.
  void write(const std::filesystem::path& file) const;
  /// What a user should know about the file, in sentences.
  const std::vector<std::string>& notes() const { return notes_; }
  /// {"logits": [10000, 10]}
  Json shapes() const;

 private:
  struct Array {
    std::string name;
    stg_dtype given_dtype{};
    stg_dtype dtype{};  // in the file: an NPZ file has no bfloat16, and float32 holds each of its numbers
    std::vector<int64_t> shape;
    std::vector<uint8_t> bytes;
    stg_tensor_view view() const;
  };
  void add_value(const std::string& name, const stg_value& value, int64_t num_rows);
  Array& array_for(const std::string& name, const stg_tensor_view& piece);

  stg_dtype dtype_in_file(const std::string& name, const stg_tensor_view& piece);

  bool is_npz_;
  std::vector<Array> arrays_;
  std::vector<std::string> notes_;
  size_t num_seen_ = 0;  // of this batch
  bool is_first_batch_ = true;
};

}  // namespace stratagem
