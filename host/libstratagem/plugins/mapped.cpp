// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/plugins/mapped.hpp"

#include <fstream>
#include <string_view>

#include "base/error.hpp"
#include "base/note.hpp"

namespace stratagem {
namespace fs = std::filesystem;
namespace {

struct Known {
  std::string version;
  fs::path plugin;
};
Known& known() {
  static Known value;
  return value;
}

/// The file of the mapped libtorch_cpu; empty if there is none.
fs::path mapped_libtorch() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t slash = line.find('/');
    if (slash == std::string::npos) continue;
    const fs::path file = line.substr(slash);
    if (file.filename().string().rfind("libtorch_cpu.so", 0) == 0) return file;
  }
  return {};
}

/// The file that the plugin would load; empty if its run path has none.
fs::path own_libtorch(const fs::path& plugin) {
  for (const fs::path& folder : read_run_path(plugin)) {
    std::error_code error;
    if (fs::exists(folder / "libtorch_cpu.so", error)) return folder / "libtorch_cpu.so";
  }
  return {};
}

/// What stands between `before` and `after` on a line that begins with `before`.
std::string text_between(const fs::path& file, std::string_view before, std::string_view after) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(before, 0) == 0) return line.substr(before.size(), line.find(after, before.size()) - before.size());
  }
  return {};
}

}  // namespace

std::string minor_of(const std::string& version) {
  const size_t first = version.find('.');
  return first == std::string::npos ? version : version.substr(0, version.find_first_of(".+", first + 1));
}

std::string libtorch_version_beside(const fs::path& libtorch_cpu) {
  const fs::path root = libtorch_cpu.parent_path().parent_path();
  const std::string of_wheel = text_between(root / "version.py", "__version__ = '", "'");
  return of_wheel.empty() ? text_between(root / "build-version", "", " ") : of_wheel;
}

void check_libtorch(const fs::path& plugin, const Json& note) {
  const std::string wanted = note.value("libtorch", "");
  const fs::path mapped = wanted.empty() ? fs::path() : mapped_libtorch();
  if (mapped.empty()) return;
  const std::string there = known().version.empty() ? libtorch_version_beside(mapped) : known().version;
  if (there.empty() || minor_of(there) == minor_of(wanted)) return;
  const fs::path own = own_libtorch(plugin);
  throw failed_precondition(plugin.string(), " was built with LibTorch ", wanted,
                            own.empty() ? "" : concat(" (", own.string(), ")"), ", but this process already holds LibTorch ",
                            there, " (", mapped.string(),
                            known().plugin.empty() ? "" : concat(", loaded with ", known().plugin.string()),
                            "), and it can hold only one; use plugins built with the same");
}

void remember_libtorch(const fs::path& plugin, const Json& note) {
  if (known().version.empty() && note.contains("libtorch")) known() = {note.value("libtorch", ""), plugin};
}

}  // namespace stratagem
