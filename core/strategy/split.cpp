// SPDX-License-Identifier: Apache-2.0
#include "strategy/split.hpp"

#include <algorithm>
#include <memory>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "strategy/elements.hpp"

namespace stratagem {

namespace {

void check_on_cpu(const stg_value& root, bool takes_devices) {
  for_each_leaf(root, [&](const KeyPath& path, const stg_value& leaf) {
    if (leaf.type != STG_TENSOR || takes_devices) return;
    check_in_host_memory(leaf.as.tensor->view, "the batch's tensor at ", path);
  });
}

// One share being built: rows [begin, begin + num_rows) of every batched leaf, all of the others.
class ShareBuilder {
 public:
  ShareBuilder(const std::shared_ptr<const Tree>& parent, int64_t begin, int64_t num_rows, stg_dtype floating_dtype)
      : parent_(parent), begin_(begin), num_rows_(num_rows), floating_dtype_(floating_dtype) {}

  Value build(const stg_value& value) const {
    switch (value.type) {
      case STG_TENSOR:
        return tensor(*value.as.tensor);
      case STG_LIST:
      case STG_TUPLE: {
        List items;
        items.reserve(value.count);
        for (uint32_t i = 0; i < value.count; ++i) items.push_back(build(value.as.items[i]));
        if (value.type == STG_TUPLE) return Tuple{std::move(items)};
        return items;
      }
      case STG_DICT: {
        Dict dict;
        dict.reserve(value.count);
        for (uint32_t i = 0; i < value.count; ++i) {
          dict.emplace_back(text_of(value.as.entries[i].key), build(value.as.entries[i].value));
        }
        return dict;
      }
      default:
        return take(Tree::view(value));  // opaques are retained
    }
  }

 private:
  TensorPtr tensor(const stg_tensor& source) const {
    const stg_tensor_view& view = source.view;
    TensorPtr part = view.num_dims > 0 && num_rows_ >= 0
                         ? narrow_rows(parent_, source, begin_, num_rows_)
                         : make_strided_tensor(parent_, view.data, view.dtype, {view.shape, view.shape + view.num_dims},
                                               strides_of(view), source.flags, view.device);
    if (view.num_dims == 0 || num_rows_ < 0) part->view.byte_offset = view.byte_offset;
    if (floating_dtype_.bits == 0 || !is_floating(view.dtype) || same_dtype(view.dtype, floating_dtype_)) return part;
    return is_in_host_memory(view.device) ? cast_tensor(part->view, floating_dtype_) : std::move(part);  // the model's step casts
  }

  std::shared_ptr<const Tree> parent_;
  int64_t begin_;
  int64_t num_rows_;  // negative: everything
  stg_dtype floating_dtype_;
};

}  // namespace

std::vector<int64_t> share_sizes(int64_t num_rows, uint64_t num_replicas, bool in_chunks) {
  const auto replicas = static_cast<int64_t>(num_replicas);
  std::vector<int64_t> sizes;
  if (in_chunks) {
    const int64_t chunk = (num_rows + replicas - 1) / replicas;
    for (int64_t begin = 0; begin < num_rows; begin += chunk) sizes.push_back(std::min(chunk, num_rows - begin));
  } else {
    const int64_t num_shares = std::min(num_rows, replicas);
    for (int64_t i = 0; i < num_shares; ++i) sizes.push_back(num_rows / num_shares + (i < num_rows % num_shares ? 1 : 0));
  }
  return sizes;
}

Shares split_batch(Tree batch, const SplitOptions& options) {
  if (options.num_replicas != 1 || options.floating_dtype.bits != 0 || batch.borrowed())
    return split_batch(std::make_shared<const Tree>(std::move(batch)), options);
  check_on_cpu(batch.root(), options.takes_devices);
  const std::optional<int64_t> rows = batch_rows(batch.root());
  Shares shares;
  shares.has_rows = rows.has_value();
  shares.trees.push_back(std::move(batch));
  shares.num_rows.push_back(rows ? static_cast<double>(*rows) : 1.0);
  return shares;
}

// A borrowed batch is viewed; a moved one lives in the shares' tensors.
Shares split_batch(const std::shared_ptr<const Tree>& parent, const SplitOptions& options) {
  check_on_cpu(parent->root(), options.takes_devices);
  const std::optional<int64_t> rows = batch_rows(parent->root());
  Shares shares;
  shares.has_rows = rows.has_value();
  const auto add = [&](int64_t begin, int64_t num_rows) {
    shares.trees.push_back(make_tree(ShareBuilder(parent, begin, num_rows, options.floating_dtype).build(parent->root())));
    shares.num_rows.push_back(num_rows < 0 ? 1.0 : static_cast<double>(num_rows));
  };
  if (!rows) {
    add(0, -1);
  } else if (*rows == 0) {
    add(0, 0);
  } else {
    int64_t begin = 0;
    for (const int64_t size : share_sizes(*rows, options.num_replicas, options.in_chunks)) {
      add(begin, size);
      begin += size;
    }
  }
  return shares;
}

Tree cast_floating(Tree tree, stg_dtype dtype) {
  if (dtype.bits == 0) return tree;
  const auto parent = std::make_shared<const Tree>(std::move(tree));
  return make_tree(ShareBuilder(parent, 0, -1, dtype).build(parent->root()));
}

}  // namespace stratagem
