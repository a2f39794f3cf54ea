// SPDX-License-Identifier: Apache-2.0
//
// Value trees on the C++ side.
//
//   Tree   an stg_tree with an owner: what crosses the ABI.
//   Value  a C++ tree to build and take apart; make_tree turns it into a Tree, take turns a Tree into it. No tensor data is copied.
//
// Trees of others are checked by validate() once, at the entry of the ABI; everything behind it relies on that.
#pragma once

#include <stratagem/value.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace stratagem {

struct TensorRelease {
  void operator()(stg_tensor* tensor) const noexcept {
    if (tensor->deleter != nullptr) tensor->deleter(tensor);
  }
};
using TensorPtr = std::unique_ptr<stg_tensor, TensorRelease>;

struct OpaqueRelease {
  void operator()(stg_opaque* object) const noexcept { object->release(object); }
};
using OpaquePtr = std::unique_ptr<stg_opaque, OpaqueRelease>;

/// Owns a tree, or views a borrowed one.
class Tree {
 public:
  Tree() = default;
  /// Takes over what `tree` owns.
  explicit Tree(stg_tree tree) : tree_(tree) {}
  Tree(Tree&& other) noexcept : tree_(std::exchange(other.tree_, {})) {}
  Tree& operator=(Tree&& other) noexcept {
    std::swap(tree_, other.tree_);
    return *this;
  }
  ~Tree() {
    if (tree_.release != nullptr) tree_.release(&tree_);
  }

  /// An argument of the ABI: a moved tree is taken over and the caller's struct zeroed; a borrowed one is viewed. Null: none.
  static Tree receive(stg_tree* argument) noexcept {
    if (argument == nullptr) return {};
    Tree tree{*argument};
    if (argument->release != nullptr) *argument = {};
    return tree;
  }
  /// A view of a tree that outlives it.
  static Tree view(const stg_value& root) noexcept { return Tree{stg_tree{root, nullptr, nullptr}}; }

  bool borrowed() const noexcept { return tree_.release == nullptr; }
  stg_value& root() noexcept { return tree_.root; }
  const stg_value& root() const noexcept { return tree_.root; }
  /// For a call that takes `stg_tree *`: the callee moves it out of here.
  stg_tree* argument() noexcept { return &tree_; }
  /// Gives the tree up, to an output of the ABI.
  stg_tree give() noexcept { return std::exchange(tree_, {}); }

 private:
  stg_tree tree_{};
};

struct Bytes {
  std::vector<uint8_t> data;
};

struct Value;
using List = std::vector<Value>;
struct Tuple {
  List items;
};
using Dict = std::vector<std::pair<std::string, Value>>;

struct Value {
  std::variant<std::monostate, bool, int64_t, double, std::string, Bytes, TensorPtr, OpaquePtr, List, Tuple, Dict> data;

  Value() = default;
  template <class T>
  // NOLINTNEXTLINE(google-explicit-constructor): a dict literal reads as one.
  Value(T value) : data(std::move(value)) {}
  Value(const char* text) : data(std::string(text)) {}  // NOLINT(google-explicit-constructor)
};

/// A list of the arguments. (A braced list would copy, and tensors don't.)
template <class... Items>
List make_list(Items&&... items) {
  List list;
  list.reserve(sizeof...(items));
  (list.emplace_back(std::forward<Items>(items)), ...);
  return list;
}

/// The tree as ABI memory. Consumes the value.
Tree make_tree(Value value);

/// Takes all leaves out of an owned tree (tensors and opaques change hands, strings are copied). Of a borrowed tree: opaques are
/// retained, and a tensor is an error, since nobody would own it; copy it first (dlpack.hpp).
Value take(Tree tree);

/// Where in a tree a value stands, as ["key"][0]; rendered only when an error needs it.
class KeyPath {
 public:
  KeyPath() = default;
  KeyPath(const KeyPath* parent, std::string_view key) : parent_(parent), key_(key), is_key_(true) {}
  KeyPath(const KeyPath* parent, uint64_t index) : parent_(parent), index_(index) {}
  /// "(root)" for the root.
  std::string text() const;

 private:
  const KeyPath* parent_ = nullptr;
  std::string_view key_;
  uint64_t index_ = 0;
  bool is_key_ = false;
};
inline std::ostream& operator<<(std::ostream& out, const KeyPath& path) { return out << path.text(); }

inline bool is_container(const stg_value& value) noexcept {
  return value.type == STG_LIST || value.type == STG_TUPLE || value.type == STG_DICT;
}
inline std::string_view text_of(stg_string text) noexcept { return {text.data == nullptr ? "" : text.data, text.size_bytes}; }
inline std::string_view text_of(const stg_value& value) noexcept { return {value.count == 0 ? "" : value.as.utf8, value.count}; }
inline stg_string to_abi(std::string_view text) noexcept { return {text.data(), text.size()}; }

/// "tensor", "dict", ...
std::string type_name(uint32_t type);

/// The value under `key` of a dict; null if there is none, or `value` is no dict.
stg_value* find(stg_value& value, std::string_view key) noexcept;
const stg_value* find(const stg_value& value, std::string_view key) noexcept;

/// Calls `visit` for each leaf, in order.
void for_each_leaf(stg_value& root, const std::function<void(const KeyPath&, stg_value&)>& visit);
void for_each_leaf(const stg_value& root, const std::function<void(const KeyPath&, const stg_value&)>& visit);

/// Checks a foreign tree: known types, pointers that must not be null, distinct keys, depth and number of nodes, every tensor by
/// check_tensor. `what` names it in the error ("batch").
void validate(const stg_value& root, std::string_view what);

}  // namespace stratagem
