// SPDX-License-Identifier: Apache-2.0
//
// Batches and outputs as a model's author sees them: a tree with at::Tensor leaves.
//
//   const at::Tensor images = batch["inputs"].tensor(at::kByte, {-1, 28, 28});
//   return {{"loss", loss}, {"accuracy", accuracy}};
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/value.hpp"

namespace stratagem {

class TensorTree {
 public:
  using List = std::vector<TensorTree>;
  struct Tuple {
    List items;
  };
  using Entry = std::pair<std::string, TensorTree>;
  using Dict = std::vector<Entry>;
  using Opaque = std::shared_ptr<stg_opaque>;

  TensorTree() = default;
  // A tree is written as its leaves, so the constructors convert.
  TensorTree(at::Tensor tensor) : data(std::move(tensor)) {}  // NOLINT(google-explicit-constructor)
  TensorTree(bool value) : data(value) {}                     // NOLINT(google-explicit-constructor)
  TensorTree(int value) : data(int64_t{value}) {}             // NOLINT(google-explicit-constructor)
  TensorTree(int64_t value) : data(value) {}                  // NOLINT(google-explicit-constructor)
  TensorTree(double value) : data(value) {}                   // NOLINT(google-explicit-constructor)
  TensorTree(const char* text) : data(std::string(text)) {}   // NOLINT(google-explicit-constructor)
  TensorTree(std::string text) : data(std::move(text)) {}     // NOLINT(google-explicit-constructor)
  TensorTree(Bytes bytes) : data(std::move(bytes)) {}         // NOLINT(google-explicit-constructor)
  TensorTree(Opaque object) : data(std::move(object)) {}      // NOLINT(google-explicit-constructor)
  TensorTree(List items) : data(std::move(items)) {}          // NOLINT(google-explicit-constructor)
  TensorTree(Tuple items) : data(std::move(items)) {}         // NOLINT(google-explicit-constructor)
  TensorTree(Dict entries) : data(std::move(entries)) {}      // NOLINT(google-explicit-constructor)
  TensorTree(std::initializer_list<Entry> entries) : data(Dict(entries)) {}

  std::variant<std::monostate, bool, int64_t, double, std::string, Bytes, at::Tensor, Opaque, List, Tuple, Dict> data;
};

/// What a step of a model gives back.
struct StepOutput {
  StepOutput(at::Tensor loss) : outputs(std::move(loss)) {}  // NOLINT(google-explicit-constructor)
  StepOutput(TensorTree tree) : outputs(std::move(tree)) {}  // NOLINT(google-explicit-constructor)
  StepOutput(std::initializer_list<TensorTree::Entry> entries) : outputs(entries) {}

  /// How much this share counts, where that is not its number of rows: a number, or a 0-dim tensor on the device. The loss is then a
  /// mean over it.
  StepOutput over(TensorTree new_denominator) && {
    denominator = std::move(new_denominator);
    return std::move(*this);
  }

  TensorTree outputs;      ///< in training: the loss, a 0-dim tensor, or a dict with one under "loss"
  TensorTree denominator;  ///< none: the rows count
};

/// A place in a batch. What is not as asked for is an error that names the place. Must not outlive the batch.
class Batch {
 public:
  explicit Batch(const TensorTree& tree, std::string path = "batch") : tree_(&tree), path_(std::move(path)) {}

  Batch operator[](std::string_view key) const;
  Batch operator[](size_t index) const;
  bool contains(std::string_view key) const;
  /// Entries of a dict, list or tuple.
  size_t size() const;

  at::Tensor tensor() const;
  /// Also checks element type and shape; -1 stands for any size.
  at::Tensor tensor(at::ScalarType dtype, at::IntArrayRef shape) const;
  /// A bool, an integer or a double.
  double number() const;
  std::string text() const;

  const TensorTree& tree() const { return *tree_; }
  /// batch["inputs"][0]
  const std::string& path() const { return path_; }

 private:
  const TensorTree* tree_;
  std::string path_;
};

namespace sdk {

/// Tensors that nobody may write to, and where they stand.
using ReadOnly = std::vector<std::pair<std::string, at::Tensor>>;

/// Takes a tree of the ABI over: tensors change hands without a copy, out of a borrowed tree they are views. Validated before.
/// Floating tensors become `floating_dtype` where that is given. `read_only` is told of those that were imported as they are.
TensorTree import_tree(Tree tree, std::optional<at::ScalarType> floating_dtype, ReadOnly& read_only);

/// The outputs as a tree of the ABI. A tensor that shares memory with `borrowed` (null: nothing is borrowed) is copied.
Tree export_tree(const TensorTree& outputs, const TensorTree* borrowed);

/// Calls `visit` with path and tensor for each tensor in the tree.
void for_each_tensor(const TensorTree& tree, const std::string& path,
                     const std::function<void(const std::string&, const at::Tensor&)>& visit);

}  // namespace sdk
}  // namespace stratagem
