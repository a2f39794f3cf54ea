// SPDX-License-Identifier: Apache-2.0
#include "base/npy.hpp"

#include <cstring>

#include "unit/support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

// The file of a header's dict and its data.
std::string npy(const std::string& dict, const std::string& data, int major = 1) {
  std::string out("\x93NUMPY", 6);
  out += static_cast<char>(major);
  out += '\0';
  const auto length = static_cast<uint32_t>(dict.size());
  for (int i = 0; i < (major == 1 ? 2 : 4); ++i) out += static_cast<char>(length >> (8 * i) & 0xFF);
  return out + dict + data;
}

std::string dict(const std::string& descr, const std::string& shape, bool fortran = false) {
  return concat("{'descr': '", descr, "', 'fortran_order': ", fortran ? "True" : "False", ", 'shape': ", shape, ", }\n");
}

TensorPtr parse(const std::string& file) {
  return read_npy({reinterpret_cast<const uint8_t*>(file.data()), file.size()}, "x.npy");
}

Error refusal(const std::string& file) {
  return error_of([&] { parse(file); });
}

std::vector<double> numbers(const TensorPtr& tensor) {
  std::vector<double> out;
  for (int64_t i = 0; i < numel(tensor->view); ++i) out.push_back(read_element(tensor->view, i));
  return out;
}

template <class T>
std::string bytes(std::initializer_list<T> elements) {
  return {reinterpret_cast<const char*>(elements.begin()), elements.size() * sizeof(T)};
}

std::string raw(std::initializer_list<int> values) {
  std::string out;
  for (int value : values) out += static_cast<char>(value);
  return out;
}

}  // namespace

TEST_CASE("an array is read with its shape and type, in every version of the format") {
  for (const int major : {1, 2, 3}) {
    const TensorPtr tensor = parse(npy(dict("<f4", "(2, 3)"), bytes<float>({1, 2, 3, 4, 5, 6}), major));
    CHECK(shape_text(tensor->view) == "(2, 3)");
    CHECK(dtype_name(tensor->view.dtype) == "float32");
    CHECK(is_contiguous(tensor->view));
    CHECK(numbers(tensor) == std::vector<double>{1, 2, 3, 4, 5, 6});
  }
}

TEST_CASE("column-major data is put in row-major order") {
  const TensorPtr tensor = parse(npy(dict("<i4", "(2, 3)", true), bytes<int32_t>({1, 4, 2, 5, 3, 6})));
  CHECK(shape_text(tensor->view) == "(2, 3)");
  CHECK(is_contiguous(tensor->view));
  CHECK(numbers(tensor) == std::vector<double>{1, 2, 3, 4, 5, 6});

  // [[[0, 1], [2, 3]], [[4, 5], [6, 7]]] by columns
  CHECK(numbers(parse(npy(dict("|u1", "(2, 2, 2)", true), raw({0, 4, 2, 6, 1, 5, 3, 7})))) ==
        std::vector<double>{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(numbers(parse(npy(dict("<i2", "(3,)", true), bytes<int16_t>({7, 8, 9})))) == std::vector<double>{7, 8, 9});
  CHECK(numbers(parse(npy(dict("<i2", "()", true), bytes<int16_t>({7})))) == std::vector<double>{7});
  CHECK(numbers(parse(npy(dict(">i2", "(2, 2)", true), raw({0, 1, 0, 3, 0, 2, 0, 4})))) == std::vector<double>{1, 2, 3, 4});
}

TEST_CASE("big-endian data is swapped") {
  CHECK(numbers(parse(npy(dict(">f4", "(2,)"), raw({0x3F, 0x80, 0, 0, 0x40, 0, 0, 0})))) == std::vector<double>{1, 2});
  CHECK(numbers(parse(npy(dict(">i2", "(2,)"), raw({0, 1, 1, 0})))) == std::vector<double>{1, 256});
  CHECK(numbers(parse(npy(dict(">u8", "(1,)"), raw({0, 0, 0, 0, 0, 0, 1, 2})))) == std::vector<double>{258});
  CHECK(numbers(parse(npy(dict(">f8", "(1,)"), raw({0x3F, 0xF8, 0, 0, 0, 0, 0, 0})))) == std::vector<double>{1.5});
  CHECK(numbers(parse(npy(dict(">f2", "(1,)"), raw({0x3C, 0})))) == std::vector<double>{1});
  CHECK(numbers(parse(npy(dict(">i1", "(1,)"), raw({0xFF})))) == std::vector<double>{-1});
}

TEST_CASE("a big-endian complex number is swapped part by part") {
  const TensorPtr tensor = parse(npy(dict(">c8", "(1,)"), raw({0x3F, 0x80, 0, 0, 0x40, 0, 0, 0})));
  CHECK(dtype_name(tensor->view.dtype) == "complex64");
  const auto* parts = first_element<float>(tensor->view);
  CHECK(parts[0] == 1);
  CHECK(parts[1] == 2);
}

TEST_CASE("bools are read as 0 and 1, whatever byte stands for true") {
  const TensorPtr tensor = parse(npy(dict("|b1", "(4,)"), raw({1, 0, 1, 0xFF})));
  CHECK(dtype_name(tensor->view.dtype) == "bool");
  CHECK(numbers(tensor) == std::vector<double>{1, 0, 1, 1});
}

TEST_CASE("every number type of NumPy that a tensor has is read") {
  const std::vector<std::pair<std::string, std::string>> types{
      {"|i1", "int8"},    {"<i2", "int16"},     {"<i4", "int32"},      {"<i8", "int64"},   {"|u1", "uint8"},
      {"<u2", "uint16"},  {"<u4", "uint32"},    {"<u8", "uint64"},     {"<f2", "float16"}, {"<f4", "float32"},
      {"=f8", "float64"}, {"<c8", "complex64"}, {"<c16", "complex128"}};
  for (const auto& [descr, name] : types) {
    const auto size = static_cast<size_t>(std::stoi(descr.substr(2)));
    CHECK(dtype_name(parse(npy(dict(descr, "(2,)"), std::string(2 * size, '\0')))->view.dtype) == name);
  }
}

TEST_CASE("types that no tensor has are refused by NumPy's name for them") {
  for (const char* descr :
       {"<U3", "|S5", "|O", "<M8[ns]", "<m8", "<f16", "<c32", "|V4", "<i3", "<i16", "|i4", "f4", "<f", "", "<f4x", "<f04"}) {
    check_error(refusal(npy(dict(descr, "(1,)"), std::string(64, '\0'))), STG_INVALID_ARGUMENT,
                {"x.npy", concat("'", descr, "'"), "f4"});
  }
  check_error(refusal(npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", "1234")), STG_INVALID_ARGUMENT,
              {"structures"});
}

TEST_CASE("scalars and empty arrays are valid") {
  CHECK(numbers(parse(npy(dict("<f8", "()"), bytes<double>({2.5})))) == std::vector<double>{2.5});
  CHECK(shape_text(parse(npy(dict("<f4", "(0, 3)"), ""))->view) == "(0, 3)");
  CHECK(shape_text(parse(npy(dict("<f4", "(3, 0)", true), ""))->view) == "(3, 0)");
}

TEST_CASE("the data must be exactly as much as the shape says") {
  check_error(refusal(npy(dict("<f4", "(2, 3)"), std::string(23, '\0'))), STG_DATA_LOSS,
              {"x.npy", "24 bytes of data expected, 23 found"});
  check_error(refusal(npy(dict("<f4", "(2, 3)"), std::string(25, '\0'))), STG_DATA_LOSS, {"24 bytes of data expected, 25 found"});
  check_error(refusal(npy(dict("<f4", "(0,)"), "x")), STG_DATA_LOSS, {"0 bytes of data expected, 1 found"});
}

TEST_CASE("a shape that needs more than there can be is refused without an allocation") {
  check_error(refusal(npy(dict("<f4", "(1000000000000,)"), "1234")), STG_DATA_LOSS,
              {"4000000000000 bytes of data expected, 4 found"});
  check_error(refusal(npy(dict("<f4", "(4611686018427387904,)"), "")), STG_DATA_LOSS, {"2^62"});
  check_error(refusal(npy(dict("<f4", "(4294967296, 4294967296)"), "")), STG_DATA_LOSS, {"2^62"});
  check_error(refusal(npy(dict("<f4", "(0, 4611686018427387904)"), "")), STG_DATA_LOSS, {"2^62"});
  check_error(refusal(npy(dict("<f4", "(99999999999999999999,)"), "")), STG_DATA_LOSS, {"2^63"});
  std::string many = "(1";
  for (int i = 0; i < 64; ++i) many += ", 1";
  check_error(refusal(npy(dict("<f4", many + ")"), "1234")), STG_INVALID_ARGUMENT, {"65 dimensions"});
}

TEST_CASE("what is no NPY file, or of a later version, is refused") {
  const std::string good = npy(dict("<f4", "(1,)"), "1234");
  for (const std::string& file :
       {std::string(), std::string("\x93NUMP"), "PK" + good, std::string(100, '\0'), good.substr(0, 9)}) {
    check_error(refusal(file), STG_INVALID_ARGUMENT, {"x.npy", "not an NPY file"});
  }
  for (const int version : {0, 4, 255}) {
    std::string changed = good;
    changed[6] = static_cast<char>(version);
    check_error(refusal(changed), STG_UNIMPLEMENTED, {concat("version ", version, ".0")});
  }
  std::string minor = good;
  minor[7] = 1;
  check_error(refusal(minor), STG_UNIMPLEMENTED, {"version 1.1"});
}

TEST_CASE("the length of an array's header is checked before it is believed") {
  const std::string good = npy(dict("<f4", "(1,)"), "1234", 2);
  std::string huge = good;
  for (size_t i = 8; i < 12; ++i) huge[i] = '\xFF';
  check_error(refusal(huge), STG_DATA_LOSS,
              {"header of 4294967295 bytes is promised, the file has " + std::to_string(good.size())});
  check_error(refusal(good.substr(0, 11)), STG_DATA_LOSS, {"the file has 11"});
}

TEST_CASE("an array that is cut off anywhere is refused") {
  const std::string whole = npy(dict("<f4", "(2,)"), bytes<float>({1, 2}));
  for (size_t size = 0; size < whole.size(); ++size) {
    INFO("cut after " << size << " bytes");
    check_error(refusal(whole.substr(0, size)), size < 10 ? STG_INVALID_ARGUMENT : STG_DATA_LOSS, {"x.npy"});
  }
}

TEST_CASE("a header in other words of Python than NumPy's is refused with its place") {
  const auto refused = [](const std::string& header, const std::string& part) {
    check_error(refusal(npy(header, "1234")), STG_DATA_LOSS, {"x.npy: the NPY header is damaged", part});
  };
  refused("", "'{'");
  refused("{}", "no descr");
  refused("{'descr': '<f4', 'fortran_order': False}", "no descr, fortran_order or shape");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'more': 1}", "'more'");
  refused("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", "'descr'");
  refused("{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}", "True nor False");
  refused("{'descr': '<f4', 'fortran_order': false, 'shape': (1,)}", "True nor False");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': (1)}", "no tuple");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': 1}", "'('");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': [1]}", "'('");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", "no tuple of sizes");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': (1.0,)}", "no tuple");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': (,)}", "no tuple of sizes");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} x", "something after");
  refused("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)", "'}'");
  refused("{'descr: '<f4'}", "':'");
  refused("{descr: '<f4'}", "quoted");
}

TEST_CASE("spaces, double quotes and a missing last comma make no difference") {
  CHECK(numbers(parse(npy("{\"shape\":(1,2),'fortran_order':False , \"descr\" : \"<f4\"}   \n", bytes<float>({1, 2})))) ==
        std::vector<double>{1, 2});
}

TEST_CASE("a file on disk is read as one in memory, and told by its absolute path") {
  const TemporaryFolder folder;
  write_file(folder / "x.npy", npy(dict(">i2", "(2, 2)", true), raw({0, 1, 0, 3, 0, 2, 0, 4})));
  CHECK(numbers(read_npy(folder / "x.npy")) == std::vector<double>{1, 2, 3, 4});
  const NpyHeader header = read_npy_header(folder / "x.npy");
  CHECK(header.shape == std::vector<int64_t>{2, 2});
  CHECK(header.is_swapped);
  CHECK(header.is_fortran_order);
  CHECK(header.data_size_bytes == 8);
  CHECK(std::filesystem::file_size(folder / "x.npy") == header.data_offset_bytes + 8);

  write_file(folder / "short.npy", npy(dict("<i2", "(2,)"), "12"));
  check_error(error_of([&] { read_npy(folder / "short.npy"); }), STG_DATA_LOSS,
              {folder / "short.npy", "4 bytes of data expected, 2 found"});
  check_error(error_of([&] { read_npy(folder / "none.npy"); }), STG_NOT_FOUND, {folder / "none.npy"});
}

TEST_CASE("an array is written as NumPy writes it: data from a multiple of 64, row-major") {
  const TemporaryFolder folder;
  float data[6] = {1, 2, 3, 4, 5, 6};
  int64_t shape[2] = {3, 2};
  int64_t strides[2] = {1, 3};
  write_npy(folder / "x.npy", {data, {STG_DEVICE_CPU, 0}, 2, float32, shape, strides, 0});
  const std::string file = read_file(folder / "x.npy");
  const std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }";
  CHECK(file == npy(header + std::string(128 - 10 - header.size() - 1, ' ') + "\n", bytes<float>({1, 4, 2, 5, 3, 6})));
}

TEST_CASE("arrays of every shape and type come back as they were written") {
  const TemporaryFolder folder;
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {0}, {5}, {2, 0, 3}, {2, 3, 4}}) {
    for (const stg_dtype dtype :
         {boolean, uint8, int64, float32, float64, stg_dtype{STG_DTYPE_FLOAT, 16, 1}, stg_dtype{STG_DTYPE_COMPLEX, 128, 1}}) {
      const TensorPtr tensor = allocate_tensor(dtype, shape);
      auto* data = first_element<unsigned char>(tensor->view);
      const auto size_bytes = static_cast<size_t>(numel(tensor->view)) * element_size_bytes(dtype);
      for (size_t i = 0; i < size_bytes; ++i) data[i] = static_cast<unsigned char>(dtype.code == STG_DTYPE_BOOL ? i % 2 : i * 7);
      write_npy(folder / "x.npy", tensor->view);
      const TensorPtr back = read_npy(folder / "x.npy");
      CHECK(shape_text(back->view) == shape_text(tensor->view));
      CHECK(same_dtype(back->view.dtype, dtype));
      CHECK(std::memcmp(first_element<>(back->view), data, size_bytes) == 0);
    }
  }
}

TEST_CASE("what NumPy has no type for is not written") {
  const TemporaryFolder folder;
  const TensorPtr tensor = allocate_tensor({STG_DTYPE_BFLOAT, 16, 1}, {1});
  check_error(error_of([&] { write_npy(folder / "x.npy", tensor->view); }), STG_INVALID_ARGUMENT, {"bfloat16"});
  CHECK_FALSE(std::filesystem::exists(folder / "x.npy"));
}
