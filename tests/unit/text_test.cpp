// SPDX-License-Identifier: Apache-2.0
#include "base/text.hpp"

#include <locale>

#include "unit/support.hpp"

using namespace stratagem;

TEST_CASE("concat writes numbers so that they can be read back") {
  CHECK(concat("x = ", 0.1 + 0.2, ", n = ", 7, std::string("!")) == "x = 0.30000000000000004, n = 7!");
}

TEST_CASE("concat writes numbers alike in every locale of the process") {
  struct Grouping : std::numpunct<char> {
    char do_thousands_sep() const override { return ','; }
    std::string do_grouping() const override { return "\3"; }
    char do_decimal_point() const override { return ';'; }
  };
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Grouping));
  const std::string text = concat(12345, " ", 0.5);
  std::locale::global(before);
  CHECK(text == "12345 0.5");
}

TEST_CASE("join puts separators between items and names an empty list") {
  CHECK(join({}) == "(none)");
  CHECK(join({"a"}) == "a");
  CHECK(join({"a", "b", "c"}) == "a, b, c");
  CHECK(join({"a", "b"}, " or ") == "a or b");
}

TEST_CASE("nearest finds the name that was meant") {
  const std::vector<std::string> names{"single_device", "data_parallel", "ddp"};
  CHECK(nearest("data_paralel", names) == "data_parallel");
  CHECK(nearest("dataparallel", names) == "data_parallel");
  CHECK(nearest("singel_device", names) == "single_device");
  CHECK(nearest("dpd", names) == "ddp");
  CHECK(nearest("ddp", names) == "ddp");
}

TEST_CASE("nearest gives none where none is near") {
  CHECK(nearest("fsdp_with_tensor_parallel", {"ddp", "single_device"}).empty());
  CHECK(nearest("lr", {"weight_decay"}).empty());
  CHECK(nearest("", {"momentum"}).empty());
  CHECK(nearest("anything", {}).empty());
}

TEST_CASE("nearest takes up to a third of the name, but two edits in any case") {
  CHECK(nearest("lr", {"lrxx"}) == "lrxx");
  CHECK(nearest("lr", {"lrxxx"}).empty());
  CHECK(nearest("123456789", {"123456xyz"}) == "123456xyz");
  CHECK(nearest("123456789", {"12345wxyz"}).empty());
}

TEST_CASE("of equally near names the first is given") { CHECK(nearest("ab", {"ac", "ad"}) == "ac"); }
