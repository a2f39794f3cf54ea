// SPDX-License-Identifier: Apache-2.0
//
// The readers, on files of which every byte is known; the order of samples; the reader thread.
#include <cstring>
#include <limits>
#include <numeric>

#include "base/dlpack.hpp"
#include "base/npy.hpp"
#include "libstratagem/data/batches.hpp"
#include "libstratagem/data/bytes.hpp"
#include "libstratagem/data/dataset.hpp"
#include "libstratagem/data/idx.hpp"
#include "libstratagem/data/permutation.hpp"
#include "support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

std::vector<double> values(const stg_tensor_view& view) {
  std::vector<double> all;
  for (int64_t i = 0; i < numel(view); ++i) all.push_back(read_element(view, i));
  return all;
}

TensorPtr idx(const std::string& content) {
  const TemporaryFolder folder;
  write_file(folder / "x-idx1-ubyte", content);
  return read_idx(folder / "x-idx1-ubyte");
}

/// An NPY 1.0 file.
std::string npy(const std::string& descr, bool fortran, const std::string& shape, const std::string& data) {
  std::string header =
      "{'descr': '" + descr + "', 'fortran_order': " + (fortran ? "True" : "False") + ", 'shape': " + shape + ", }";
  while ((10 + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  return std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size() & 255) + static_cast<char>(header.size() >> 8) +
         header + data;
}

DatasetConfig dataset(const std::string& format, const fs::path& inputs, const std::optional<fs::path>& targets = {}) {
  DatasetConfig config;
  config.format = format;
  config.inputs.path = inputs;
  if (targets) config.targets = ArrayConfig{*targets, {}, {}};
  return config;
}

/// The values of an entry of a batch.
std::vector<double> entry(const Tree& batch, const std::string& key) {
  const stg_value* value = find(batch.root(), key);
  REQUIRE(value != nullptr);
  return values(value->as.tensor->view);
}

const std::string three_images = bytes("00 00 08 03 00 00 00 03 00 00 00 02 00 00 00 02") + "abcdefghijkl";
const std::string three_labels = bytes("00 00 08 01 00 00 00 03 07 00 FF");

}  // namespace

TEST_CASE("IDX elements are big-endian, of all its types") {
  const TensorPtr shorts = idx(bytes("00 00 0B 01 00 00 00 02 FF FE 01 00"));
  CHECK(dtype_name(shorts->view.dtype) == "int16");
  CHECK(values(shorts->view) == std::vector<double>{-2, 256});
  const TensorPtr floats = idx(bytes("00 00 0D 02 00 00 00 01 00 00 00 02 3F 80 00 00 40 00 00 00"));
  CHECK(same_dtype(floats->view.dtype, float32));
  CHECK(shape_text(floats->view) == "(1, 2)");
  CHECK(values(floats->view) == std::vector<double>{1, 2});
  CHECK(values(idx(bytes("00 00 0C 01 00 00 00 01 FF FF FF 00"))->view) == std::vector<double>{-256});
  CHECK(values(idx(bytes("00 00 0E 01 00 00 00 01 3F F0 00 00 00 00 00 00"))->view) == std::vector<double>{1});
  CHECK(values(idx(bytes("00 00 09 01 00 00 00 02 FF 01"))->view) == std::vector<double>{-1, 1});
}

TEST_CASE("An IDX header that promises more than is there is refused with both numbers, without the memory for it") {
  const Error error = error_of([] { idx(bytes("00 00 08 01 02 00 00 00 07 09")); });
  CHECK(error.message == Contains{"33554432 bytes of elements expected by its header, 2 found"});
  const Error huge = error_of([] { idx(bytes("00 00 0E 03 FF FF FF FF FF FF FF FF FF FF FF FF 00")); });
  CHECK(huge.message == Contains{"more elements than can be counted"});
  // A size of 0 doesn't excuse the others: whoever multiplies them from the end meets an overflow.
  const Error none = error_of([] { idx(bytes("00 00 08 04 00 00 00 00 FF FF FF FF FF FF FF FF FF FF FF FF")); });
  CHECK(none.message == Contains{"more elements than can be counted"});
  std::string many = "00 00 08 41";
  for (int i = 0; i < 65; ++i) many += " 00 00 00 01";
  CHECK(error_of([&] { idx(bytes(many + " 00")); }).message == Contains{"65 dimensions; at most 64"});
}

TEST_CASE("An IDX file of another length than its header says is refused with both") {
  for (const auto& [num_bytes, found] : {std::pair{9, "9 found"}, {13, "13 found"}}) {
    const Error error =
        error_of([&, n = num_bytes] { idx(three_images.substr(0, 16) + std::string(static_cast<size_t>(n), 'x')); });
    CHECK(error.message == Contains{"12 bytes of elements expected by its header, "});
    CHECK(error.message == Contains{found});
    CHECK(error.message == Contains{"/x-idx1-ubyte"});
  }
}

TEST_CASE("What is no IDX file is told with its first bytes") {
  CHECK(error_of([] { idx(bytes("89 50 4E 47 0D")); }).message == Contains{"it begins with the bytes 137 80 78 71"});
  CHECK(error_of([] { idx(bytes("00 00 08")); }).message == Contains{"it has 3 bytes"});
  CHECK(error_of([] { idx(bytes("00 00 08 02 00 00 00 01 00")); }).message == Contains{"ends within its header"});
  CHECK(error_of([] { idx(""); }).message == Contains{"it has 0 bytes"});
}

TEST_CASE("A gzipped file is recognised by its content, whatever its name") {
  CHECK(values(idx(gzipped(three_images))->view) == values(idx(three_images)->view));
  const Error cut = error_of([] { idx(gzipped(three_images).substr(0, 30)); });
  CHECK(cut.code == STG_DATA_LOSS);
  CHECK(cut.message == Contains{"damaged or truncated gzip file"});
  CHECK(values(idx(gzipped(three_images.substr(0, 20)) + gzipped(three_images.substr(20)))->view) ==
        values(idx(three_images)->view));
  const Error behind = error_of([] { idx(gzipped(three_images) + "more"); });
  CHECK(behind.code == STG_DATA_LOSS);
  CHECK(behind.message == Contains{"something behind it"});
  std::string flipped = gzipped(three_images);
  flipped[flipped.size() - 6] = static_cast<char>(flipped[flipped.size() - 6] ^ 0x55);  // its checksum
  CHECK(error_of([&] { idx(flipped); }).message == Contains{"gzip"});
}

TEST_CASE("A batch holds inputs as stored and labels as int64") {
  const TemporaryFolder folder;
  write_file(folder / "images", three_images);
  write_file(folder / "labels", three_labels);
  const Dataset data(dataset("idx", folder / "images", folder / "labels"));
  CHECK(data.num_samples() == 3);
  const int64_t rows[] = {2, 0};
  const Tree batch = data.batch(rows);
  const stg_tensor_view& inputs = find(batch.root(), "inputs")->as.tensor->view;
  const stg_tensor_view& targets = find(batch.root(), "targets")->as.tensor->view;
  CHECK(same_dtype(inputs.dtype, uint8));
  CHECK(shape_text(inputs) == "(2, 2, 2)");
  CHECK(values(inputs) == std::vector<double>{'i', 'j', 'k', 'l', 'a', 'b', 'c', 'd'});
  CHECK(same_dtype(targets.dtype, int64));
  CHECK(values(targets) == std::vector<double>{255, 7});
  CHECK(reinterpret_cast<uintptr_t>(inputs.data) % 64 == 0);
  CHECK(reinterpret_cast<uintptr_t>(targets.data) % 64 == 0);
  CHECK(!batch.borrowed());
}

TEST_CASE("Images and labels of different length are refused with both files and both counts") {
  const TemporaryFolder folder;
  write_file(folder / "images", three_images);
  write_file(folder / "labels", bytes("00 00 08 01 00 00 00 02 01 02"));
  const Error error = error_of([&] { Dataset(dataset("idx", folder / "images", folder / "labels")); });
  CHECK(error.code == STG_INVALID_ARGUMENT);
  CHECK(error.message == "inputs and targets differ in length: 3 samples in " + (folder / "images").string() + ", 2 in " +
                             (folder / "labels").string());
}

TEST_CASE("A negative label is refused with its place, and no samples with the file") {
  const TemporaryFolder folder;
  write_file(folder / "images", three_images);
  write_file(folder / "labels", bytes("00 00 0B 01 00 00 00 03 00 01 FF FE 00 00"));
  const Error negative = error_of([&] { Dataset(dataset("idx", folder / "images", folder / "labels")); });
  CHECK(negative.message == Contains{(folder / "labels").string() + ": label 1 is -2; labels count from 0"});
  write_file(folder / "none", bytes("00 00 08 03 00 00 00 00 00 00 00 02 00 00 00 02"));
  CHECK(error_of([&] { Dataset(dataset("idx", folder / "none")); }).message == "no samples in " + (folder / "none").string());
}

TEST_CASE("Labels are read as whole numbers, of every width, and one that int64 can't hold is refused with its value") {
  const TemporaryFolder folder;
  write_samples(folder / "x.npy", {0});
  const auto label_of = [&](const std::string& descr, const std::string& data) {
    write_file(folder / "y.npy", npy(descr, false, "(1,)", bytes(data)));
    const int64_t rows[] = {0};
    const Tree batch = Dataset(dataset("npy", folder / "x.npy", folder / "y.npy")).batch(rows);
    return *first_element<int64_t>(find(batch.root(), "targets")->as.tensor->view);
  };
  CHECK(label_of("<i8", "1 0 0 0 0 0 20 0") == 9007199254740993);  // 2^53 + 1, which no double is
  CHECK(label_of("<u8", "FF FF FF FF FF FF FF 7F") == std::numeric_limits<int64_t>::max());
  CHECK(label_of("|u1", "FF") == 255);
  CHECK(label_of("<u2", "FF FF") == 65535);
  CHECK(label_of("<i2", "FF 7F") == 32767);
  CHECK(label_of("<u4", "FF FF FF FF") == 4294967295);
  CHECK(label_of("<i4", "FF FF FF 7F") == 2147483647);
  CHECK(error_of([&] { label_of("<u8", "0 0 0 0 0 0 0 80"); }).message ==
        Contains{"label 0 is 9223372036854775808; labels count"});
  CHECK(error_of([&] { label_of("|i1", "FF"); }).message == Contains{"label 0 is -1; labels count"});
}

TEST_CASE("NPY: column-major order and big-endian types are put right, and batch 1 gives the first row") {
  const TemporaryFolder folder;
  const auto first_row = [&](const std::string& content) {
    write_file(folder / "x.npy", content);
    const int64_t rows[] = {0};
    return entry(Dataset(dataset("npy", folder / "x.npy")).batch(rows), "inputs");
  };
  CHECK(first_row(npy("<i4", true, "(2, 3)", bytes("1 0 0 0 4 0 0 0 2 0 0 0 5 0 0 0 3 0 0 0 6 0 0 0"))) ==
        std::vector<double>{1, 2, 3});
  CHECK(first_row(npy(">f4", false, "(1, 2)", bytes("3F 80 0 0 40 0 0 0"))) == std::vector<double>{1, 2});
  CHECK(first_row(npy(">i2", false, "(1, 2)", bytes("0 1 1 0"))) == std::vector<double>{1, 256});
  CHECK(first_row(npy("|b1", false, "(1, 3)", bytes("1 0 1"))) == std::vector<double>{1, 0, 1});
  CHECK(first_row(gzipped(npy("<f4", false, "(1, 1)", bytes("0 0 80 3F")))) == std::vector<double>{1});
  write_file(folder / "x.npy", npy("<f4", false, "()", bytes("0 0 80 3F")));
  CHECK(error_of([&] { Dataset(dataset("npy", folder / "x.npy")); }).message == Contains{"one number without dimensions"});
}

TEST_CASE("CSV: columns by name, the label apart from the others, quotes and gzip as usual") {
  const TemporaryFolder folder;
  const fs::path file = folder / "x.csv";
  const int64_t rows[] = {1, 0};
  const std::string table = "height,\"shoe, size\",label\r\n1.5,40,0\r\n\"-2e1\", +41 ,2\r\n";
  DatasetConfig config = dataset("csv", file, file);
  config.targets->columns = {"label"};
  for (const std::string& content : {table, gzipped(table), table.substr(0, table.size() - 2), "\xEF\xBB\xBF" + table}) {
    write_file(file, content);
    const Tree batch = Dataset(config).batch(rows);
    CHECK(entry(batch, "inputs") == std::vector<double>{-20, 41, 1.5, 40});
    CHECK(entry(batch, "targets") == std::vector<double>{2, 0});
    CHECK(same_dtype(find(batch.root(), "inputs")->as.tensor->view.dtype, float32));
    CHECK(same_dtype(find(batch.root(), "targets")->as.tensor->view.dtype, int64));
  }
  config.inputs.columns = {"shoe, size"};
  CHECK(entry(Dataset(config).batch(rows), "inputs") == std::vector<double>{41, 40});
  config.targets->columns = {"label", "height"};
  CHECK(entry(Dataset(config).batch(rows), "targets") == std::vector<double>{2, -20, 0, 1.5});
  write_file(file, "1,2\n3,4\n\n");
  CHECK(entry(Dataset(dataset("csv", file)).batch(rows), "inputs") == std::vector<double>{3, 4, 1, 2});
  write_file(file,
             "\xEF\xBB\xBF"
             "1,2\n3,4\n");
  CHECK(entry(Dataset(dataset("csv", file)).batch(rows), "inputs") == std::vector<double>{3, 4, 1, 2});
}

TEST_CASE("CSV: a byte-order mark before a quoted name is no part of the file's content") {
  const TemporaryFolder folder;
  const fs::path file = folder / "x.csv";
  const int64_t rows[] = {0};
  for (const std::string& content :
       {bytes("EF BB BF") + "\"a,b\",y\r\n1,0\r\n", gzipped(bytes("EF BB BF") + "\"a,b\",y\r\n1,0\r\n")}) {
    write_file(file, content);
    DatasetConfig config = dataset("csv", file, file);
    config.inputs.columns = {"a,b"};
    config.targets->columns = {"y"};
    const Dataset data(config);
    CHECK(data.num_samples() == 1);
    CHECK(entry(data.batch(rows), "inputs") == std::vector<double>{1});
    CHECK(entry(data.batch(rows), "targets") == std::vector<double>{0});
    config.targets->columns = {"z"};
    CHECK(error_of([&] { Dataset{config}; }).message == Contains{"Available: a,b, y"});
  }
  write_file(file, bytes("EF BB BF"));
  CHECK(error_of([&] { Dataset{dataset("csv", file)}; }).message == Contains{"no columns in " + file.string()});
  write_file(file, bytes("EF BB BF") + "\"a\"\n");
  CHECK(error_of([&] { Dataset{dataset("csv", file)}; }).message == Contains{"no samples in " + file.string()});
}

TEST_CASE("CSV: what can't be read is told with file, row and column") {
  const TemporaryFolder folder;
  const fs::path file = folder / "x.csv";
  const auto message = [&](const std::string& content, DatasetConfig config) {
    write_file(file, content);
    return error_of([&] { Dataset{config}; }).message;
  };
  const DatasetConfig inputs = dataset("csv", file);
  CHECK(message("a,b\n1,2\n3,four\n", inputs) == Contains{file.string() + ", row 3, column \"b\": \"four\" is no number"});
  CHECK(message("a,b\n1,2\n3,", inputs) == Contains{file.string() + ", row 3, column \"b\": \"\" is no number"});
  CHECK(message("a,b\n\"1\",\"2 \"\"x\"\"\"\n", inputs) == Contains{", row 2, column \"b\": \"2 \"x\"\" is no number"});
  CHECK(message("1,2\n3,\n", inputs) == Contains{", row 2, column 2: \"\" is no number"});
  CHECK(message("1,2\n3\n", inputs) == Contains{", row 2 has 1 fields, the first has 2"});
  CHECK(message("1,2\n\"3,4\n", inputs) == Contains{file.string() + ", row 2: "});
  CHECK(message("a,a\n1,2\n", inputs) == Contains{"two columns are called \"a\""});
  CHECK(message("a,b\n", inputs) == Contains{"no samples in " + file.string()});
  CHECK(message("", inputs) == Contains{file.string()});
  DatasetConfig both = dataset("csv", file, file);
  CHECK(message("a,b\n1,2\n", both) == Contains{"say which columns are which"});
  both.targets->columns = {"c"};
  CHECK(message("aa,cc\n1,2\n", both) == Contains{"no column \"c\" in " + file.string() + "; did you mean \"cc\"?"});
  CHECK(message("1,2\n", both) == Contains{"has no row of names"});
}

TEST_CASE("limit takes the first samples") {
  const TemporaryFolder folder;
  write_samples(folder / "x.npy", {1, 2, 3});
  DatasetConfig config = dataset("npy", folder / "x.npy");
  config.limit = 2;
  CHECK(Dataset(config).num_samples() == 2);
  config.limit = 5;
  CHECK(Dataset(config).num_samples() == 3);
}

TEST_CASE("The order of an epoch is what it was when checkpoints were first written") {
  // Worked out by an independent program from the description in permutation.hpp. A change here breaks every resume.
  CHECK(permutation(10, 1, 0) == std::vector<int64_t>{5, 0, 8, 7, 3, 1, 9, 6, 4, 2});
  CHECK(permutation(10, 1, 1) == std::vector<int64_t>{6, 2, 8, 7, 4, 5, 9, 3, 0, 1});
  CHECK(permutation(7, 42, 3) == std::vector<int64_t>{6, 5, 1, 3, 2, 0, 4});
}

TEST_CASE("The order of an epoch holds each sample once and differs between epochs and seeds") {
  std::vector<int64_t> order = permutation(1000, 7, 2);
  CHECK(order != permutation(1000, 7, 3));
  CHECK(order != permutation(1000, 8, 2));
  std::sort(order.begin(), order.end());
  std::vector<int64_t> all(1000);
  std::iota(all.begin(), all.end(), 0);
  CHECK(order == all);
  CHECK(permutation(0, 1, 1).empty());
  CHECK(permutation(1, 1, 1) == std::vector<int64_t>{0});
}

TEST_CASE("A stream gives every batch in order, the last one smaller, and can begin in the middle") {
  const TemporaryFolder folder;
  write_samples(folder / "x.npy", {0, 1, 2, 3, 4});
  const Dataset data(dataset("npy", folder / "x.npy"));
  const auto batches_from = [&](int64_t first) {
    BatchStream stream(data, std::vector<int64_t>{4, 3, 2, 1, 0}, 2, first);
    std::vector<std::vector<double>> batches;
    while (auto batch = stream.next()) batches.push_back(entry(*batch, "inputs"));
    CHECK(!stream.next());
    return batches;
  };
  CHECK(batches_from(0) == std::vector<std::vector<double>>{{4, 3}, {2, 1}, {0}});
  CHECK(batches_from(2) == std::vector<std::vector<double>>{{0}});
  CHECK(batches_from(3).empty());
}

TEST_CASE("A stream that is left early ends its thread, whether that was reading or waiting") {
  const TemporaryFolder folder;
  write_samples(folder / "x.npy", std::vector<float>(100, 1));
  const Dataset data(dataset("npy", folder / "x.npy"));
  for (int taken = 0; taken < 5; ++taken) {
    BatchStream stream(data, std::vector<int64_t>(100, 0), 1);
    for (int i = 0; i < taken; ++i) CHECK(stream.next());
  }
}

TEST_CASE("Fewer samples than the batch size make one batch of what is there") {
  CHECK(num_batches(3, 1024) == 1);
  CHECK(num_batches(1024, 1024) == 1);
  CHECK(num_batches(1025, 1024) == 2);
  CHECK(num_batches(3, std::numeric_limits<int64_t>::max()) == 1);
}
