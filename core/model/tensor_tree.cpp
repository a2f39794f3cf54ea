// SPDX-License-Identifier: Apache-2.0
#include "model/tensor_tree.hpp"

#include <algorithm>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "base/overloaded.hpp"
#include "torch/bridge.hpp"
#include "torch/dtypes.hpp"

namespace stratagem {

namespace {

std::string shape_pattern(at::IntArrayRef shape) {
  std::string out = "(";
  for (size_t d = 0; d < shape.size(); ++d) out += (d == 0 ? "" : ", ") + (shape[d] == -1 ? "any" : std::to_string(shape[d]));
  return out + ")";
}

const char* kind_of(const TensorTree& tree) {
  static constexpr const char* names[] = {"none",     "a bool",           "an integer", "a number", "a string", "bytes",
                                          "a tensor", "an opaque object", "a list",     "a tuple",  "a dict"};
  return names[tree.data.index()];
}

const TensorTree::List* items_of(const TensorTree& tree) {
  if (const auto* list = std::get_if<TensorTree::List>(&tree.data)) return list;
  if (const auto* tuple = std::get_if<TensorTree::Tuple>(&tree.data)) return &tuple->items;
  return nullptr;
}

Error unexpected(const Batch& at, std::string_view expected) {
  return invalid_argument(at.path(), " is ", kind_of(at.tree()), "; the model expects ", expected);
}

}  // namespace

Batch Batch::operator[](std::string_view key) const {
  const auto* dict = std::get_if<TensorTree::Dict>(&tree_->data);
  if (dict == nullptr) throw unexpected(*this, concat("a dict with \"", key, "\""));
  std::vector<std::string> keys;
  for (const auto& [name, value] : *dict) {
    if (name == key) return Batch(value, concat(path_, "[\"", key, "\"]"));
    keys.push_back(name);
  }
  throw invalid_argument(path_, " has no \"", key, "\", which the model needs; it has ", join(keys));
}

Batch Batch::operator[](size_t index) const {
  const TensorTree::List* items = items_of(*tree_);
  if (items == nullptr) throw unexpected(*this, "a list or a tuple");
  if (index >= items->size()) throw invalid_argument(path_, " has ", items->size(), " items; the model needs number ", index);
  return Batch((*items)[index], concat(path_, "[", index, "]"));
}

bool Batch::contains(std::string_view key) const {
  const auto* dict = std::get_if<TensorTree::Dict>(&tree_->data);
  return dict != nullptr && std::any_of(dict->begin(), dict->end(), [&](const auto& entry) { return entry.first == key; });
}

size_t Batch::size() const {
  if (const auto* dict = std::get_if<TensorTree::Dict>(&tree_->data)) return dict->size();
  if (const TensorTree::List* items = items_of(*tree_)) return items->size();
  throw unexpected(*this, "a dict, a list or a tuple");
}

at::Tensor Batch::tensor() const {
  const auto* tensor = std::get_if<at::Tensor>(&tree_->data);
  if (tensor == nullptr) throw unexpected(*this, "a tensor");
  return *tensor;
}

at::Tensor Batch::tensor(at::ScalarType dtype, at::IntArrayRef shape) const {
  at::Tensor found = tensor();
  bool fits = found.scalar_type() == dtype && static_cast<size_t>(found.dim()) == shape.size();
  for (size_t d = 0; fits && d < shape.size(); ++d) fits = shape[d] == -1 || shape[d] == found.size(static_cast<int64_t>(d));
  if (!fits) {
    throw invalid_argument(path_, " is ", dtype_name(from_scalar_type(found.scalar_type())), " ", shape_pattern(found.sizes()),
                           "; the model expects ", dtype_name(from_scalar_type(dtype)), " ", shape_pattern(shape));
  }
  return found;
}

double Batch::number() const {
  if (const auto* value = std::get_if<bool>(&tree_->data)) return *value ? 1 : 0;
  if (const auto* value = std::get_if<int64_t>(&tree_->data)) return static_cast<double>(*value);
  if (const auto* value = std::get_if<double>(&tree_->data)) return *value;
  throw unexpected(*this, "a number");
}

std::string Batch::text() const {
  const auto* text = std::get_if<std::string>(&tree_->data);
  if (text == nullptr) throw unexpected(*this, "a string");
  return *text;
}

namespace sdk {

namespace {

// --- in

class Importer {
 public:
  Importer(bool borrowed, std::optional<at::ScalarType> floating_dtype, ReadOnly& read_only)
      : borrowed_(borrowed), floating_dtype_(floating_dtype), read_only_(read_only) {}

  TensorTree operator()(const KeyPath& path, stg_value& value) const {
    switch (value.type) {
      case STG_TENSOR:
        return tensor(path, value);
      case STG_OPAQUE:
        return opaque(value);
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
      case STG_LIST:
        return items(path, value);
      case STG_TUPLE:
        return TensorTree::Tuple{items(path, value)};
      case STG_DICT:
        return entries(path, value);
      default:
        return {};
    }
  }

 private:
  TensorTree::List items(const KeyPath& path, stg_value& value) const {
    TensorTree::List list;
    list.reserve(value.count);
    for (uint32_t i = 0; i < value.count; ++i) list.push_back((*this)(KeyPath(&path, i), value.as.items[i]));
    return list;
  }

  TensorTree::Dict entries(const KeyPath& path, stg_value& value) const {
    TensorTree::Dict dict;
    dict.reserve(value.count);
    for (uint32_t i = 0; i < value.count; ++i) {
      stg_entry& entry = value.as.entries[i];
      dict.emplace_back(text_of(entry.key), (*this)(KeyPath(&path, text_of(entry.key)), entry.value));
    }
    return dict;
  }

  at::Tensor tensor(const KeyPath& path, stg_value& value) const {
    const bool is_read_only = (value.as.tensor->flags & STG_TENSOR_READ_ONLY) != 0;
    at::Tensor imported =
        borrowed_ ? view_tensor(*value.as.tensor, "batch") : to_tensor(TensorPtr(std::exchange(value, {}).as.tensor), "batch");
    if (floating_dtype_.has_value() && imported.is_floating_point() && imported.scalar_type() != *floating_dtype_) {
      return imported.to(*floating_dtype_);
    }
    if (is_read_only) read_only_.emplace_back(path.text(), imported);
    return imported;
  }

  TensorTree opaque(stg_value& value) const {
    stg_opaque* object = value.as.opaque;
    if (borrowed_) {
      object->retain(object);
    } else {
      value = {};
    }
    return TensorTree::Opaque(object, OpaqueRelease{});
  }

  bool borrowed_;
  std::optional<at::ScalarType> floating_dtype_;
  ReadOnly& read_only_;
};

// --- out

class Exporter {
 public:
  explicit Exporter(const TensorTree* borrowed) {
    if (borrowed == nullptr) return;
    for_each_tensor(*borrowed, "", [this](const std::string&, const at::Tensor& tensor) {
      borrowed_.push_back(tensor.storage().unsafeGetStorageImpl());
    });
  }

  Value operator()(const TensorTree& tree, const std::string& path) const {
    return std::visit(Overloaded{
                          [](const auto& plain) -> Value { return plain; },
                          [&](const at::Tensor& tensor) -> Value { return exported(tensor, path); },
                          [](const TensorTree::Opaque& object) -> Value {
                            object->retain(object.get());
                            return OpaquePtr(object.get());
                          },
                          [&](const TensorTree::List& list) -> Value { return items(list, path); },
                          [&](const TensorTree::Tuple& tuple) -> Value { return stratagem::Tuple{items(tuple.items, path)}; },
                          [&](const TensorTree::Dict& dict) -> Value {
                            stratagem::Dict out;
                            out.reserve(dict.size());
                            for (const auto& [key, value] : dict)
                              out.emplace_back(key, (*this)(value, concat(path, "[\"", key, "\"]")));
                            return out;
                          },
                      },
                      tree.data);
  }

 private:
  stratagem::List items(const TensorTree::List& list, const std::string& path) const {
    stratagem::List out;
    out.reserve(list.size());
    for (size_t i = 0; i < list.size(); ++i) out.push_back((*this)(list[i], concat(path, "[", i, "]")));
    return out;
  }

  TensorPtr exported(const at::Tensor& tensor, const std::string& path) const {
    if (!tensor.defined()) throw invalid_argument(path, " is an undefined tensor; leave the entry out, or give none");
    try {
      const bool aliases =
          !borrowed_.empty() && tensor.has_storage() &&
          std::find(borrowed_.begin(), borrowed_.end(), tensor.storage().unsafeGetStorageImpl()) != borrowed_.end();
      return to_dlpack(aliases ? tensor.detach().clone() : tensor);
    } catch (const Error& error) {
      throw Error{error.code, path + ": " + error.message};
    }
  }

  std::vector<c10::StorageImpl*> borrowed_;
};

}  // namespace

TensorTree import_tree(Tree tree, std::optional<at::ScalarType> floating_dtype, ReadOnly& read_only) {
  return Importer(tree.borrowed(), floating_dtype, read_only)(KeyPath(), tree.root());
}

Tree export_tree(const TensorTree& outputs, const TensorTree* borrowed) {
  return make_tree(Exporter(borrowed)(outputs, "outputs"));
}

void for_each_tensor(const TensorTree& tree, const std::string& path,
                     const std::function<void(const std::string&, const at::Tensor&)>& visit) {
  if (const auto* tensor = std::get_if<at::Tensor>(&tree.data)) {
    visit(path, *tensor);
  } else if (const TensorTree::List* items = items_of(tree)) {
    for (size_t i = 0; i < items->size(); ++i) for_each_tensor((*items)[i], concat(path, "[", i, "]"), visit);
  } else if (const auto* dict = std::get_if<TensorTree::Dict>(&tree.data)) {
    for (const auto& [key, value] : *dict) for_each_tensor(value, concat(path, "[\"", key, "\"]"), visit);
  }
}

}  // namespace sdk
}  // namespace stratagem
