// SPDX-License-Identifier: Apache-2.0
//
// What the control groups of this process allow: version 2, version 1, and both side by side. A group's limit binds those below it, so
// each is looked at from its own up to the top.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace stratagem {

/// A limit, and how much of it is used.
struct Limit {
  uint64_t limit = 0;
  uint64_t used = 0;
  std::filesystem::path file;  // that says so

  uint64_t free() const { return limit > used ? limit - used : 0; }
};

class Cgroups {
 public:
  explicit Cgroups(std::filesystem::path root = "/sys/fs/cgroup", std::filesystem::path own = "/proc/self/cgroup");

  /// The one that leaves the least; nothing: there is no limit.
  std::optional<Limit> memory_bytes() const;
  std::optional<Limit> tasks() const;
  /// CPUs' worth of time.
  std::optional<double> cpus() const;

 private:
  std::vector<std::filesystem::path> folders(const std::string& controller) const;

  std::filesystem::path root_, own_;
};

}  // namespace stratagem
