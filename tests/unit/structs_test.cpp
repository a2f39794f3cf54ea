// SPDX-License-Identifier: Apache-2.0
//
// The rules of abi/stratagem/common.h for growing structs, at every boundary of a size.
#include "base/structs.hpp"

#include "unit/support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

// A struct that was released with two members and has grown by one.
struct Growing {
  uint64_t struct_size;
  uint64_t first;
  uint64_t second;
};
constexpr uint64_t min_size_bytes = 16;

// The same in newer headers than ours.
struct Newer {
  Growing known;
  uint64_t third;
  uint64_t fourth;
};

Newer newer(uint64_t size_bytes, uint64_t third = 0, uint64_t fourth = 0) { return {{size_bytes, 11, 22}, third, fourth}; }

Growing read(const Newer& value) { return read_argument(&value.known, min_size_bytes, "growing"); }

}  // namespace

TEST_CASE("an argument of our own size is read whole") {
  const Growing local = read(newer(24));
  CHECK(local.struct_size == 24);
  CHECK(local.first == 11);
  CHECK(local.second == 22);
}

TEST_CASE("what an older caller's argument lacks is zero") {
  const Growing local = read(newer(16));
  CHECK(local.first == 11);
  CHECK(local.second == 0);
}

TEST_CASE("a size between two members cuts the later one off") {
  // Four bytes of `second` are known: its low half on a little-endian machine.
  const Growing local = read(newer(20));
  CHECK(local.first == 11);
  CHECK(local.second == 22);
  Newer wide = newer(20);
  wide.known.second = 0x1'0000'0016;
  CHECK(read(wide).second == 0x16);
}

TEST_CASE("a newer caller's argument is read if what we don't know is zero") {
  CHECK(read(newer(40)).second == 22);
  CHECK(read(newer(32)).second == 22);
}

TEST_CASE("a newer caller's field that is not zero is refused by its offset") {
  const Error error = error_of([] { read(newer(40, 0, uint64_t{1} << 16)); });
  check_error(error, STG_UNIMPLEMENTED, {"growing", "offset 34", "knows 24 bytes"});
  check_error(error_of([] { read(newer(32, 5)); }), STG_UNIMPLEMENTED, {"offset 24"});
  CHECK(read(newer(32, 0, 5)).second == 22);  // past the size: not looked at
}

TEST_CASE("a null struct and sizes that no header had are refused") {
  check_error(error_of([] { read_argument<Growing>(nullptr, min_size_bytes, "growing"); }), STG_INVALID_ARGUMENT,
              {"growing is null"});
  for (uint64_t size : {uint64_t{0}, uint64_t{8}, uint64_t{15}, uint64_t{STG_MAX_STRUCT_SIZE_BYTES + 1}, UINT64_MAX,
                        uint64_t{0xCDCDCDCDCDCDCDCD}}) {
    check_error(error_of([&] { read(newer(size)); }), STG_INVALID_ARGUMENT,
                {"growing.struct_size is " + std::to_string(size), "16 to 65536"});
    check_error(error_of([&] {
                  const Newer value = newer(size);
                  read_table(&value.known, min_size_bytes, "growing");
                }),
                STG_INVALID_ARGUMENT, {"growing.struct_size"});
  }
}

TEST_CASE("the largest size is still read") {
  std::vector<uint64_t> memory(STG_MAX_STRUCT_SIZE_BYTES / 8);
  memory[0] = STG_MAX_STRUCT_SIZE_BYTES;
  memory[1] = 11;
  const auto* value = reinterpret_cast<const Growing*>(memory.data());
  CHECK(read_argument(value, min_size_bytes, "growing").first == 11);
  memory.back() = 1;
  check_error(error_of([&] { read_argument(value, min_size_bytes, "growing"); }), STG_UNIMPLEMENTED, {"offset 65528"});
}

TEST_CASE("of a table, slots that we don't know may be filled, and slots it lacks read as null") {
  const Newer value = newer(40, 7, 8);
  CHECK(read_table(&value.known, min_size_bytes, "table").second == 22);
  const Newer old = newer(16);
  CHECK(read_table(&old.known, min_size_bytes, "table").second == 0);
}

TEST_CASE("a slot that a table's size cuts in two reads as null") {
  for (uint64_t size = 17; size < 24; ++size) {
    const Newer cut = newer(size);
    CHECK(read_table(&cut.known, min_size_bytes, "table").first == 11);
    CHECK(read_table(&cut.known, min_size_bytes, "table").second == 0);
  }
}

TEST_CASE("a result is written as far as its owner knows it, and its size lowered to what was honoured") {
  Newer out = newer(40, 7, 8);
  write_result(&out.known, Growing{0, 1, 2});
  CHECK(out.known.struct_size == 24);
  CHECK(out.known.first == 1);
  CHECK(out.known.second == 2);
  CHECK(out.third == 7);

  Newer old = newer(16);
  write_result(&old.known, Growing{0, 1, 2});
  CHECK(old.known.struct_size == 16);
  CHECK(old.known.first == 1);
  CHECK(old.known.second == 22);  // the older owner's memory may end before it
}

TEST_CASE("a struct of ours is zero but for its size") {
  const Growing value = sized<Growing>();
  CHECK(value.struct_size == 24);
  CHECK(value.first == 0);
  CHECK(value.second == 0);
}
