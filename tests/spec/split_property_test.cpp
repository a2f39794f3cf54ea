// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Splitting a batch" and "Gathering outputs": for any tree, split, then gather, is the identity.
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>

#include "model/tensor_model.hpp"
#include "spec/instance.hpp"
//
#include "spec/property.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::vector<stg_dtype> all_dtypes{
    {STG_DTYPE_INT, 8, 1},      {STG_DTYPE_INT, 16, 1},     {STG_DTYPE_INT, 32, 1},      {STG_DTYPE_INT, 64, 1},
    {STG_DTYPE_UINT, 8, 1},     {STG_DTYPE_UINT, 16, 1},    {STG_DTYPE_UINT, 32, 1},     {STG_DTYPE_UINT, 64, 1},
    {STG_DTYPE_FLOAT, 16, 1},   {STG_DTYPE_FLOAT, 32, 1},   {STG_DTYPE_FLOAT, 64, 1},    {STG_DTYPE_BFLOAT, 16, 1},
    {STG_DTYPE_COMPLEX, 32, 1}, {STG_DTYPE_COMPLEX, 64, 1}, {STG_DTYPE_COMPLEX, 128, 1}, {STG_DTYPE_BOOL, 8, 1}};

// A value of a batch. Dimension 0 of a tensor that has one is the batch's rows.
struct Node {
  uint32_t type = STG_NONE;
  std::vector<Node> children;  // keys are "k0", "k1", ...
  stg_dtype dtype{};
  Sizes inner_shape;
  bool is_batched = false;
  // Memory: the order of the dimensions, how far apart each lies (0: all elements of the dimension are one), and where it begins.
  std::vector<int> order;
  Sizes gaps;
  int64_t offset = 0;
  bool has_strides = true;
  unsigned content = 0;

  static Node draw(Random& random, int depth) {
    Node node;
    node.content = static_cast<unsigned>(random());
    const bool is_inner = depth < 4 && draw_chance(random, depth == 0 ? 80 : 35);
    if (is_inner) {
      node.type = static_cast<uint32_t>(draw_between(random, STG_LIST, STG_DICT));
      const int64_t count = draw_between(random, 0, 4);
      for (int64_t i = 0; i < count; ++i) node.children.push_back(draw(random, depth + 1));
      return node;
    }
    if (draw_chance(random, 30)) {
      node.type = static_cast<uint32_t>(draw_between(random, STG_NONE, STG_BYTES));
      return node;
    }
    node.type = STG_TENSOR;
    node.dtype = all_dtypes[static_cast<size_t>(draw_between(random, 0, static_cast<int64_t>(all_dtypes.size()) - 1))];
    node.is_batched = draw_chance(random, 85);
    const int64_t num_dims = node.is_batched ? draw_between(random, 1, 4) : 0;
    for (int64_t d = 1; d < num_dims; ++d) node.inner_shape.push_back(draw_between(random, draw_chance(random, 10) ? 0 : 1, 4));
    for (int64_t d = 0; d < num_dims; ++d) node.order.push_back(static_cast<int>(d));
    if (draw_chance(random, 50)) std::shuffle(node.order.begin(), node.order.end(), random);
    for (int64_t d = 0; d < num_dims; ++d) node.gaps.push_back(draw_chance(random, 70) ? 1 : draw_between(random, 0, 3));
    node.offset = draw_between(random, 0, 3);
    node.has_strides = !std::is_sorted(node.order.begin(), node.order.end()) || draw_chance(random, 70) ||
                       std::any_of(node.gaps.begin(), node.gaps.end(), [](int64_t gap) { return gap != 1; });
    return node;
  }
  bool has_rows() const {
    return is_batched || std::any_of(children.begin(), children.end(), [](const Node& c) { return c.has_rows(); });
  }

  TensorPtr tensor(int64_t num_rows) const {
    Sizes shape;
    if (is_batched) shape.push_back(num_rows);
    shape.insert(shape.end(), inner_shape.begin(), inner_shape.end());
    Sizes strides(shape.size());
    int64_t step = 1;
    for (size_t i = shape.size(); i-- > 0;) {
      const auto d = static_cast<size_t>(order[i]);
      strides[d] = step * gaps[d];
      step *= std::max<int64_t>(1, shape[d] * gaps[d]);
    }
    const std::shared_ptr<stg_tensor> storage{allocate_tensor(dtype, {offset + step}).release(), TensorRelease{}};
    Random random(content);
    auto* bytes = static_cast<unsigned char*>(storage->view.data);
    for (uint64_t b = 0; b < static_cast<uint64_t>(offset + step) * element_size_bytes(dtype); ++b) {
      bytes[b] = static_cast<unsigned char>(dtype.code == STG_DTYPE_BOOL ? random() % 2 : random());
    }
    TensorPtr made = make_strided_tensor(storage, bytes, dtype, shape, strides, content % 3 == 0 ? STG_TENSOR_READ_ONLY : 0,
                                         {STG_DEVICE_CPU, 0});
    made->view.byte_offset = static_cast<uint64_t>(offset) * element_size_bytes(dtype);
    if (!has_strides) made->view.strides = nullptr;
    return made;
  }

  Value value(int64_t num_rows) const {
    switch (type) {
      case STG_BOOL:
        return content % 2 == 0;
      case STG_INT64:
        return int64_t{content} << 20;
      case STG_DOUBLE:
        return content / 3.0;
      case STG_STRING:
        return concat("text ", content);
      case STG_BYTES:
        return Bytes{{static_cast<uint8_t>(content), 0, 255}};
      case STG_TENSOR:
        return tensor(num_rows);
      case STG_LIST:
      case STG_TUPLE: {
        List items;
        for (const Node& child : children) items.push_back(child.value(num_rows));
        if (type == STG_TUPLE) return Tuple{std::move(items)};
        return items;
      }
      case STG_DICT: {
        Dict entries;
        for (size_t i = 0; i < children.size(); ++i) entries.emplace_back(concat("k", i), children[i].value(num_rows));
        return entries;
      }
      default:
        return {};
    }
  }

  std::string text() const {
    if (type == STG_TENSOR) {
      std::string memory =
          concat(", memory ", list_text({order.begin(), order.end()}), " gaps ", list_text(gaps), " offset ", offset);
      return concat(dtype_name(dtype), is_batched ? "[rows, " : "[0-dim", is_batched ? list_text(inner_shape) + memory : memory,
                    "]");
    }
    std::vector<std::string> words;
    for (const Node& child : children) words.push_back(child.text());
    return children.empty() ? type_name(type) : concat(type_name(type), "{", join(words), "}");
  }

  std::vector<Node> simpler() const {
    std::vector<Node> out(children.begin(), children.end());
    leave_one_out(out, *this, &Node::children);
    for (size_t i = 0; i < children.size(); ++i) {
      for (Node& child : children[i].simpler()) {
        out.push_back(*this);
        out.back().children[i] = std::move(child);
      }
    }
    if (type != STG_TENSOR) return out;
    const auto add = [&](auto change) {
      out.push_back(*this);
      change(out.back());
      if (out.back().text() == text()) out.pop_back();
    };
    add([](Node& node) { node.offset = 0; });
    add([](Node& node) { std::fill(node.gaps.begin(), node.gaps.end(), 1); });
    add([](Node& node) { std::sort(node.order.begin(), node.order.end()); });
    add([](Node& node) { node.dtype = uint8; });
    add([](Node& node) { std::fill(node.inner_shape.begin(), node.inner_shape.end(), 1); });
    return out;
  }
};

bool is_only_strings(const Node& node) {
  const bool is_leaf = node.type < STG_LIST;
  return is_leaf ? node.type == STG_STRING : std::all_of(node.children.begin(), node.children.end(), is_only_strings);
}

std::string bytes_of(const stg_value& leaf) {
  const TensorPtr copy = copy_tensor(leaf.as.tensor->view);
  return {first_element<const char>(copy->view), static_cast<size_t>(numel(copy->view)) * element_size_bytes(copy->view.dtype)};
}

// What is wrong with `out`, gathered from `num_shares` replicas that gave back their shares of `in`, which was made from `node`.
std::string difference(const Node& node, const stg_value& in, const stg_value& out, uint32_t num_shares,
                       const std::string& path) {
  const auto wrong = [&](const std::string& what) { return concat(path, ": ", what); };
  const auto tensor = [&](const Sizes& expected_shape, stg_dtype dtype, const std::string& bytes) {
    if (out.type != STG_TENSOR) return wrong("a " + type_name(out.type));
    if (shape(out) != expected_shape) return wrong("shape " + list_text(shape(out)) + ", not " + list_text(expected_shape));
    if (!same_dtype(out.as.tensor->view.dtype, dtype)) return wrong("dtype " + dtype_name(out.as.tensor->view.dtype));
    return bytes_of(out) == bytes ? std::string() : wrong("other elements");
  };
  const auto repeated = [&](const void* element, size_t size) {
    std::string bytes;
    for (uint32_t i = 0; i < num_shares; ++i) bytes.append(static_cast<const char*>(element), size);
    return bytes;
  };
  switch (node.type) {
    case STG_NONE:
      return out.type == STG_NONE ? std::string() : wrong("not none");
    case STG_BOOL: {
      const char element = static_cast<char>(in.as.i64);
      return tensor({num_shares}, boolean, repeated(&element, 1));
    }
    case STG_INT64:
      return tensor({num_shares}, int64, repeated(&in.as.i64, sizeof in.as.i64));
    case STG_DOUBLE:
      return tensor({num_shares}, float64, repeated(&in.as.f64, sizeof in.as.f64));
    case STG_TENSOR: {
      if (node.is_batched) return tensor(shape(in), in.as.tensor->view.dtype, bytes_of(in));
      const std::string bytes = bytes_of(in);
      return tensor({num_shares}, in.as.tensor->view.dtype, repeated(bytes.data(), bytes.size()));
    }
    case STG_STRING:
    case STG_BYTES:
      if (out.type != STG_LIST || out.count != num_shares) return wrong("not one per replica");
      for (uint32_t i = 0; i < num_shares; ++i) {
        const stg_value& item = out.as.items[i];
        if (item.type != in.type || item.count != in.count || std::memcmp(item.as.utf8, in.as.utf8, in.count) != 0)
          return wrong("another text");
      }
      return {};
    default:
      break;
  }
  if (out.type != node.type) return wrong("a " + type_name(out.type));
  const bool is_concatenated = node.type == STG_LIST && is_only_strings(node);
  if (out.count != in.count * (is_concatenated ? num_shares : 1)) return wrong(concat(out.count, " items"));
  for (uint32_t i = 0; i < in.count && !is_concatenated; ++i) {
    const bool is_dict = node.type == STG_DICT;
    if (is_dict && text_of(out.as.entries[i].key) != text_of(in.as.entries[i].key)) return wrong("another order of keys");
    const std::string below =
        difference(node.children[i], is_dict ? in.as.entries[i].value : in.as.items[i],
                   is_dict ? out.as.entries[i].value : out.as.items[i], num_shares, concat(path, "[", i, "]"));
    if (!below.empty()) return below;
  }
  return {};
}

struct SplitCase {
  Node tree;
  int64_t num_rows = 1;
  std::vector<int64_t> devices;
  bool in_chunks = false;
  bool is_moved = true;

  static SplitCase draw(Random& random) {
    SplitCase made;
    made.tree = Node::draw(random, 0);
    made.num_rows = draw_chance(random, 10) ? 0 : draw_between(random, 1, 40);
    for (int64_t i = draw_between(random, 1, 16); i-- > 0;) made.devices.push_back(i);
    std::shuffle(made.devices.begin(), made.devices.end(), random);
    made.in_chunks = draw_chance(random, 30);
    made.is_moved = draw_chance(random, 60);
    return made;
  }

  std::string text() const {
    return concat(num_rows, " rows over the devices ", list_text(devices), in_chunks ? " in chunks" : "",
                  is_moved ? ", moved" : ", borrowed", ", ", tree.text());
  }

  std::vector<SplitCase> simpler() const {
    std::vector<SplitCase> out;
    const auto add = [&](auto change) {
      out.push_back(*this);
      change(out.back());
    };
    for (Node& node : tree.simpler()) add([&](SplitCase& next) { next.tree = std::move(node); });
    if (devices.size() > 1) leave_one_out(out, *this, &SplitCase::devices);
    if (num_rows > 0) add([](SplitCase& next) { next.num_rows /= 2; });
    if (num_rows > 1) add([](SplitCase& next) { next.num_rows -= 1; });
    return out;
  }

  std::string failure(const stg_model* model) const {
    try {
      Instance instance("data_parallel",
                        concat("{\"devices\": [", list_text(devices).substr(1, list_text(devices).size() - 2),
                               "], \"threads\": 1, \"options\": {\"split\": \"", in_chunks ? "chunk" : "balanced", "\"}}"));
      instance.setup(model, STG_STAGE_PREDICT);
      const Tree expected = make_tree(tree.value(num_rows));
      Tree batch = make_tree(tree.value(num_rows));
      const StepOutcome outcome = instance.predict(is_moved ? std::move(batch) : Tree::view(batch.root()));
      const auto n = static_cast<int64_t>(devices.size());
      const bool is_split = tree.has_rows() && num_rows > 0;
      const int64_t chunk = (num_rows + n - 1) / n;
      const int64_t num_shares = !is_split ? 1 : in_chunks ? (num_rows + chunk - 1) / chunk : std::min(num_rows, n);
      if (static_cast<int64_t>(outcome.weights.size()) != num_shares) return concat(outcome.weights.size(), " shares ran");
      const double total = std::accumulate(outcome.weights.begin(), outcome.weights.end(), 0.0);
      if (total != (tree.has_rows() ? static_cast<double>(num_rows) : 1)) return concat("the weights add up to ", total);
      return difference(tree, expected.root(), outcome.outputs.root(), static_cast<uint32_t>(num_shares), "(root)");
    } catch (const Error& error) {
      return error.message;
    }
  }
};

class Identity : public TensorModel {
 public:
  explicit Identity(const nlohmann::json&) : w_(register_parameter("w", at::zeros({1}))) {}
  StepOutput training_step(const Batch&, const StepContext&) override { return w_.sum(); }
  StepOutput predict_step(const Batch& batch, const StepContext&) override { return batch.tree(); }

 private:
  at::Tensor w_;
};

}  // namespace

TEST_CASE(
    "any tree, split and gathered, is what it was: rows of any dtype and strides, over any devices, and weights add up to the "
    "rows") {
  std::vector<ToyParameter> parameters{{{"weight"}, {1}, {0}}};
  const ToyModel toy(parameters, [](ToyReplica&, const stg_step_context&, const stg_value& batch) {
    ToyStep step;
    step.outputs = take(copy_tree(batch));
    return step;
  });
  check_cases<SplitCase>(num_cases(150), &toy.table);
  const stg_model* made = nullptr;
  check(sdk::create_model("identity", sdk::model_class<Identity>, to_abi("{}"), nullptr, &made));
  const ModelPtr on_torch{made};
  check_cases<SplitCase>(num_cases(60), on_torch.get());
}
