// SPDX-License-Identifier: Apache-2.0
//
// What the host's tests share: a folder that goes away, files to put into it, the command line as a child process.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "support/catch.hpp"

namespace stratagem::test {

namespace fs = std::filesystem;
using Json = nlohmann::json;

/// A new folder that only its owner can write to; removed with all that is in it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  fs::path operator/(const std::string& name) const { return path / name; }
  fs::path path;
};

void write_file(const fs::path& path, const std::string& content);
std::string read_file(const fs::path& path);
/// "00 FF 7B" to bytes.
std::string bytes(const std::string& hex);
std::string gzipped(const std::string& content);
/// A float32 NPY file of shape (n, 1).
void write_samples(const fs::path& path, const std::vector<float>& samples);

struct Finished {
  int code = -1;  // exit code; 128 + signal where one ended it
  std::string out;
  std::string err;
  /// The last line of `out` as JSON.
  Json json() const;
};

struct Surroundings {
  bool on_terminal = false;     // stderr is one
  uint64_t max_file_bytes = 0;  // a write past this fails, as on a full disk; 0: no limit
  std::string out = {};         // where stdout goes; empty: into Finished
  bool ignores_sigint = false;  // as a shell has it for what runs in the background
  bool obeys_modes = false;     // the modes of files bind it, though it be root
};

/// Runs build/bin/stratagem. `environment` is set on top of ours, without STRATAGEM_PLUGIN_PATH and NO_COLOR.
Finished run_stratagem(const std::vector<std::string>& arguments, const fs::path& folder = "/",
                       const std::map<std::string, std::string>& environment = {}, Surroundings surroundings = {});

/// While it lives, this process is nobody who may read and remove all, and `folder` is its own.
class Unprivileged {
 public:
  explicit Unprivileged(const fs::path& folder);
  ~Unprivileged();

 private:
  bool was_root_;
};

/// Runs `body` and returns the Error that it must throw.
template <class Body>
Error error_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  FAIL("no error was thrown");
  throw 0;
}

/// Whether `text` holds `part`: for CHECK, which shows both.
struct Contains {
  std::string part;
  friend bool operator==(const std::string& text, const Contains& wanted) { return text.find(wanted.part) != std::string::npos; }
  friend std::ostream& operator<<(std::ostream& out, const Contains& wanted) {
    return out << "a text with \"" << wanted.part << '"';
  }
};

}  // namespace stratagem::test
