// SPDX-License-Identifier: Apache-2.0
#include "base/dlpack.hpp"

#include <cmath>
#include <cstring>
#include <limits>

#include "base/structs.hpp"
#include "unit/support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

constexpr stg_dtype float16{STG_DTYPE_FLOAT, 16, 1};
constexpr stg_dtype bfloat16{STG_DTYPE_BFLOAT, 16, 1};

// A tensor of another party over memory of its own: any field can be set.
template <class T>
struct Raw {
  Raw(std::vector<T> elements, stg_dtype dtype, std::vector<int64_t> sizes, std::vector<int64_t> steps = {})
      : data(std::move(elements)), shape(std::move(sizes)), strides(std::move(steps)) {
    abi.dlpack_major = STG_DLPACK_MAJOR;
    abi.dlpack_minor = 3;  // a later minor is compatible
    abi.view = {data.data(),
                {STG_DEVICE_CPU, 0},
                static_cast<int32_t>(shape.size()),
                dtype,
                shape.data(),
                strides.empty() ? nullptr : strides.data(),
                0};
  }
  std::vector<T> data;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  stg_tensor abi{};
};

template <class T>
std::vector<T> elements(const TensorPtr& tensor) {
  REQUIRE(is_contiguous(tensor->view));
  const T* first = first_element<T>(tensor->view);
  return {first, first + numel(tensor->view)};
}

std::vector<double> numbers(const stg_tensor_view& view) {
  std::vector<double> out;
  for (int64_t i = 0; i < numel(view); ++i) out.push_back(read_element(view, i));
  return out;
}

Error refusal(const stg_tensor& tensor) {
  return error_of([&] { check_tensor(tensor, "batch[\"x\"]"); });
}

template <class T>
double read_one(T bits, stg_dtype dtype) {
  Raw<T> raw{{bits}, dtype, {}};
  return read_element(raw.abi.view, 0);
}

}  // namespace

// Without this, the sanitizers end the program where malloc would return null.
extern "C" __attribute__((visibility("default"), used)) const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}
extern "C" __attribute__((visibility("default"), used)) const char* __tsan_default_options() {
  return "allocator_may_return_null=1";
}

TEST_CASE("the first element lies at data + byte_offset, in and out") {
  Raw<float> raw{{10, 11, 12, 13}, float32, {3}};
  raw.abi.view.byte_offset = 4;
  check_tensor(raw.abi, "x");
  CHECK(numbers(raw.abi.view) == std::vector<double>{11, 12, 13});
  CHECK(elements<float>(copy_tensor(raw.abi.view)) == std::vector<float>{11, 12, 13});
  CHECK(numbers(narrow_rows(nullptr, raw.abi, 1, 2)->view) == std::vector<double>{12, 13});
}

TEST_CASE("strides of dimensions of size 1 and of empty tensors don't matter") {
  Raw<float> row{{1, 2, 3}, float32, {1, 3}, {999, 1}};
  check_tensor(row.abi, "x");
  CHECK(is_contiguous(row.abi.view));
  CHECK(numbers(row.abi.view) == std::vector<double>{1, 2, 3});

  row.strides[0] = -5;  // not read, so not refused
  check_tensor(row.abi, "x");
  CHECK(is_contiguous(row.abi.view));

  Raw<float> empty{{}, float32, {0, 3}, {-7, 1}};
  empty.abi.view.data = nullptr;
  check_tensor(empty.abi, "x");
  CHECK(numel(empty.abi.view) == 0);
  CHECK(shape_text(copy_tensor(empty.abi.view)->view) == "(0, 3)");
}

TEST_CASE("an empty tensor may have null data and null strides") {
  Raw<float> empty{{}, float32, {0, 3}};
  empty.abi.view.data = nullptr;
  check_tensor(empty.abi, "x");
  CHECK(is_contiguous(empty.abi.view));
  CHECK(strides_of(empty.abi.view) == std::vector<int64_t>{3, 1});
}

TEST_CASE("a 0-dim tensor may have null shape and null strides") {
  Raw<float> scalar{{3.5F}, float32, {}};
  scalar.abi.view.shape = nullptr;
  check_tensor(scalar.abi, "x");
  CHECK(numel(scalar.abi.view) == 1);
  CHECK(shape_text(scalar.abi.view) == "()");
  CHECK(read_element(scalar.abi.view, 0) == 3.5);
  const TensorPtr copy = copy_tensor(scalar.abi.view);
  CHECK(copy->view.num_dims == 0);
  CHECK(elements<float>(copy) == std::vector<float>{3.5F});
}

TEST_CASE("a read-only tensor is accepted, and its rows stay read-only") {
  Raw<float> raw{{1, 2, 3, 4}, float32, {2, 2}};
  raw.abi.flags = STG_TENSOR_READ_ONLY;
  check_tensor(raw.abi, "x");
  CHECK(narrow_rows(nullptr, raw.abi, 0, 1)->flags == STG_TENSOR_READ_ONLY);
  CHECK(copy_tensor(raw.abi.view)->flags == 0);  // a copy is the receiver's
}

TEST_CASE("sizes that overflow are refused with the shape, before anything is allocated") {
  const auto refused = [](std::vector<int64_t> shape, stg_dtype dtype, const char* shown, const char* reason) {
    Raw<double> raw{{0, 0}, dtype, std::move(shape)};
    check_error(refusal(raw.abi), STG_INVALID_ARGUMENT, {"batch[\"x\"]", shown, reason});
  };
  refused({int64_t{1} << 62}, float32, "(4611686018427387904)", "2^62 bytes");
  refused({-1}, float32, "(-1)", "negative");
  refused({2, -3, 0}, float32, "(2, -3, 0)", "negative");
  refused({int64_t{1} << 32, int64_t{1} << 32}, uint8, "(4294967296, 4294967296)", "2^62 bytes");
  refused({std::numeric_limits<int64_t>::max()}, uint8, "(9223372036854775807)", "2^62 bytes");
  refused({0, int64_t{1} << 62, 4}, uint8, "(0, 4611686018427387904, 4)", "2^62 bytes");  // zero does not excuse the others
  refused({int64_t{1} << 31, int64_t{1} << 31, 3}, uint8, "3)", "2^62 bytes");
}

TEST_CASE("checked_size_bytes multiplies, and gives none where check_tensor refuses") {
  const auto size = [](stg_dtype dtype, std::vector<int64_t> shape) { return checked_size_bytes(dtype, shape); };
  CHECK(size(float32, {}) == 4);
  CHECK(size(float64, {3, 5}) == 120);
  CHECK(size(uint8, {7, 0, 9}) == 0);
  CHECK(size(uint8, {int64_t{1} << 62}) == uint64_t{1} << 62);
  CHECK_FALSE(size(uint8, {(int64_t{1} << 62) + 1}).has_value());
  CHECK_FALSE(size(uint8, {0, int64_t{1} << 62, 2}).has_value());
}

TEST_CASE("another DLPack major is refused, another minor is not") {
  Raw<float> raw{{1}, float32, {1}};
  raw.abi.dlpack_minor = 4'000'000'000;
  check_tensor(raw.abi, "x");
  for (const uint32_t major : {0U, 2U}) {
    raw.abi.dlpack_major = major;
    check_error(refusal(raw.abi), STG_INVALID_ARGUMENT, {"DLPack " + std::to_string(major), "1.x"});
  }
}

TEST_CASE("an impossible number of dimensions, and a null shape, are refused") {
  Raw<float> raw{{1}, float32, {1}};
  for (const int32_t num_dims : {-1, 65, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
    raw.abi.view.num_dims = num_dims;
    check_error(refusal(raw.abi), STG_INVALID_ARGUMENT, {std::to_string(num_dims), "0 to 64"});
  }
  raw.abi.view.num_dims = 1;
  raw.abi.view.shape = nullptr;
  check_error(refusal(raw.abi), STG_INVALID_ARGUMENT, {"null shape with 1 dimensions"});

  Raw<float> many{{1}, float32, std::vector<int64_t>(64, 1)};
  check_tensor(many.abi, "x");
  CHECK(read_element(many.abi.view, 0) == 1);
}

TEST_CASE("element types that no tensor here has are refused by code, bits and lanes") {
  Raw<float> raw{{1, 2}, float32, {1}};
  const std::vector<stg_dtype> unknown{{STG_DTYPE_FLOAT, 8, 1},
                                       {STG_DTYPE_FLOAT, 128, 1},
                                       {STG_DTYPE_INT, 4, 1},
                                       {STG_DTYPE_INT, 24, 1},
                                       {STG_DTYPE_BOOL, 1, 1},
                                       {STG_DTYPE_BFLOAT, 32, 1},
                                       {3, 64, 1},
                                       {7, 8, 1},
                                       {STG_DTYPE_FLOAT, 32, 2},
                                       {STG_DTYPE_FLOAT, 32, 0},
                                       {0, 0, 0},
                                       {STG_DTYPE_COMPLEX, 16, 1}};
  for (const stg_dtype dtype : unknown) {
    raw.abi.view.dtype = dtype;
    check_error(refusal(raw.abi), STG_INVALID_ARGUMENT,
                {concat("code ", int{dtype.code}, ", ", int{dtype.bits}, " bits, ", dtype.lanes, " lanes")});
  }
}

TEST_CASE("known element types have names and sizes") {
  const std::vector<std::pair<stg_dtype, std::string>> known{{boolean, "bool"},
                                                             {uint8, "uint8"},
                                                             {{STG_DTYPE_UINT, 16, 1}, "uint16"},
                                                             {{STG_DTYPE_UINT, 32, 1}, "uint32"},
                                                             {{STG_DTYPE_UINT, 64, 1}, "uint64"},
                                                             {{STG_DTYPE_INT, 8, 1}, "int8"},
                                                             {{STG_DTYPE_INT, 16, 1}, "int16"},
                                                             {{STG_DTYPE_INT, 32, 1}, "int32"},
                                                             {int64, "int64"},
                                                             {float16, "float16"},
                                                             {bfloat16, "bfloat16"},
                                                             {float32, "float32"},
                                                             {float64, "float64"},
                                                             {{STG_DTYPE_COMPLEX, 32, 1}, "complex32"},
                                                             {{STG_DTYPE_COMPLEX, 64, 1}, "complex64"},
                                                             {{STG_DTYPE_COMPLEX, 128, 1}, "complex128"}};
  for (const auto& [dtype, name] : known) {
    CHECK(dtype_name(dtype) == name);
    CHECK(element_size_bytes(dtype) == dtype.bits / 8);
    Raw<double> raw{{0, 0}, dtype, {1}};
    check_tensor(raw.abi, "x");
  }
}

TEST_CASE("negative strides, and strides that reach too far, are refused by dimension") {
  Raw<float> raw{{1, 2, 3, 4}, float32, {2, 2}, {2, 1}};
  raw.strides[1] = -1;
  check_error(refusal(raw.abi), STG_INVALID_ARGUMENT, {"negative stride -1 in dimension 1"});
  raw.strides[1] = 1;
  for (const int64_t stride : {std::numeric_limits<int64_t>::max(), int64_t{1} << 60, int64_t{1} << 61}) {
    raw.strides[0] = stride;
    check_error(refusal(raw.abi), STG_INVALID_ARGUMENT, {concat("stride ", stride, " in dimension 0"), "2^62"});
  }
  raw.strides[0] = 0;  // expanded
  check_tensor(raw.abi, "x");
  CHECK(numbers(raw.abi.view) == std::vector<double>{1, 2, 1, 2});
}

TEST_CASE("null data with elements is refused") {
  Raw<float> raw{{1}, float32, {1}};
  raw.abi.view.data = nullptr;
  check_error(refusal(raw.abi), STG_INVALID_ARGUMENT, {"null data", "(1)"});
}

TEST_CASE("an address that the element type can't have is refused, complex ones by their parts") {
  Raw<double> raw{{0, 0, 0, 0}, float32, {1}};
  raw.abi.view.byte_offset = 2;
  check_error(refusal(raw.abi), STG_INVALID_ARGUMENT, {"byte_offset (2)", "float32"});
  raw.abi.view.byte_offset = 4;
  check_tensor(raw.abi, "x");
  raw.abi.view.dtype = {STG_DTYPE_COMPLEX, 64, 1};
  check_tensor(raw.abi, "x");
  raw.abi.view.dtype = float64;
  check_error(refusal(raw.abi), STG_INVALID_ARGUMENT, {"float64"});
  raw.abi.view.dtype = uint8;
  raw.abi.view.byte_offset = 3;
  check_tensor(raw.abi, "x");
}

TEST_CASE("an offset that overflows, alone or with what follows it, is refused") {
  Raw<float> raw{{1, 2, 3, 4}, float32, {4}};
  for (const uint64_t offset : {(uint64_t{1} << 62) - 12, uint64_t{1} << 62, uint64_t{1} << 63, ~uint64_t{3}}) {
    raw.abi.view.byte_offset = offset;
    check_error(refusal(raw.abi), STG_INVALID_ARGUMENT, {concat("byte_offset ", offset), "2^62"});
  }
  raw.abi.view.shape[0] = 0;
  check_error(refusal(raw.abi), STG_INVALID_ARGUMENT, {concat("byte_offset ", ~uint64_t{3})});
}

TEST_CASE("contiguity is told from shape and strides") {
  const auto contiguous = [](std::vector<int64_t> shape, std::vector<int64_t> strides) {
    const Raw<float> raw{{0}, float32, std::move(shape), std::move(strides)};
    return is_contiguous(raw.abi.view);
  };
  CHECK(contiguous({2, 3}, {3, 1}));
  CHECK(contiguous({2, 3}, {}));
  CHECK(contiguous({2, 1, 3}, {3, 77, 1}));
  CHECK_FALSE(contiguous({2, 3}, {1, 2}));
  CHECK_FALSE(contiguous({2, 3}, {4, 1}));
  CHECK_FALSE(contiguous({3}, {0}));
  CHECK_FALSE(contiguous({3}, {2}));
}

TEST_CASE("strides are computed row-major where there are none") {
  Raw<float> raw{std::vector<float>(24), float32, {2, 3, 4}};
  CHECK(strides_of(raw.abi.view) == std::vector<int64_t>{12, 4, 1});
}

TEST_CASE("a copy of a strided tensor is row-major") {
  Raw<float> transposed{{1, 2, 3, 4, 5, 6}, float32, {3, 2}, {1, 3}};
  CHECK(numbers(transposed.abi.view) == std::vector<double>{1, 4, 2, 5, 3, 6});
  const TensorPtr copy = copy_tensor(transposed.abi.view);
  CHECK(elements<float>(copy) == std::vector<float>{1, 4, 2, 5, 3, 6});
  CHECK(strides_of(copy->view) == std::vector<int64_t>{2, 1});

  Raw<uint8_t> every_second{{1, 2, 3, 4, 5, 6, 7, 8}, uint8, {2, 2}, {4, 2}};
  CHECK(elements<uint8_t>(copy_tensor(every_second.abi.view)) == std::vector<uint8_t>{1, 3, 5, 7});

  Raw<float> expanded{{7}, float32, {2, 3}, {0, 0}};
  CHECK(elements<float>(copy_tensor(expanded.abi.view)) == std::vector<float>(6, 7));

  Raw<double> complex_pairs{{1, 2, 3, 4, 5, 6}, {STG_DTYPE_COMPLEX, 128, 1}, {2}, {2}};
  const TensorPtr pairs = copy_tensor(complex_pairs.abi.view);
  const auto* parts = first_element<double>(pairs->view);
  CHECK(std::vector<double>(parts, parts + 4) == std::vector<double>{1, 2, 5, 6});
}

TEST_CASE("a copy shares no memory with its source") {
  Raw<float> raw{{1, 2}, float32, {2}};
  const TensorPtr copy = copy_tensor(raw.abi.view);
  raw.data[0] = 100;
  CHECK(elements<float>(copy) == std::vector<float>{1, 2});
}

TEST_CASE("rows of a tensor are a view that keeps its memory alive") {
  auto memory = std::make_shared<std::vector<float>>(std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7});
  const std::weak_ptr<std::vector<float>> watch = memory;
  TensorPtr rows;
  {
    const TensorPtr whole = make_tensor(memory, memory->data(), float32, {4, 2});
    rows = narrow_rows(memory, *whole, 1, 2);
  }
  memory.reset();
  REQUIRE_FALSE(watch.expired());
  CHECK(shape_text(rows->view) == "(2, 2)");
  CHECK(numbers(rows->view) == std::vector<double>{2, 3, 4, 5});
  CHECK(first_element<float>(rows->view) == watch.lock()->data() + 2);
  rows.reset();
  CHECK(watch.expired());
}

TEST_CASE("rows of a tensor with strides keep them") {
  Raw<float> transposed{{1, 2, 3, 4, 5, 6}, float32, {3, 2}, {1, 3}};
  const TensorPtr rows = narrow_rows(nullptr, transposed.abi, 1, 2);
  CHECK(strides_of(rows->view) == std::vector<int64_t>{1, 3});
  CHECK(numbers(rows->view) == std::vector<double>{2, 5, 3, 6});
}

TEST_CASE("no rows are a valid empty tensor") {
  Raw<float> raw{{1, 2, 3, 4}, float32, {2, 2}};
  const TensorPtr rows = narrow_rows(nullptr, raw.abi, 2, 0);
  check_tensor(*rows, "x");
  CHECK(shape_text(rows->view) == "(0, 2)");
}

TEST_CASE("new memory is zeroed, aligned to 64 bytes, and there even for no elements") {
  const TensorPtr tensor = allocate_tensor(float64, {3, 5});
  CHECK(reinterpret_cast<uintptr_t>(tensor->view.data) % 64 == 0);
  CHECK(elements<double>(tensor) == std::vector<double>(15));
  CHECK(tensor->view.strides[0] == 5);
  const TensorPtr large = allocate_tensor(uint8, {static_cast<int64_t>(large_memory_bytes) + 1});
  auto* bytes = first_element<uint8_t>(large->view);
  CHECK(reinterpret_cast<uintptr_t>(bytes) % 64 == 0);
  CHECK(std::count(bytes, bytes + large_memory_bytes + 1, 0) == static_cast<int64_t>(large_memory_bytes) + 1);
  bytes[large_memory_bytes] = 1;
  CHECK(first_element<uint8_t>(copy_tensor(large->view)->view)[large_memory_bytes] == 1);
  CHECK(allocate_tensor(float32, {0, 3})->view.data != nullptr);
  CHECK(allocate_tensor(float32, {})->view.num_dims == 0);
}

TEST_CASE("memory that there is not is an error that says how much was wanted") {
  check_error(error_of([] { allocate_tensor(uint8, {int64_t{1} << 60}); }), STG_RESOURCE_EXHAUSTED,
              {"1152921504606846976 bytes"});
}

TEST_CASE("elements of integer and bool types are read as numbers") {
  CHECK(read_one<uint8_t>(1, boolean) == 1);
  CHECK(read_one<uint8_t>(255, uint8) == 255);
  CHECK(read_one<int8_t>(-128, {STG_DTYPE_INT, 8, 1}) == -128);
  CHECK(read_one<uint16_t>(65535, {STG_DTYPE_UINT, 16, 1}) == 65535);
  CHECK(read_one<int16_t>(-32768, {STG_DTYPE_INT, 16, 1}) == -32768);
  CHECK(read_one<uint32_t>(4294967295U, {STG_DTYPE_UINT, 32, 1}) == 4294967295.0);
  CHECK(read_one<int32_t>(std::numeric_limits<int32_t>::min(), {STG_DTYPE_INT, 32, 1}) == -2147483648.0);
  CHECK(read_one<uint64_t>(UINT64_MAX, {STG_DTYPE_UINT, 64, 1}) == 18446744073709551616.0);
  CHECK(read_one<int64_t>(std::numeric_limits<int64_t>::min(), int64) == -9223372036854775808.0);
  CHECK(read_one<int64_t>(int64_t{1} << 53, int64) == 9007199254740992.0);
}

TEST_CASE("elements of floating types are read exactly") {
  CHECK(read_one(0.1F, float32) == static_cast<double>(0.1F));
  CHECK(read_one(0.1, float64) == 0.1);
  CHECK(read_one(std::numeric_limits<float>::denorm_min(), float32) == std::ldexp(1.0, -149));
}

TEST_CASE("float16 is read with denormals, infinities, NaN and signed zero") {
  const auto half = [](uint16_t bits) { return read_one(bits, float16); };
  CHECK(half(0x3C00) == 1);
  CHECK(half(0xC000) == -2);
  CHECK(half(0x3555) == 0.333251953125);
  CHECK(half(0x7BFF) == 65504);
  CHECK(half(0x0400) == std::ldexp(1.0, -14));
  CHECK(half(0x03FF) == std::ldexp(1023.0, -24));
  CHECK(half(0x0001) == std::ldexp(1.0, -24));
  CHECK(half(0x8001) == -std::ldexp(1.0, -24));
  CHECK(half(0x7C00) == std::numeric_limits<double>::infinity());
  CHECK(half(0xFC00) == -std::numeric_limits<double>::infinity());
  CHECK(std::isnan(half(0x7E00)));
  CHECK(std::isnan(half(0xFC01)));
  CHECK(half(0x8000) == 0);
  CHECK(std::signbit(half(0x8000)));
}

TEST_CASE("bfloat16 is read with denormals, infinities, NaN and signed zero") {
  const auto number = [](uint16_t bits) { return read_one(bits, bfloat16); };
  CHECK(number(0x3FC0) == 1.5);
  CHECK(number(0xC000) == -2);
  CHECK(number(0x0001) == std::ldexp(1.0, -133));
  CHECK(number(0x007F) == std::ldexp(127.0, -133));
  CHECK(number(0x0080) == std::ldexp(1.0, -126));
  CHECK(number(0x7F80) == std::numeric_limits<double>::infinity());
  CHECK(number(0xFF80) == -std::numeric_limits<double>::infinity());
  CHECK(std::isnan(number(0x7FC0)));
  CHECK(std::signbit(number(0x8000)));
}

TEST_CASE("a complex element is no number") {
  Raw<float> raw{{1, 2}, {STG_DTYPE_COMPLEX, 64, 1}, {1}};
  check_error(error_of([&] { read_element(raw.abi.view, 0); }), STG_INVALID_ARGUMENT, {"complex64"});
}

TEST_CASE("devices have readable names") {
  CHECK(device_name({STG_DEVICE_CPU, 1}) == "cpu:1");
  CHECK(device_name({STG_DEVICE_CUDA, 0}) == "cuda:0");
  CHECK(device_name({STG_DEVICE_CUDA_HOST, 0}) == "pinned cpu:0");
  CHECK(device_name({STG_DEVICE_NONE, -1}) == "no device");
  CHECK(device_name({STG_DEVICE_EXTENSION, 2}) == "device kind 12:2");
}

TEST_CASE("a borrowed tree is copied with its tensors, and its opaques are shared") {
  struct Object {
    stg_opaque abi = sized<stg_opaque>();
    int num_references = 1;
  } object;
  object.abi.retain = [](stg_opaque* self) { ++reinterpret_cast<Object*>(self)->num_references; };
  object.abi.release = [](stg_opaque* self) { --reinterpret_cast<Object*>(self)->num_references; };
  Raw<float> raw{{1, 2, 3, 4}, float32, {2, 2}, {1, 2}};
  stg_value items[3] = {};
  items[0].type = STG_TENSOR;
  items[0].as.tensor = &raw.abi;
  items[1].type = STG_OPAQUE;
  items[1].as.opaque = &object.abi;
  items[2].type = STG_BOOL;
  items[2].as.i64 = 1;
  stg_value root{};
  root.type = STG_TUPLE;
  root.count = 3;
  root.as.items = items;
  stg_entry entry{to_abi("pair"), root};
  stg_value dict{};
  dict.type = STG_DICT;
  dict.count = 1;
  dict.as.entries = &entry;
  {
    const Tree copy = copy_tree(dict);
    raw.data[1] = 100;
    const stg_value* pair = find(copy.root(), "pair");
    REQUIRE(pair != nullptr);
    REQUIRE(pair->type == STG_TUPLE);
    CHECK(numbers(pair->as.items[0].as.tensor->view) == std::vector<double>{1, 3, 2, 4});
    CHECK(pair->as.items[1].as.opaque == &object.abi);
    CHECK(pair->as.items[2].as.i64 == 1);
    CHECK(object.num_references == 2);
  }
  CHECK(object.num_references == 1);
}
