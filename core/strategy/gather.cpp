// SPDX-License-Identifier: Apache-2.0
#include "strategy/gather.hpp"

#include <algorithm>
#include <cstring>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "strategy/elements.hpp"

namespace stratagem {

namespace {

// The same place in every replica's outputs.
using Parts = std::vector<stg_value*>;

bool has_only_strings(const stg_value& value) {
  if (value.type == STG_DICT) {
    return std::all_of(value.as.entries, value.as.entries + value.count,
                       [](const stg_entry& entry) { return has_only_strings(entry.value); });
  }
  if (is_container(value)) return std::all_of(value.as.items, value.as.items + value.count, has_only_strings);
  return value.type == STG_STRING;
}

// A foreign value as ours: tensors and opaques change hands.
Value take_part(stg_value& part) {
  stg_tree owned{part, [](stg_tree*) {}, nullptr};
  Value value = take(Tree{owned});
  // `take` emptied leaves in containers; a leaf at the root was copied by value.
  if (part.type == STG_TENSOR || part.type == STG_OPAQUE) part = {};
  return value;
}

class Gatherer {
 public:
  explicit Gatherer(const GatherOptions& options) : options_(options) {}

  Value join(const Parts& parts, const KeyPath& path) const {
    const uint32_t type = parts[0]->type;
    for (size_t i = 1; i < parts.size(); ++i) {
      if (parts[i]->type != type) fail(path, i, concat("a ", type_name(parts[i]->type)), concat("a ", type_name(type)));
    }
    switch (type) {
      case STG_NONE:
        return {};
      case STG_TENSOR:
        return parts[0]->as.tensor->view.num_dims == 0 ? stack(parts, path) : concatenate(parts, path);
      case STG_BOOL:
      case STG_INT64:
      case STG_DOUBLE:
        return numbers(parts);
      case STG_LIST:
      case STG_TUPLE:
        return type == STG_LIST && all_strings(parts) ? strings(parts) : items(parts, path);
      case STG_DICT:
        return entries(parts, path);
      case STG_OPAQUE:
        return opaques(parts, path);
      default: {
        List list;
        for (stg_value* part : parts) list.push_back(take_part(*part));
        return list;
      }
    }
  }

 private:
  [[noreturn]] static void fail(const KeyPath& path, size_t replica, const std::string& here, const std::string& there) {
    Error error =
        invalid_argument("the outputs differ at ", path.text(), ": replica ", replica, " has ", here, ", replica 0 has ", there);
    error.replica = static_cast<int32_t>(replica);
    throw error;
  }

  static std::string tensor_text(const stg_tensor_view& view) {
    return concat("a ", dtype_name(view.dtype), " tensor ", shape_text(view));
  }

  // Types must agree, and shapes but for dimension 0.
  static void check_alike(const Parts& parts, const KeyPath& path) {
    const stg_tensor_view& first = parts[0]->as.tensor->view;
    for (size_t i = 0; i < parts.size(); ++i) {
      const stg_tensor_view& view = parts[i]->as.tensor->view;
      const bool fits = same_dtype(view.dtype, first.dtype) && view.num_dims == first.num_dims &&
                        (view.num_dims == 0 || std::equal(view.shape + 1, view.shape + view.num_dims, first.shape + 1));
      if (!fits) fail(path, i, tensor_text(view), tensor_text(first));
      check_reachable(view, "the output at ", path, " of replica ", i);
    }
  }

  static bool are_in_host_memory(const Parts& parts) {
    return std::all_of(parts.begin(), parts.end(),
                       [](const stg_value* part) { return is_in_host_memory(part->as.tensor->view.device); });
  }

  static Value join_on_device(const Parts& parts) {
    std::vector<const stg_tensor_view*> views;
    for (const stg_value* part : parts) views.push_back(&part->as.tensor->view);
    const auto elsewhere =
        std::find_if(views.begin(), views.end(), [](const stg_tensor_view* view) { return !is_in_host_memory(view->device); });
    return device_elements(**elsewhere).join(views);
  }

  static Value stack(const Parts& parts, const KeyPath& path) {
    check_alike(parts, path);
    if (!are_in_host_memory(parts)) return join_on_device(parts);
    const stg_dtype dtype = parts[0]->as.tensor->view.dtype;
    TensorPtr joined = allocate_tensor(dtype, {static_cast<int64_t>(parts.size())});
    for (size_t i = 0; i < parts.size(); ++i) {
      std::memcpy(first_element<char>(joined->view) + i * element_size_bytes(dtype), first_element<>(parts[i]->as.tensor->view),
                  element_size_bytes(dtype));
    }
    return joined;
  }

  static Value concatenate(const Parts& parts, const KeyPath& path) {
    check_alike(parts, path);
    if (!are_in_host_memory(parts)) return join_on_device(parts);
    const stg_tensor_view& first = parts[0]->as.tensor->view;
    std::vector<int64_t> shape(first.shape, first.shape + first.num_dims);
    shape[0] = 0;
    for (const stg_value* part : parts) shape[0] += part->as.tensor->view.shape[0];
    const std::shared_ptr<stg_tensor> joined{allocate_tensor(first.dtype, std::move(shape))};
    int64_t row = 0;
    for (const stg_value* part : parts) {
      const stg_tensor_view& view = part->as.tensor->view;
      copy_elements(narrow_rows(nullptr, *joined, row, view.shape[0])->view, view);
      row += view.shape[0];
    }
    return narrow_rows(joined, *joined, 0, row);
  }

  Value numbers(const Parts& parts) const {
    const auto count = static_cast<int64_t>(parts.size());
    const bool is_double = parts[0]->type == STG_DOUBLE;
    const stg_dtype dtype = parts[0]->type == STG_BOOL ? boolean : is_double ? (options_.lightning ? float32 : float64) : int64;
    TensorPtr joined = allocate_tensor(dtype, {count});
    for (size_t i = 0; i < parts.size(); ++i) {
      char* at = first_element<char>(joined->view) + i * element_size_bytes(dtype);
      if (is_double) {
        store_floating(at, dtype, parts[i]->as.f64);
      } else if (parts[0]->type == STG_BOOL) {
        *at = static_cast<char>(parts[i]->as.i64 != 0);
      } else {
        std::memcpy(at, &parts[i]->as.i64, sizeof(int64_t));
      }
    }
    return joined;
  }

  static bool all_strings(const Parts& parts) {
    return std::all_of(parts.begin(), parts.end(), [](const stg_value* part) { return has_only_strings(*part); });
  }

  static Value strings(const Parts& parts) {
    List joined;
    for (stg_value* part : parts) {
      for (uint32_t i = 0; i < part->count; ++i) joined.push_back(take_part(part->as.items[i]));
    }
    return joined;
  }

  Value items(const Parts& parts, const KeyPath& path) const {
    const uint32_t count = parts[0]->count;
    for (size_t i = 1; i < parts.size(); ++i) {
      if (parts[i]->count != count) fail(path, i, concat(parts[i]->count, " items"), concat(count, " items"));
    }
    List joined;
    for (uint32_t item = 0; item < count; ++item) {
      Parts below;
      for (stg_value* part : parts) below.push_back(&part->as.items[item]);
      joined.push_back(join(below, {&path, uint64_t{item}}));
    }
    if (parts[0]->type == STG_TUPLE) return Tuple{std::move(joined)};
    return joined;
  }

  Value entries(const Parts& parts, const KeyPath& path) const {
    Dict joined;
    for (uint32_t e = 0; e < parts[0]->count; ++e) {
      const std::string_view key = text_of(parts[0]->as.entries[e].key);
      const KeyPath below_path(&path, key);
      Parts below;
      for (size_t i = 0; i < parts.size(); ++i) {
        below.push_back(find(*parts[i], key));
        if (below.back() == nullptr) fail(below_path, i, "no such key", "one");
      }
      joined.emplace_back(key, join(below, below_path));
    }
    for (size_t i = 1; i < parts.size(); ++i) {
      for (uint32_t e = 0; parts[i]->count != parts[0]->count && e < parts[i]->count; ++e) {
        const std::string_view key = text_of(parts[i]->as.entries[e].key);
        if (find(*parts[0], key) == nullptr) fail({&path, key}, i, "this key", "none");
      }
    }
    return joined;
  }

  // Metrics bring their own reduction; other objects are listed.
  static Value opaques(const Parts& parts, const KeyPath& path) {
    std::vector<stg_opaque*> objects;
    for (const stg_value* part : parts) objects.push_back(part->as.opaque);
    if (objects[0]->reduce != nullptr && std::all_of(objects.begin(), objects.end(), [&](const stg_opaque* object) {
          return object->reduce == objects[0]->reduce;
        })) {
      stg_opaque* merged = nullptr;
      const auto place = [&] { return concat("the reduce of the ", text_of(objects[0]->type_name), " at ", path); };
      try {
        check(objects[0]->reduce(objects.data(), objects.size(), &merged));
      } catch (const Error& error) {
        throw error.within(place(), error.replica, error.device);
      }
      if (merged == nullptr) throw invalid_argument(place(), " gave null");
      return OpaquePtr{merged};
    }
    List list;
    for (stg_value* part : parts) list.push_back(take_part(*part));
    return list;
  }

  GatherOptions options_;
};

}  // namespace

Tree gather_outputs(std::vector<Tree>& outputs, const GatherOptions& options) {
  Parts parts;
  for (Tree& tree : outputs) parts.push_back(&tree.root());
  return make_tree(Gatherer(options).join(parts, {}));
}

const stg_value& find_loss(const stg_value& outputs) {
  const stg_value* loss = outputs.type == STG_DICT ? find(outputs, "loss") : &outputs;
  if (loss == nullptr) throw invalid_argument("the outputs of a training step are a dict without \"loss\"");
  if (loss->type != STG_TENSOR) {
    throw invalid_argument("the training loss is a ", type_name(loss->type),
                           "; a training step returns a 0-dim tensor, or a dict with one under \"loss\"");
  }
  const stg_tensor_view& view = loss->as.tensor->view;
  check_reachable(view, "the training loss");
  if (view.num_dims != 0)
    throw invalid_argument("the training loss has the shape ", shape_text(view), "; it must be 0-dim (take its mean or sum)");
  if (!is_floating(view.dtype))
    throw invalid_argument("the training loss is ", dtype_name(view.dtype), "; it must be a floating type");
  return *loss;
}

TensorPtr combine_losses(const std::vector<const stg_value*>& losses, const std::vector<double>& weights, double divisor) {
  if (losses.size() == 1) return clone_tensor(losses[0]->as.tensor->view);
  if (!is_in_host_memory(losses[0]->as.tensor->view.device)) {
    std::vector<const stg_tensor_view*> numbers;
    for (const stg_value* loss : losses) numbers.push_back(&loss->as.tensor->view);
    return device_elements(*numbers[0]).combine(numbers, weights, divisor);
  }
  const stg_dtype dtype = losses[0]->as.tensor->view.dtype;
  double sum = 0;
  for (size_t i = 0; i < losses.size(); ++i) {
    if (weights[i] != 0) sum += weights[i] * read_element(losses[i]->as.tensor->view, 0);
  }
  TensorPtr combined = allocate_tensor(dtype, {});
  store_floating(first_element<>(combined->view), dtype, sum / divisor);
  return combined;
}

Tree with_loss(Tree outputs, TensorPtr loss) {
  stg_value& root = outputs.root();
  stg_value* place = root.type == STG_DICT ? find(root, "loss") : &root;
  TensorPtr before{place->as.tensor};
  place->as.tensor = loss.release();
  return outputs;
}

}  // namespace stratagem
