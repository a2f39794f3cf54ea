// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, `reduce`.
#include <cmath>

#include "spec/instance.hpp"
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
  Instance instance("data_parallel", plain);
  TensorPtr large = allocate_tensor(int64, {2});
  first_element<int64_t>(large->view)[0] = (int64_t{1} << 53) + 1;
  const Tree out = instance.reduce(make_tree(std::move(large)), STG_REDUCE_SUM);
  CHECK(*first_element<int64_t>(out.root().as.tensor->view) == (int64_t{1} << 53) + 1);
}

TEST_CASE("min and max keep the dtype") {
  CHECK(reduced({3, 1, 2}, int64, STG_REDUCE_MIN, int64) == 1);
  CHECK(reduced({3, 1, 2}, float32, STG_REDUCE_MAX, float32) == 3);
  CHECK(reduced({1, 0}, boolean, STG_REDUCE_MAX, boolean) == 1);
  CHECK(std::isnan(reduced({1, std::nan(""), 2}, float32, STG_REDUCE_MAX, float32)));
}

TEST_CASE("complex tensors have a mean and a sum, but no min or max") {
  Instance instance("data_parallel", plain);
  const stg_dtype complex64{STG_DTYPE_COMPLEX, 64, 1};
  const auto make = [&] {
    TensorPtr tensor = allocate_tensor(complex64, {2});
    const float parts[] = {1, 2, 3, 6};
    std::copy_n(parts, 4, first_element<float>(tensor->view));
    return make_tree(std::move(tensor));
  };
  const Tree out = instance.reduce(make());
  CHECK(first_element<float>(out.root().as.tensor->view)[0] == 2);
  CHECK(first_element<float>(out.root().as.tensor->view)[1] == 4);
  CHECK(error_of([&] { instance.reduce(make(), STG_REDUCE_MAX); }).code == STG_INVALID_ARGUMENT);
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
  Instance instance("data_parallel", plain);
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
}
