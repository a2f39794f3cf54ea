// SPDX-License-Identifier: Apache-2.0
#include "base/value.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <unordered_set>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "base/overloaded.hpp"

namespace stratagem {

namespace {

// What a tree of ours is released with: the C++ value keeps strings and bytes alive, the arrays hold the nodes.
struct TreeOwner {
  Value value;
  std::vector<std::unique_ptr<stg_value[]>> items;
  std::vector<std::unique_ptr<stg_entry[]>> entries;
};

void release_leaves(stg_value& value) {
  switch (value.type) {
    case STG_TENSOR:
      TensorRelease{}(value.as.tensor);
      break;
    case STG_OPAQUE:
      OpaqueRelease{}(value.as.opaque);
      break;
    case STG_LIST:
    case STG_TUPLE:
      for (uint32_t i = 0; i < value.count; ++i) release_leaves(value.as.items[i]);
      break;
    case STG_DICT:
      for (uint32_t i = 0; i < value.count; ++i) release_leaves(value.as.entries[i].value);
      break;
    default:
      break;
  }
}

void release_tree(stg_tree* self) {
  release_leaves(self->root);
  delete static_cast<TreeOwner*>(self->owner);
}

uint32_t count_of(size_t size) {
  if (size > std::numeric_limits<uint32_t>::max()) {
    throw Error{STG_OUT_OF_RANGE,
                concat("a value of ", size, " bytes or entries is over the limit of 2^32 - 1; put it into a tensor")};
  }
  return static_cast<uint32_t>(size);
}

stg_value node(uint32_t type, uint32_t count = 0) {
  stg_value value{};
  value.type = type;
  value.count = count;
  return value;
}

stg_value build(Value& value, TreeOwner& owner);

stg_value build_items(uint32_t type, List& list, TreeOwner& owner) {
  stg_value out = node(type, count_of(list.size()));
  stg_value* items = owner.items.emplace_back(std::make_unique<stg_value[]>(list.size())).get();
  for (size_t i = 0; i < list.size(); ++i) items[i] = build(list[i], owner);
  out.as.items = items;
  return out;
}

stg_value build_entries(Dict& dict, TreeOwner& owner) {
  stg_value out = node(STG_DICT, count_of(dict.size()));
  stg_entry* entries = owner.entries.emplace_back(std::make_unique<stg_entry[]>(dict.size())).get();
  for (size_t i = 0; i < dict.size(); ++i) entries[i] = {to_abi(dict[i].first), build(dict[i].second, owner)};
  out.as.entries = entries;
  return out;
}

stg_value build(Value& value, TreeOwner& owner) {
  return std::visit(Overloaded{
                        [](std::monostate) { return node(STG_NONE); },
                        [](bool b) {
                          stg_value out = node(STG_BOOL);
                          out.as.i64 = b ? 1 : 0;
                          return out;
                        },
                        [](int64_t i) {
                          stg_value out = node(STG_INT64);
                          out.as.i64 = i;
                          return out;
                        },
                        [](double d) {
                          stg_value out = node(STG_DOUBLE);
                          out.as.f64 = d;
                          return out;
                        },
                        [](std::string& s) {
                          stg_value out = node(STG_STRING, count_of(s.size()));
                          out.as.utf8 = s.data();
                          return out;
                        },
                        [](Bytes& b) {
                          stg_value out = node(STG_BYTES, count_of(b.data.size()));
                          out.as.bytes = b.data.data();
                          return out;
                        },
                        [](TensorPtr& t) {
                          stg_value out = node(STG_TENSOR);
                          out.as.tensor = t.get();
                          return out;
                        },
                        [](OpaquePtr& o) {
                          stg_value out = node(STG_OPAQUE);
                          out.as.opaque = o.get();
                          return out;
                        },
                        [&](List& list) { return build_items(STG_LIST, list, owner); },
                        [&](Tuple& tuple) { return build_items(STG_TUPLE, tuple.items, owner); },
                        [&](Dict& dict) { return build_entries(dict, owner); },
                    },
                    value.data);
}

// From here on the tree's release owns tensors and opaques, so that a receiver can take single leaves.
void give_up_leaves(Value& value) {
  std::visit(Overloaded{
                 [](TensorPtr& t) { static_cast<void>(t.release()); },
                 [](OpaquePtr& o) { static_cast<void>(o.release()); },
                 [](List& list) { std::for_each(list.begin(), list.end(), give_up_leaves); },
                 [](Tuple& tuple) { std::for_each(tuple.items.begin(), tuple.items.end(), give_up_leaves); },
                 [](Dict& dict) {
                   for (auto& [key, item] : dict) give_up_leaves(item);
                 },
                 [](auto&) {},
             },
             value.data);
}

Value take_value(stg_value& value, bool borrowed, const KeyPath& path) {
  switch (value.type) {
    case STG_BOOL:
      return value.as.i64 != 0;
    case STG_INT64:
      return value.as.i64;
    case STG_DOUBLE:
      return value.as.f64;
    case STG_STRING:
      return std::string(text_of(value));
    case STG_BYTES:
      return Bytes{{value.as.bytes, value.as.bytes + value.count}};
    case STG_TENSOR: {
      if (borrowed) throw internal("a borrowed tensor at ", path.text(), " can't change hands");
      TensorPtr tensor{value.as.tensor};
      value = {};
      return tensor;
    }
    case STG_OPAQUE: {
      if (borrowed) value.as.opaque->retain(value.as.opaque);
      OpaquePtr object{value.as.opaque};
      if (!borrowed) value = {};
      return object;
    }
    case STG_LIST:
    case STG_TUPLE: {
      List items;
      items.reserve(value.count);
      for (uint32_t i = 0; i < value.count; ++i) items.push_back(take_value(value.as.items[i], borrowed, {&path, uint64_t{i}}));
      if (value.type == STG_TUPLE) return Tuple{std::move(items)};
      return items;
    }
    case STG_DICT: {
      Dict dict;
      dict.reserve(value.count);
      for (uint32_t i = 0; i < value.count; ++i) {
        stg_entry& entry = value.as.entries[i];
        dict.emplace_back(text_of(entry.key), take_value(entry.value, borrowed, {&path, text_of(entry.key)}));
      }
      return dict;
    }
    default:
      return {};
  }
}

template <class V, class Visit>
void walk_leaves(V& value, const KeyPath& path, const Visit& visit) {
  if (value.type == STG_DICT) {
    for (uint32_t i = 0; i < value.count; ++i) {
      walk_leaves<V>(value.as.entries[i].value, {&path, text_of(value.as.entries[i].key)}, visit);
    }
  } else if (is_container(value)) {
    for (uint32_t i = 0; i < value.count; ++i) walk_leaves<V>(value.as.items[i], {&path, uint64_t{i}}, visit);
  } else {
    visit(path, value);
  }
}

class Validator {
 public:
  explicit Validator(std::string_view what) : what_(what) {}

  void visit(const stg_value& value, const KeyPath& path, uint32_t depth) {
    if (++num_nodes_ > STG_MAX_TREE_NODES) fail(path, "has more than ", STG_MAX_TREE_NODES, " nodes (a cycle?)");
    if (depth > STG_MAX_TREE_DEPTH) fail(path, "is deeper than ", STG_MAX_TREE_DEPTH, " levels (a cycle?)");
    switch (value.type) {
      case STG_BOOL:
        require(value.as.i64 == 0 || value.as.i64 == 1, path, "is a bool of ", value.as.i64, "; it must be 0 or 1");
        return;
      case STG_NONE:
      case STG_INT64:
      case STG_DOUBLE:
        return;
      case STG_STRING:
      case STG_BYTES:
        require(value.count == 0 || value.as.utf8 != nullptr, path, "has a null pointer with a size");
        return;
      case STG_TENSOR:
        require(value.as.tensor != nullptr, path, "is a null tensor");
        check_tensor(*value.as.tensor, what_, path);
        return;
      case STG_OPAQUE:
        require(value.as.opaque != nullptr, path, "is a null opaque object");
        require(value.as.opaque->struct_size >= STG_OPAQUE_MIN_SIZE && value.as.opaque->struct_size <= STG_MAX_STRUCT_SIZE_BYTES,
                path, "is an opaque object of struct_size ", value.as.opaque->struct_size, "; expected at least ",
                STG_OPAQUE_MIN_SIZE);
        require(value.as.opaque->retain != nullptr && value.as.opaque->release != nullptr, path,
                "is an opaque object without retain and release");
        return;
      case STG_LIST:
      case STG_TUPLE:
        require(value.count == 0 || value.as.items != nullptr, path, "has null items");
        for (uint32_t i = 0; i < value.count; ++i) visit(value.as.items[i], {&path, uint64_t{i}}, depth + 1);
        return;
      case STG_DICT:
        visit_dict(value, path, depth);
        return;
      default:
        fail(path, "has the unknown type ", value.type);
    }
  }

 private:
  void visit_dict(const stg_value& value, const KeyPath& path, uint32_t depth) {
    require(value.count == 0 || value.as.entries != nullptr, path, "has null entries");
    std::unordered_set<std::string_view> keys;
    for (uint32_t i = 0; i < value.count; ++i) {
      const stg_entry& entry = value.as.entries[i];
      require(entry.key.size_bytes == 0 || entry.key.data != nullptr, path, "has a null key with a size");
      const std::string_view key = text_of(entry.key);
      // A small dict is compared pair by pair: no allocation in the common case.
      bool is_new = true;
      if (value.count <= 16) {
        for (uint32_t j = 0; j < i && is_new; ++j) is_new = text_of(value.as.entries[j].key) != key;
      } else {
        is_new = keys.insert(key).second;
      }
      require(is_new, path, "has the key \"", key, "\" twice");
      visit(entry.value, {&path, key}, depth + 1);
    }
  }

  template <class... Problem>
  void require(bool condition, const KeyPath& path, const Problem&... problem) const {
    if (!condition) fail(path, problem...);
  }
  template <class... Problem>
  [[noreturn]] void fail(const KeyPath& path, const Problem&... problem) const {
    throw invalid_argument(what_, path, " ", problem...);
  }

  std::string_view what_;
  uint64_t num_nodes_ = 0;
};

}  // namespace

Tree make_tree(Value value) {
  auto owner = std::make_unique<TreeOwner>();
  owner->value = std::move(value);
  stg_tree tree{};
  tree.root = build(owner->value, *owner);
  give_up_leaves(owner->value);
  tree.release = release_tree;
  tree.owner = owner.release();
  return Tree{tree};
}

Value take(Tree tree) { return take_value(tree.root(), tree.borrowed(), {}); }

std::string KeyPath::text() const {
  if (parent_ == nullptr) return is_key_ ? concat("[\"", key_, "\"]") : "(root)";
  std::string out = parent_->parent_ == nullptr && !parent_->is_key_ ? "" : parent_->text();
  return out + (is_key_ ? concat("[\"", key_, "\"]") : concat("[", index_, "]"));
}

std::string type_name(uint32_t type) {
  static constexpr std::array names{"none",   "bool", "int64", "double", "string", "bytes",
                                    "tensor", "list", "tuple", "dict",   "opaque"};
  return type < names.size() ? names[type] : concat("unknown type ", type);
}

stg_value* find(stg_value& value, std::string_view key) noexcept {
  if (value.type != STG_DICT) return nullptr;
  for (uint32_t i = 0; i < value.count; ++i) {
    if (text_of(value.as.entries[i].key) == key) return &value.as.entries[i].value;
  }
  return nullptr;
}

const stg_value* find(const stg_value& value, std::string_view key) noexcept { return find(const_cast<stg_value&>(value), key); }

void for_each_leaf(stg_value& root, const std::function<void(const KeyPath&, stg_value&)>& visit) {
  walk_leaves(root, {}, visit);
}

void for_each_leaf(const stg_value& root, const std::function<void(const KeyPath&, const stg_value&)>& visit) {
  walk_leaves(root, {}, visit);
}

void validate(const stg_value& root, std::string_view what) { Validator{what}.visit(root, {}, 1); }

}  // namespace stratagem
