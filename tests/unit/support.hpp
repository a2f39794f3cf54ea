// SPDX-License-Identifier: Apache-2.0
//
// What several unit tests need: a folder of their own, and the error that something throws.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string>
#include <system_error>

#include "base/error.hpp"
#include "support/catch.hpp"

namespace stratagem::test {

/// How often this thread asked operator new for memory (error_test.cpp replaces it).
extern thread_local uint64_t num_allocations;

/// An empty folder, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "stratagem-test-XXXXXX").native();
    if (mkdtemp(name.data()) == nullptr) throw std::system_error(errno, std::generic_category(), name);
    path_ = name;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::filesystem::path& path() const { return path_; }
  std::string operator/(const std::string& name) const { return (path_ / name).native(); }

 private:
  std::filesystem::path path_;
};

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in{path, std::ios::binary};
  REQUIRE(in.good());
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_file(const std::filesystem::path& path, const std::string& content) {
  std::ofstream out{path, std::ios::binary};
  out << content;
  out.close();
  REQUIRE(out.good());
}

/// The Error that `body` throws; the test fails if it throws none.
template <class Body>
Error error_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  FAIL("no error was thrown");
  return {STG_OK, ""};
}

/// Checks an error's code, and that its message has all of `parts`.
inline void check_error(const Error& error, uint32_t code, std::initializer_list<std::string> parts) {
  INFO("message: " << error.message);
  CHECK(code_name(error.code) == code_name(code));
  for (const std::string& part : parts) {
    INFO("wanted in it: " << part);
    CHECK(error.message.find(part) != std::string::npos);
  }
}

}  // namespace stratagem::test
