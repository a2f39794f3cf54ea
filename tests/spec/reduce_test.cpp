// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, `reduce`.
#include <algorithm>
#include <cmath>
#include <memory>

#include "spec/instance.hpp"
#include "strategy/elements.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::string plain = R"({"devices": 1})";
const std::string lightning = R"({"devices": 1, "options": {"compat": "lightning"}})";

double reduced(const std::vector<double>& values, stg_dtype dtype, uint32_t op, stg_dtype expected,
               const std::string& config = plain) {
  Instance instance("data_parallel", config);
  const Tree out = instance.reduce(make_tree(tensor_of(values, {static_cast<int64_t>(values.size())}, dtype)), op);
  CHECK(shape(out.root()).empty());
  CHECK(dtype_name(out.root().as.tensor->view.dtype) == dtype_name(expected));
  return numbers(out.root()).at(0);
}

}  // namespace

TEST_CASE("a mean keeps the floating dtype, and is float64 for integers and bools") {
  CHECK(reduced({1, 2, 3, 6}, float32, STG_REDUCE_MEAN, float32) == 3.0);
  CHECK(std::abs(reduced({0.1, 0.2}, float64, STG_REDUCE_MEAN, float64) - 0.15) <= 0x1p-55);
  CHECK(reduced({1, 2}, int64, STG_REDUCE_MEAN, float64) == 1.5);
  CHECK(reduced({0, 1}, int64, STG_REDUCE_MEAN, float64) == 0.5);
  CHECK(reduced({1, 0}, boolean, STG_REDUCE_MEAN, float64) == 0.5);
  CHECK(reduced({1, 2}, {STG_DTYPE_FLOAT, 16, 1}, STG_REDUCE_MEAN, {STG_DTYPE_FLOAT, 16, 1}) == 1.5);
  CHECK(reduced(std::vector<double>(300, 1.0), {STG_DTYPE_BFLOAT, 16, 1}, STG_REDUCE_SUM, {STG_DTYPE_BFLOAT, 16, 1}) == 300);
}

TEST_CASE("sums of integers and bools are int64 and exact") {
  CHECK(reduced({2, 4}, int64, STG_REDUCE_SUM, int64) == 6);
  CHECK(reduced({1, 1}, boolean, STG_REDUCE_SUM, int64) == 2);
  CHECK(reduced({200, 100}, uint8, STG_REDUCE_SUM, int64) == 300);
}

TEST_CASE("every op takes every real dtype: means of floats and min and max keep it, else float64 and int64") {
  std::vector<stg_dtype> dtypes{boolean, {STG_DTYPE_FLOAT, 16, 1}, {STG_DTYPE_BFLOAT, 16, 1}, float32, float64};
  for (const uint8_t code : std::initializer_list<uint8_t>{STG_DTYPE_INT, STG_DTYPE_UINT}) {
    for (const uint8_t bits : std::initializer_list<uint8_t>{8, 16, 32, 64}) dtypes.push_back({code, bits, 1});
  }
  for (const stg_dtype dtype : dtypes) {
    CAPTURE(dtype_name(dtype));
    const bool is_bool = dtype.code == STG_DTYPE_BOOL;
    const std::vector<double> values = is_bool ? std::vector<double>{1, 0, 1, 0} : std::vector<double>{3, 1, 2, 4};
    const stg_dtype own_or_double = is_floating(dtype) ? dtype : float64;
    const stg_dtype own_or_integer = is_floating(dtype) ? dtype : int64;
    CHECK(reduced(values, dtype, STG_REDUCE_MEAN, own_or_double) == (is_bool ? 0.5 : 2.5));
    CHECK(reduced(values, dtype, STG_REDUCE_SUM, own_or_integer) == (is_bool ? 2 : 10));
    CHECK(reduced(values, dtype, STG_REDUCE_MIN, dtype) == (is_bool ? 0 : 1));
    CHECK(reduced(values, dtype, STG_REDUCE_MAX, dtype) == (is_bool ? 1 : 4));
    CHECK(reduced({}, dtype, STG_REDUCE_SUM, own_or_integer) == 0);
    // Through float32 and back: integers truncate, bool becomes "any"; the op is ignored.
    for (const uint32_t op : {STG_REDUCE_MEAN, STG_REDUCE_SUM, STG_REDUCE_MIN, STG_REDUCE_MAX}) {
      CHECK(reduced(values, dtype, op, dtype, lightning) == (is_bool ? 1 : is_floating(dtype) ? 2.5 : 2));
    }
  }
}

TEST_CASE("integers keep every digit, and a sum that doesn't fit int64 is an error with its key path") {
  const stg_dtype uint64{STG_DTYPE_UINT, 64, 1};
  const auto of = [](stg_dtype dtype, std::vector<uint64_t> bits) {
    TensorPtr tensor = allocate_tensor(dtype, {static_cast<int64_t>(bits.size())});
    std::copy(bits.begin(), bits.end(), first_element<uint64_t>(tensor->view));
    Dict dict;
    dict.emplace_back("n", std::move(tensor));
    return make_tree(std::move(dict));
  };
  Instance instance("data_parallel", plain);
  const auto bits_of = [](const Tree& tree) { return *first_element<uint64_t>(find(tree.root(), "n")->as.tensor->view); };
  const auto minus = [](uint64_t value) { return ~value + 1; };
  const uint64_t large = (uint64_t{1} << 53) + 1;
  CHECK(bits_of(instance.reduce(of(int64, {large, 0}), STG_REDUCE_SUM)) == large);
  CHECK(bits_of(instance.reduce(of(int64, {minus(large), 1}), STG_REDUCE_MIN)) == minus(large));
  CHECK(bits_of(instance.reduce(of(uint64, {~uint64_t{0}, 1}), STG_REDUCE_MAX)) == ~uint64_t{0});
  // What overflows on the way is no error: 2^63 - 1 + 1 - 1.
  CHECK(bits_of(instance.reduce(of(int64, {(uint64_t{1} << 63) - 1, 1, minus(1)}), STG_REDUCE_SUM)) == (uint64_t{1} << 63) - 1);
  for (const stg_dtype dtype : {int64, uint64}) {
    const Error error = error_of([&] { instance.reduce(of(dtype, {(uint64_t{1} << 63) - 1, 1}), STG_REDUCE_SUM); });
    CHECK(error.code == STG_OUT_OF_RANGE);
    CHECK_THAT(error.message, Catch::Contains("[\"n\"]") && Catch::Contains("int64"));
  }
  Instance compatible("data_parallel", lightning);
  CHECK(bits_of(compatible.reduce(of(int64, {large, 0}), STG_REDUCE_SUM)) == uint64_t{1} << 52);
}

TEST_CASE("strided, offset, 0-dim and read-only tensors reduce to one number") {
  Instance instance("data_parallel", plain);
  const auto storage = std::make_shared<std::vector<float>>(std::vector<float>{9, 1, 9, 2, 9, 6, 9});
  TensorPtr odd = make_strided_tensor(storage, storage->data(), float32, {3}, {2}, STG_TENSOR_READ_ONLY, {STG_DEVICE_CPU, 0});
  odd->view.byte_offset = sizeof(float);
  Tree tree = make_tree(make_list(std::move(odd), scalar(4), tensor_of({1, 2, 3, 4}, {2, 2})));
  const Tree out = instance.reduce(Tree::view(tree.root()));
  CHECK(numbers(out.root().as.items[0]) == std::vector<double>{3});
  CHECK(numbers(out.root().as.items[1]) == std::vector<double>{4});
  CHECK(numbers(out.root().as.items[2]) == std::vector<double>{2.5});
  for (uint32_t i = 0; i < 3; ++i) CHECK(shape(out.root().as.items[i]).empty());
  CHECK(*storage == std::vector<float>{9, 1, 9, 2, 9, 6, 9});
  CHECK(std::isnan(reduced({1, std::nan(""), 2}, float32, STG_REDUCE_MEAN, float32)));
  CHECK_THAT(error_of([&] { instance.reduce(make_tree(scalar(1)), 4); }).message, Catch::Contains("op is 4"));
}

TEST_CASE("min and max keep the dtype") {
  CHECK(reduced({3, 1, 2}, int64, STG_REDUCE_MIN, int64) == 1);
  CHECK(reduced({3, 1, 2}, float32, STG_REDUCE_MAX, float32) == 3);
  CHECK(reduced({1, 0}, boolean, STG_REDUCE_MAX, boolean) == 1);
  CHECK(std::isnan(reduced({1, std::nan(""), 2}, float32, STG_REDUCE_MAX, float32)));
}

TEST_CASE("complex tensors have a mean and a sum of their dtype, but no min or max") {
  Instance instance("data_parallel", plain);
  const auto make = [&](uint8_t bits) {
    const stg_dtype part{STG_DTYPE_FLOAT, static_cast<uint8_t>(bits / 2), 1};
    TensorPtr tensor = allocate_tensor({STG_DTYPE_COMPLEX, bits, 1}, {2});
    char* at = first_element<char>(tensor->view);
    for (const double value : {1.0, 2.0, 3.0, 6.0}) {
      store_floating(at, part, value);
      at += element_size_bytes(part);
    }
    return make_tree(make_list(std::move(tensor)));
  };
  const auto parts = [](const Tree& tree) {
    const stg_tensor_view& view = tree.root().as.items[0].as.tensor->view;
    CHECK(view.num_dims == 0);
    const stg_dtype part{STG_DTYPE_FLOAT, static_cast<uint8_t>(view.dtype.bits / 2), 1};
    const TensorPtr pair = make_tensor(nullptr, first_element<>(view), part, {2});
    return std::pair{read_element(pair->view, 0), read_element(pair->view, 1)};
  };
  for (const uint8_t bits : std::initializer_list<uint8_t>{32, 64, 128}) {
    CAPTURE(bits);
    const Tree mean = instance.reduce(make(bits));
    CHECK(same_dtype(mean.root().as.items[0].as.tensor->view.dtype, {STG_DTYPE_COMPLEX, bits, 1}));
    CHECK(parts(mean) == std::pair{2.0, 4.0});
    CHECK(parts(instance.reduce(make(bits), STG_REDUCE_SUM)) == std::pair{4.0, 8.0});
    for (const uint32_t op : {STG_REDUCE_MIN, STG_REDUCE_MAX}) {
      const Error error = error_of([&] { instance.reduce(make(bits), op); });
      CHECK(error.code == STG_INVALID_ARGUMENT);
      CHECK_THAT(error.message, Catch::Contains("[0]") && Catch::Contains("complex"));
    }
    Instance compatible("data_parallel", lightning);
    CHECK(parts(compatible.reduce(make(bits), STG_REDUCE_MAX)) == std::pair{2.0, 4.0});
  }
}

TEST_CASE("an empty tensor has no mean, and the error names its key path") {
  Instance instance("data_parallel", plain);
  Dict dict;
  dict.emplace_back("empty", tensor_of({}, {0}));
  const Error error = error_of([&] { instance.reduce(make_tree(std::move(dict))); });
  CHECK(error.code == STG_INVALID_ARGUMENT);
  CHECK_THAT(error.message, Catch::Contains("[\"empty\"]"));
}

TEST_CASE("nested trees keep their structure, other leaves pass unchanged") {
  const std::string config = GENERATE(plain, lightning);
  Instance instance("data_parallel", config);
  List list;
  list.emplace_back(tensor_of({1, 3}, {2}));
  list.emplace_back(tensor_of({5, 7}, {1, 2}));
  Dict inner;
  inner.emplace_back("b", std::move(list));
  Dict dict;
  dict.emplace_back("a", std::move(inner));
  dict.emplace_back("c", "text");
  dict.emplace_back("d", 2.0);
  const Tree out = instance.reduce(make_tree(std::move(dict)));
  const stg_value& b = *find(*find(out.root(), "a"), "b");
  CHECK(numbers(b.as.items[0]) == std::vector<double>{2});
  CHECK(numbers(b.as.items[1]) == std::vector<double>{6});
  CHECK(text_of(*find(out.root(), "c")) == "text");
  CHECK(find(out.root(), "d")->as.f64 == 2.0);
}

TEST_CASE("a single device's reduce gives back the same object, a borrowed one copied") {
  Instance instance("single_device", "{}");
  TensorPtr tensor = tensor_of({1, 3}, {2});
  const void* memory = tensor->view.data;
  const Tree out = instance.reduce(make_tree(std::move(tensor)));
  CHECK(out.root().as.tensor->view.data == memory);
  const Tree copy = instance.reduce(Tree::view(out.root()));
  CHECK(numbers(copy.root()) == std::vector<double>{1, 3});
  CHECK(copy.root().as.tensor->view.data != memory);
}

TEST_CASE("compat lightning goes through float32 and back to its own dtype") {
  CHECK(reduced({1, 2, 3, 6}, float32, STG_REDUCE_MEAN, float32, lightning) == 3.0);
  CHECK(reduced({0.1, 0.2}, float64, STG_REDUCE_MEAN, float64, lightning) != 0.15);
  CHECK(reduced({1, 2}, int64, STG_REDUCE_MEAN, int64, lightning) == 1);
  CHECK(reduced({0, 1}, int64, STG_REDUCE_MEAN, int64, lightning) == 0);
  CHECK(reduced({2, 4}, int64, STG_REDUCE_SUM, int64, lightning) == 3);
  CHECK(reduced({1, 0}, boolean, STG_REDUCE_MEAN, boolean, lightning) == 1);
  CHECK(std::isnan(reduced({}, float32, STG_REDUCE_MEAN, float32, lightning)));
  CHECK(reduced({}, {STG_DTYPE_INT, 8, 1}, STG_REDUCE_MEAN, {STG_DTYPE_INT, 8, 1}, lightning) == -128);
}
