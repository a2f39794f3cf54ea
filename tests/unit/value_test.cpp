// SPDX-License-Identifier: Apache-2.0
#include "base/value.hpp"

#include <cmath>
#include <deque>

#include "base/dlpack.hpp"
#include "base/structs.hpp"
#include "unit/support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

// A tensor of another party that counts how often it is released.
struct CountedTensor {
  CountedTensor() {
    abi.dlpack_major = STG_DLPACK_MAJOR;
    abi.owner = this;
    abi.deleter = [](stg_tensor* self) { ++static_cast<CountedTensor*>(self->owner)->num_releases; };
    abi.view = {&number, {STG_DEVICE_CPU, 0}, 0, float32, nullptr, nullptr, 0};
  }
  stg_tensor abi{};
  float number = 3.5F;
  int num_releases = 0;
};

struct CountedOpaque {
  CountedOpaque() {
    abi.type_name = to_abi("counted");
    abi.retain = [](stg_opaque* self) { ++reinterpret_cast<CountedOpaque*>(self)->num_references; };
    abi.release = [](stg_opaque* self) { --reinterpret_cast<CountedOpaque*>(self)->num_references; };
  }
  stg_opaque abi = sized<stg_opaque>();
  int num_references = 1;
};

stg_value value_of(uint32_t type, uint32_t count = 0) {
  stg_value value{};
  value.type = type;
  value.count = count;
  return value;
}

stg_value list_of(stg_value* items, uint32_t count) {
  stg_value value = value_of(STG_LIST, count);
  value.as.items = items;
  return value;
}

stg_value dict_of(stg_entry* entries, uint32_t count) {
  stg_value value = value_of(STG_DICT, count);
  value.as.entries = entries;
  return value;
}

// A list in a list in a list..., `depth` nodes in all.
struct Nested {
  explicit Nested(uint32_t depth) {
    for (uint32_t i = 1; i < depth; ++i) {
      levels.push_back(i == 1 ? value_of(STG_NONE) : list_of(&levels.back(), 1));
    }
    root = list_of(&levels.back(), 1);
  }
  std::deque<stg_value> levels;  // addresses stay
  stg_value root{};
};

Error refusal(const stg_value& root) {
  return error_of([&] { validate(root, "batch"); });
}

// The tree as text, to compare whole trees.
std::string render(const Value& value) {
  struct Renderer {
    std::string operator()(std::monostate) const { return "none"; }
    std::string operator()(bool b) const { return b ? "true" : "false"; }
    std::string operator()(int64_t i) const { return std::to_string(i); }
    std::string operator()(double d) const { return concat(d, "d"); }
    std::string operator()(const std::string& s) const { return "'" + s + "'"; }
    std::string operator()(const Bytes& b) const { return concat(b.data.size(), " bytes"); }
    std::string operator()(const TensorPtr& t) const { return concat("tensor", shape_text(t->view)); }
    std::string operator()(const OpaquePtr& o) const { return concat("opaque ", text_of(o->type_name)); }
    std::string operator()(const List& list) const { return "[" + items(list) + "]"; }
    std::string operator()(const Tuple& tuple) const { return "(" + items(tuple.items) + ")"; }
    std::string operator()(const Dict& dict) const {
      std::string out;
      for (const auto& [key, item] : dict) out += key + ": " + render(item) + ", ";
      return "{" + out + "}";
    }
    static std::string items(const List& list) {
      std::string out;
      for (const Value& item : list) out += render(item) + ", ";
      return out;
    }
  };
  return std::visit(Renderer{}, value.data);
}

}  // namespace

TEST_CASE("a tree of every type goes out as it came in, order and tuples kept") {
  CountedTensor tensor;
  CountedOpaque object;
  Dict dict;
  dict.emplace_back("z", make_list(Value{}, true, int64_t{-7}, 2.5, "text", Bytes{{0, 255, 0}}));
  dict.emplace_back("a", Tuple{make_list(TensorPtr{&tensor.abi}, Tuple{}, List{})});
  dict.emplace_back("", OpaquePtr{&object.abi});
  dict.emplace_back("m", Dict{});
  {
    const Value out = take(make_tree(std::move(dict)));
    CHECK(render(out) == "{z: [none, true, -7, 2.5d, 'text', 3 bytes, ], a: (tensor(), (), [], ), : opaque counted, m: {}, }");
    CHECK(std::get<OpaquePtr>(std::get<Dict>(out.data)[2].second.data).get() == &object.abi);  // the same pointer
    CHECK(tensor.num_releases == 0);
    CHECK(object.num_references == 1);
  }
  CHECK(tensor.num_releases == 1);
  CHECK(object.num_references == 0);
}

TEST_CASE("texts and bytes keep their zero bytes") {
  const Value out = take(make_tree(make_list(std::string("a\0b", 3), Bytes{{0, 0}})));
  CHECK(std::get<std::string>(std::get<List>(out.data)[0].data) == std::string("a\0b", 3));
  CHECK(std::get<Bytes>(std::get<List>(out.data)[1].data).data == std::vector<uint8_t>{0, 0});
}

TEST_CASE("a tree's release releases each tensor and opaque in it once") {
  CountedTensor tensors[3];
  CountedOpaque object;
  Dict dict;
  dict.emplace_back("pair", Tuple{make_list(TensorPtr{&tensors[0].abi}, TensorPtr{&tensors[1].abi})});
  dict.emplace_back("nested", Dict{});
  std::get<Dict>(dict.back().second.data).emplace_back("t", TensorPtr{&tensors[2].abi});
  dict.emplace_back("o", OpaquePtr{&object.abi});
  { const Tree tree = make_tree(std::move(dict)); }
  for (const CountedTensor& tensor : tensors) CHECK(tensor.num_releases == 1);
  CHECK(object.num_references == 0);
}

TEST_CASE("a leaf that was taken out by hand is not released with the tree") {
  CountedTensor taken;
  CountedTensor left;
  Tree tree = make_tree(make_list(TensorPtr{&taken.abi}, TensorPtr{&left.abi}));
  stg_tensor* mine = tree.root().as.items[0].as.tensor;
  tree.root().as.items[0] = {};
  tree = Tree{};
  CHECK(taken.num_releases == 0);
  CHECK(left.num_releases == 1);
  mine->deleter(mine);
  CHECK(taken.num_releases == 1);
}

TEST_CASE("a tensor without a deleter is legal: nothing is released") {
  CountedTensor tensor;
  tensor.abi.deleter = nullptr;
  { const Tree tree = make_tree(TensorPtr{&tensor.abi}); }
  CHECK(tensor.num_releases == 0);
}

TEST_CASE("a moved argument is taken over and the caller's struct zeroed, a borrowed one is viewed") {
  CountedTensor tensor;
  stg_tree moved = make_tree(TensorPtr{&tensor.abi}).give();
  {
    const Tree received = Tree::receive(&moved);
    CHECK_FALSE(received.borrowed());
    CHECK(moved.release == nullptr);
    CHECK(moved.root.type == STG_NONE);
    CHECK(tensor.num_releases == 0);
  }
  CHECK(tensor.num_releases == 1);

  stg_tree borrowed{value_of(STG_INT64), nullptr, nullptr};
  borrowed.root.as.i64 = 5;
  const Tree view = Tree::receive(&borrowed);
  CHECK(view.borrowed());
  CHECK(view.root().as.i64 == 5);
  CHECK(borrowed.root.as.i64 == 5);
  CHECK(Tree::receive(nullptr).root().type == STG_NONE);
}

TEST_CASE("a moved-from tree releases nothing") {
  CountedTensor tensor;
  Tree first = make_tree(TensorPtr{&tensor.abi});
  {
    const Tree second{std::move(first)};
    CHECK(second.root().type == STG_TENSOR);
  }
  CHECK(tensor.num_releases == 1);
  first = Tree{};
  CHECK(tensor.num_releases == 1);
}

TEST_CASE("of a borrowed tree, opaques are retained and a tensor can't be taken") {
  CountedOpaque object;
  CountedTensor tensor;
  stg_value items[2] = {value_of(STG_OPAQUE), value_of(STG_TENSOR)};
  items[0].as.opaque = &object.abi;
  items[1].as.tensor = &tensor.abi;
  {
    const Value out = take(Tree::view(list_of(items, 1)));
    CHECK(object.num_references == 2);
    CHECK(items[0].type == STG_OPAQUE);
  }
  CHECK(object.num_references == 1);
  check_error(error_of([&] { take(Tree::view(list_of(items, 2))); }), STG_INTERNAL, {"borrowed tensor at [1]"});
  CHECK(tensor.num_releases == 0);
  CHECK(object.num_references == 1);
}

TEST_CASE("what was taken before an error half-way is released once, the rest with the tree") {
  CountedTensor first;
  CountedOpaque object;
  stg_value items[2] = {value_of(STG_OPAQUE), value_of(STG_TENSOR)};
  items[0].as.opaque = &object.abi;
  items[1].as.tensor = &first.abi;
  check_error(error_of([&] { take(Tree::view(list_of(items, 2))); }), STG_INTERNAL, {"[1]"});
  CHECK(object.num_references == 1);
}

TEST_CASE("a tree of 64 levels is valid, one of 65 is refused") {
  validate(Nested{STG_MAX_TREE_DEPTH}.root, "batch");
  const Nested deeper{STG_MAX_TREE_DEPTH + 1};
  check_error(refusal(deeper.root), STG_INVALID_ARGUMENT, {"batch[0][0]", "deeper than 64 levels"});
}

TEST_CASE("a tree of as many nodes as allowed is valid, one more is refused") {
  std::vector<stg_value> items(STG_MAX_TREE_NODES, value_of(STG_NONE));
  validate(list_of(items.data(), STG_MAX_TREE_NODES - 1), "batch");
  check_error(refusal(list_of(items.data(), STG_MAX_TREE_NODES)), STG_INVALID_ARGUMENT,
              {"batch[1048575]", "more than 1048576 nodes"});
}

TEST_CASE("a cycle is refused, narrow or wide") {
  stg_value narrow = value_of(STG_LIST, 1);
  narrow.as.items = &narrow;
  check_error(refusal(narrow), STG_INVALID_ARGUMENT, {"cycle"});

  stg_entry entries[3] = {{to_abi("a"), {}}, {to_abi("b"), {}}, {to_abi("c"), {}}};
  for (stg_entry& entry : entries) entry.value = dict_of(entries, 3);
  check_error(refusal(entries[0].value), STG_INVALID_ARGUMENT, {"cycle"});
}

TEST_CASE("nodes are counted per visit: a subtree that stands in many places is refused before it takes for ever") {
  // 40 levels, each holding the next one twice: 2^40 visits, 80 values.
  std::deque<stg_value> items;
  stg_value level = value_of(STG_NONE);
  for (int i = 0; i < 40; ++i) {
    items.push_back(level);
    stg_value* pair = new stg_value[2]{level, level};
    level = list_of(pair, 2);
    items.back() = level;
  }
  check_error(refusal(level), STG_INVALID_ARGUMENT, {"nodes"});
  for (const stg_value& item : items) delete[] item.as.items;
}

TEST_CASE("a key that stands twice in a dict is refused, in small and in large dicts") {
  for (const uint32_t num_entries : {2U, 16U, 17U, 300U}) {
    std::deque<std::string> keys;
    std::vector<stg_entry> entries;
    for (uint32_t i = 0; i < num_entries; ++i) {
      keys.push_back(concat("key", i));
      entries.push_back({to_abi(keys.back()), value_of(STG_NONE)});
    }
    validate(dict_of(entries.data(), num_entries), "state");
    entries.back().key = entries.front().key;
    check_error(error_of([&] { validate(dict_of(entries.data(), num_entries), "state"); }), STG_INVALID_ARGUMENT,
                {"state(root)", "\"key0\" twice"});
  }
}

TEST_CASE("the same key in two dicts is no duplicate, and neither are keys that share a beginning") {
  stg_entry inner[1] = {{to_abi("a"), value_of(STG_NONE)}};
  stg_entry outer[3] = {{to_abi("a"), dict_of(inner, 1)}, {to_abi("ab"), dict_of(inner, 1)}, {to_abi(""), value_of(STG_NONE)}};
  validate(dict_of(outer, 3), "state");
}

TEST_CASE("null pointers with a count are refused by place, and allowed with none") {
  for (const uint32_t type : {STG_STRING, STG_BYTES, STG_LIST, STG_TUPLE, STG_DICT}) {
    validate(value_of(type, 0), "batch");
    stg_entry entries[1] = {{to_abi("x"), value_of(type, 3)}};
    check_error(refusal(dict_of(entries, 1)), STG_INVALID_ARGUMENT, {"batch[\"x\"]", "null"});
  }
  check_error(refusal(value_of(STG_TENSOR)), STG_INVALID_ARGUMENT, {"null tensor"});
  check_error(refusal(value_of(STG_OPAQUE)), STG_INVALID_ARGUMENT, {"null opaque"});
  stg_entry null_key[1] = {{{nullptr, 3}, value_of(STG_NONE)}};
  check_error(refusal(dict_of(null_key, 1)), STG_INVALID_ARGUMENT, {"null key"});
  null_key[0].key.size_bytes = 0;
  validate(dict_of(null_key, 1), "batch");
}

TEST_CASE("an unknown type is refused with its number and place") {
  stg_value items[2] = {value_of(STG_NONE), value_of(11)};
  check_error(refusal(list_of(items, 2)), STG_INVALID_ARGUMENT, {"batch[1]", "unknown type 11"});
  CHECK(type_name(STG_OPAQUE) == "opaque");
  CHECK(type_name(11) == "unknown type 11");
}

TEST_CASE("an opaque object of an impossible size, or without retain or release, is refused") {
  const auto refused = [](const auto& spoil, const std::string& text) {
    CountedOpaque object;
    spoil(object.abi);
    stg_value value = value_of(STG_OPAQUE);
    value.as.opaque = &object.abi;
    check_error(refusal(value), STG_INVALID_ARGUMENT, {text});
  };
  refused([](stg_opaque& o) { o.struct_size = 0; }, "struct_size 0");
  refused([](stg_opaque& o) { o.struct_size = STG_OPAQUE_MIN_SIZE - 1; }, "struct_size 47");
  refused([](stg_opaque& o) { o.struct_size = STG_MAX_STRUCT_SIZE_BYTES + 1; }, "struct_size 65537");
  refused([](stg_opaque& o) { o.retain = nullptr; }, "retain and release");
  refused([](stg_opaque& o) { o.release = nullptr; }, "retain and release");
}

TEST_CASE("a bad tensor deep in a tree is refused by its key path") {
  CountedTensor tensor;
  tensor.abi.dlpack_major = 2;
  stg_value items[1] = {value_of(STG_TENSOR)};
  items[0].as.tensor = &tensor.abi;
  stg_entry entries[1] = {{to_abi("inputs"), list_of(items, 1)}};
  check_error(refusal(dict_of(entries, 1)), STG_INVALID_ARGUMENT, {"batch[\"inputs\"][0]", "DLPack 2"});
}

TEST_CASE("find gives the value of a key, and nothing for another key or another type") {
  Dict dict;
  dict.emplace_back("a", int64_t{1});
  dict.emplace_back("", int64_t{2});
  Tree tree = make_tree(std::move(dict));
  REQUIRE(find(tree.root(), "a") != nullptr);
  CHECK(find(tree.root(), "a")->as.i64 == 1);
  CHECK(find(tree.root(), "")->as.i64 == 2);
  CHECK(find(tree.root(), "b") == nullptr);
  CHECK(find(*find(tree.root(), "a"), "a") == nullptr);
}

TEST_CASE("leaves are visited in order, each with its path") {
  Dict dict;
  dict.emplace_back("x", make_list(int64_t{1}, Tuple{make_list(int64_t{2})}));
  dict.emplace_back("y", List{});
  dict.emplace_back("z", "3");
  Tree tree = make_tree(std::move(dict));
  std::vector<std::string> seen;
  const stg_value& root = tree.root();
  for_each_leaf(root,
                [&](const KeyPath& path, const stg_value& leaf) { seen.push_back(path.text() + " " + type_name(leaf.type)); });
  CHECK(seen == std::vector<std::string>{"[\"x\"][0] int64", "[\"x\"][1][0] int64", "[\"z\"] string"});

  for_each_leaf(tree.root(),
                [](const KeyPath&, stg_value& leaf) { leaf.as.i64 = leaf.type == STG_INT64 ? leaf.as.i64 * 10 : leaf.as.i64; });
  CHECK(find(tree.root(), "x")->as.items[1].as.items[0].as.i64 == 20);
}

TEST_CASE("the path of a root is (root)") {
  std::string seen;
  for_each_leaf(Tree::view(value_of(STG_NONE)).root(), [&](const KeyPath& path, const stg_value&) { seen = path.text(); });
  CHECK(seen == "(root)");
}

TEST_CASE("a good tree is checked without a single allocation") {
  Dict inner;
  inner.emplace_back("mask", allocate_tensor(boolean, {4}));
  inner.emplace_back("flag", true);
  Dict dict;
  dict.emplace_back("inputs", allocate_tensor(float32, {4, 3}));
  dict.emplace_back("targets", allocate_tensor(int64, {4}));
  dict.emplace_back("more", make_list(std::move(inner), "text", int64_t{3}));
  const Tree tree = make_tree(std::move(dict));
  const uint64_t before = num_allocations;
  validate(tree.root(), "batch");
  CHECK(num_allocations == before);
}
