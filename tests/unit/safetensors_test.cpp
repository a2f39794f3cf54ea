// SPDX-License-Identifier: Apache-2.0
#include "base/safetensors.hpp"

#include <cstring>
#include <functional>

#include "base/checksum.hpp"
#include "unit/support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

std::string with_length(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

std::string data_of(const std::string& file) {
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  return file.substr(8 + length);
}

std::string bytes_of(const stg_tensor_view& view) {
  return {first_element<char>(view), static_cast<size_t>(numel(view)) * element_size_bytes(view.dtype)};
}

template <class T>
TensorPtr tensor_of(stg_dtype dtype, std::vector<int64_t> shape, const std::vector<T>& elements) {
  TensorPtr tensor = allocate_tensor(dtype, std::move(shape));
  REQUIRE(static_cast<size_t>(numel(tensor->view)) == elements.size());
  std::memcpy(tensor->view.data, elements.data(), elements.size() * sizeof(T));
  return tensor;
}

// One file in a folder of its own.
struct File {
  TemporaryFolder folder;
  std::string path = folder / "checkpoint/x.safetensors";

  WrittenFile write(const std::vector<NamedTensor>& tensors, const std::map<std::string, std::string>& metadata = {}) const {
    Transaction transaction = Storage{}.begin(folder / "checkpoint");
    const WrittenFile written = write_safetensors(transaction, "x.safetensors", tensors, metadata);
    transaction.commit();
    return written;
  }
  void put(const std::string& content) const {
    std::filesystem::create_directories(folder / "checkpoint");
    write_file(path, content);
  }
  SafetensorsFile open() const { return SafetensorsFile{Storage{}.open(path)}; }
  std::string bytes() const { return read_file(path); }

  void refused(const std::string& content, uint32_t code, std::initializer_list<std::string> parts) const {
    put(content);
    const Error error = error_of([&] { open(); });
    check_error(error, code, parts);
    check_error(error, code, {path});
  }
  void refused_header(const std::string& header, const std::string& data, std::initializer_list<std::string> parts) const {
    refused(with_length(header, data), STG_DATA_LOSS, parts);
  }
};

// What a file holds, written again.
void write_again(const SafetensorsFile& file, const File& to) {
  std::vector<TensorPtr> tensors;
  std::vector<NamedTensor> named;
  for (const auto& entry : file.entries()) {
    tensors.push_back(file.read(entry));
    named.push_back({entry.name, &tensors.back()->view});
  }
  to.write(named, file.metadata());
}

}  // namespace

TEST_CASE("tensors of every type come back bit by bit, in the order given") {
  const std::vector<stg_dtype> dtypes{boolean,
                                      uint8,
                                      {STG_DTYPE_INT, 8, 1},
                                      {STG_DTYPE_UINT, 16, 1},
                                      {STG_DTYPE_INT, 16, 1},
                                      {STG_DTYPE_FLOAT, 16, 1},
                                      {STG_DTYPE_BFLOAT, 16, 1},
                                      {STG_DTYPE_UINT, 32, 1},
                                      {STG_DTYPE_INT, 32, 1},
                                      float32,
                                      {STG_DTYPE_UINT, 64, 1},
                                      int64,
                                      float64,
                                      {STG_DTYPE_COMPLEX, 64, 1}};
  std::vector<TensorPtr> tensors;
  std::vector<NamedTensor> named;
  for (const stg_dtype dtype : dtypes) {
    tensors.push_back(allocate_tensor(dtype, {3, 1}));
    auto* bytes = first_element<unsigned char>(tensors.back()->view);
    for (uint64_t i = 0; i < 3 * element_size_bytes(dtype); ++i)
      bytes[i] = static_cast<unsigned char>(dtype.code == STG_DTYPE_BOOL ? i % 2 : 250 + i);
    named.push_back({"layer." + dtype_name(dtype), &tensors.back()->view});
  }
  const File file;
  file.write(named, {{"format", "pt"}, {"who", "we"}});

  const SafetensorsFile read = file.open();
  CHECK(read.metadata() == std::map<std::string, std::string>{{"format", "pt"}, {"who", "we"}});
  REQUIRE(read.entries().size() == dtypes.size());
  for (size_t i = 0; i < dtypes.size(); ++i) {
    const auto& entry = read.entries()[i];
    CHECK(entry.name == named[i].name);
    CHECK(entry.shape == std::vector<int64_t>{3, 1});
    const TensorPtr tensor = read.read(entry);
    CHECK(same_dtype(tensor->view.dtype, dtypes[i]));
    CHECK(bytes_of(tensor->view) == bytes_of(*named[i].tensor));
    CHECK(entry.offset_bytes % element_size_bytes(entry.dtype) == 0);  // aligned for its type
    CHECK(read.find(entry.name) == &entry);
  }
  CHECK(read.find("layer") == nullptr);
}

TEST_CASE("the written size and checksum are those of the file, and the same tensors give the same bytes") {
  const TensorPtr a = tensor_of<float>(float32, {2}, {1, 2});
  const TensorPtr b = tensor_of<uint8_t>(uint8, {3}, {7, 8, 9});
  const File first;
  const WrittenFile written = first.write({{"b", &b->view}, {"a", &a->view}}, {{"k", "v"}});
  CHECK(written.size_bytes == first.bytes().size());
  CHECK(written.checksum == checksum_of(Storage{}.open(first.path)));
  const File second;
  second.write({{"b", &b->view}, {"a", &a->view}}, {{"k", "v"}});
  CHECK(first.bytes() == second.bytes());
}

TEST_CASE("the header is what the format says: length, JSON filled up with spaces, data from a multiple of 8") {
  const TensorPtr a = tensor_of<uint8_t>(uint8, {3}, {7, 8, 9});
  const TensorPtr b = tensor_of<float>(float32, {1}, {1});
  const File file;
  file.write({{"a", &a->view}, {"b", &b->view}});
  const std::string header =
      R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[4,7]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  const std::string filling((8 - header.size() % 8) % 8, ' ');
  CHECK(file.bytes() == with_length(header + filling, std::string("\x00\x00\x80\x3F\x07\x08\x09", 7)));
}

TEST_CASE("empty tensors and scalars are read, and written again with the same data") {
  const std::string header =
      R"({"a":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]},"b":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})";
  REQUIRE(header.size() == 108);
  const std::string data("\x00\x00\x80\x3F", 4);
  const File file;
  file.put(with_length(header, data));
  const SafetensorsFile read = file.open();
  const TensorPtr a = read.read(*read.find("a"));
  const TensorPtr b = read.read(*read.find("b"));
  CHECK(shape_text(a->view) == "(0, 3)");
  CHECK(b->view.num_dims == 0);
  CHECK(read_element(b->view, 0) == 1.0);

  const File again;
  write_again(read, again);
  CHECK(data_of(again.bytes()) == data);
  CHECK(again.open().entries()[0].shape == std::vector<int64_t>{0, 3});
}

TEST_CASE("many empty tensors may stand at the same place") {
  const File file;
  file.put(with_length(
      R"({"a":{"dtype":"I64","shape":[0],"data_offsets":[1,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
      R"("c":{"dtype":"F32","shape":[2,0],"data_offsets":[0,0]},"d":{"dtype":"F32","shape":[0],"data_offsets":[1,1]}})",
      "x"));
  CHECK(file.open().entries().size() == 4);
}

TEST_CASE("a strided tensor and one with a byte offset are written row-major") {
  float data[7] = {99, 1, 2, 3, 4, 5, 6};
  int64_t shape[2] = {3, 2};
  int64_t strides[2] = {1, 3};
  const stg_tensor_view view{data, {STG_DEVICE_CPU, 0}, 2, float32, shape, strides, 4};
  const File file;
  file.write({{"t", &view}});
  const SafetensorsFile read = file.open();
  const TensorPtr tensor = read.read(read.entries()[0]);
  std::vector<double> numbers;
  for (int64_t i = 0; i < 6; ++i) numbers.push_back(read_element(tensor->view, i));
  CHECK(numbers == std::vector<double>{1, 4, 2, 5, 3, 6});
}

TEST_CASE("names may be any UTF-8 text, and a file may hold no tensor") {
  const TensorPtr t = tensor_of<uint8_t>(uint8, {1}, {1});
  const File file;
  file.write({{"", &t->view}, {"weiß \"q\" \\ \n", &t->view}});
  CHECK(file.open().entries()[1].name == "weiß \"q\" \\ \n");
  const File empty;
  empty.write({});
  CHECK(empty.open().entries().empty());
}

TEST_CASE("what the format can't hold is refused by name before anything is written") {
  const TensorPtr t = allocate_tensor({STG_DTYPE_COMPLEX, 128, 1}, {1});
  const TensorPtr ok = allocate_tensor(float32, {1});
  const File file;
  const auto refused = [&](const std::vector<NamedTensor>& tensors, std::initializer_list<std::string> parts) {
    check_error(error_of([&] { file.write(tensors); }), STG_INVALID_ARGUMENT, parts);
    CHECK_FALSE(std::filesystem::exists(file.path));
  };
  refused({{"z", &t->view}}, {"z", "complex128", "BF16"});
  refused({{"w", &ok->view}, {"w", &ok->view}}, {"two tensors have the name w"});
  refused({{"__metadata__", &ok->view}}, {"__metadata__"});
  refused({{"\xFF", &ok->view}}, {"UTF-8"});
  ok->view.device = {STG_DEVICE_CUDA, 1};
  refused({{"w", &ok->view}}, {"w is on cuda:1", "host memory"});
}

TEST_CASE("a file that is cut off or longer is refused with the numbers") {
  const TensorPtr t = tensor_of<float>(float32, {3}, {1, 2, 3});
  const File file;
  file.write({{"t", &t->view}});
  const std::string whole = file.bytes();
  for (size_t size = 0; size < whole.size(); ++size) {
    INFO("cut after " << size << " bytes");
    file.refused(whole.substr(0, size), STG_DATA_LOSS, {});
  }
  file.refused(whole.substr(0, whole.size() - 1), STG_DATA_LOSS, {"promises 12 bytes of data, 11 are there"});
  file.refused(whole + "x", STG_DATA_LOSS, {"promises 12 bytes of data, 13 are there"});
  file.refused("", STG_DATA_LOSS, {"0 bytes"});
}

TEST_CASE("a header's length is checked before it is believed") {
  const File file;
  for (const uint64_t length : {uint64_t{3}, uint64_t{100'000'001}, uint64_t{1} << 62, UINT64_MAX, UINT64_MAX - 7}) {
    const std::string text = std::string(reinterpret_cast<const char*>(&length), 8) + "{}";
    file.refused(text, STG_DATA_LOSS, {"header of " + std::to_string(length), "the file has 10"});
  }
  file.refused_header("", "", {"does not begin with {"});
  file.refused_header(" {}", "", {"does not begin with {"});
}

TEST_CASE("shapes that promise more than there is are refused without an allocation for them") {
  const File file;
  file.refused_header(R"({"t":{"dtype":"F64","shape":[4611686018427387904],"data_offsets":[0,8]}})", "12345678",
                      {"t is promised 8 bytes"});
  file.refused_header(R"({"t":{"dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", "",
                      {"t is promised 0 bytes"});
  file.refused_header(R"({"t":{"dtype":"U8","shape":[1099511627776],"data_offsets":[0,1099511627776]}})", "x",
                      {"promises 1099511627776 bytes of data, 1 are there"});
  file.refused_header(R"({"t":{"dtype":"U8","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}})", "",
                      {"t is promised 0 bytes"});
}

TEST_CASE("gaps and overlaps in the data are refused") {
  const File file;
  const auto two = [](const char* first, const char* second) {
    return concat(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)", first,
                  R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)", second, "}}");
  };
  file.put(with_length(two("[2,4]", "[0,2]"), "1234"));
  CHECK(file.open().entries().size() == 2);
  file.refused_header(two("[0,2]", "[1,3]"), "123", {"b begins at byte 1 of the data; the one before it ends at 2"});
  file.refused_header(two("[0,2]", "[3,5]"), "12345", {"b begins at byte 3 of the data; the one before it ends at 2"});
  file.refused_header(two("[0,2]", "[0,2]"), "12", {"begins at byte 0 of the data; the one before it ends at 2"});
  file.refused_header(two("[1,3]", "[3,5]"), "12345", {"a begins at byte 1 of the data; the one before it ends at 0"});
}

TEST_CASE("a header of another shape than the format's is refused by name") {
  const File file;
  const auto entry = [](const std::string& inside) { return "{\"t\":{" + inside + "}}"; };
  file.refused_header("[1", "", {"{"});
  file.refused_header("{\"t\":", "", {"not JSON"});
  file.refused_header("{} x", "", {"not JSON"});
  file.refused_header(R"({"t":5})", "", {"t is no object"});
  file.refused_header(entry(R"("dtype":"U8","shape":[1])"), "x", {"t is no object of"});
  file.refused_header(entry(R"("dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1)"), "x", {"t is no object of"});
  file.refused_header(entry(R"("dtype":"U8","size":[1],"data_offsets":[0,1])"), "x", {"t has no shape"});
  file.refused_header(entry(R"("dtype":8,"shape":[1],"data_offsets":[0,1])"), "x", {"dtype"});
  file.refused_header(entry(R"("dtype":"U8","shape":1,"data_offsets":[0,1])"), "x", {"shape"});
  file.refused_header(entry(R"("dtype":"U8","shape":[-1],"data_offsets":[0,1])"), "x", {"shape"});
  file.refused_header(entry(R"("dtype":"U8","shape":[1.0],"data_offsets":[0,1])"), "x", {"shape"});
  file.refused_header(entry(R"("dtype":"U8","shape":[1],"data_offsets":[0])"), "x", {"data_offsets"});
  file.refused_header(entry(R"("dtype":"U8","shape":[1],"data_offsets":[1,0])"), "x", {"data_offsets"});
  file.refused_header(entry(R"("dtype":"U8","shape":[1],"data_offsets":[18446744073709551615,0])"), "x", {"data_offsets"});
  file.refused_header(entry(R"("dtype":"U8","shape":[[1]],"data_offsets":[0,1])"), "x", {"deeper"});
  file.refused_header(R"({"__metadata__":[]})", "", {"__metadata__ is no object"});
  file.refused_header(R"({"__metadata__":{"a":1}})", "", {"__metadata__ has a value for a"});
  file.refused_header(
      R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "x",
      {"/t is there twice"});
  file.refused_header(R"({"__metadata__":{"a":"1","a":"2"}})", "", {"/__metadata__/a is there twice"});
  file.refused_header("{\"\xFF\":1}", "", {"not JSON"});
  std::string dims = "[1";
  for (int i = 0; i < 64; ++i) dims += ",1";
  file.refused_header(entry(R"("dtype":"U8","shape":)" + dims + R"(],"data_offsets":[0,1])"), "x", {"65 dimensions"});
}

TEST_CASE("an element type that is not known here is named") {
  const File file;
  for (const char* dtype : {"F8_E4M3", "F4", "f32", ""}) {
    file.refused(with_length(concat(R"({"t":{"dtype":")", dtype, R"(","shape":[1],"data_offsets":[0,1]}})"), "x"),
                 STG_UNIMPLEMENTED, {concat("t has elements of type ", dtype, ";"), "BF16"});
  }
}

TEST_CASE("a bool tensor with bytes other than 0 and 1 is damaged") {
  const File file;
  file.put(with_length(R"({"t":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}})", std::string("\x01\x02", 2)));
  const SafetensorsFile read = file.open();
  check_error(error_of([&] { read.read(read.entries()[0]); }), STG_DATA_LOSS, {file.path, "t", "neither 0 nor 1"});
}

TEST_CASE("a header of hundreds of thousands of tensors is written and read in order") {
  const TensorPtr t = tensor_of<uint8_t>(uint8, {1}, {1});
  std::vector<NamedTensor> named;
  for (int i = 0; i < 200'000; ++i) named.push_back({concat("t", i), &t->view});
  const File file;
  file.write(named);
  const SafetensorsFile read = file.open();
  REQUIRE(read.entries().size() == 200'000);
  CHECK(read.entries()[54'321].name == "t54321");
  CHECK(read.find("t99")->offset_bytes == read.find("t0")->offset_bytes + 99);
}
