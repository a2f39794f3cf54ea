// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/doctor/cgroups.hpp"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace stratagem {
namespace fs = std::filesystem;
namespace {

// Version 1 writes "no limit" as a number near 2^63, rounded to pages.
constexpr uint64_t unlimited = uint64_t{1} << 60;

/// The file's first number; nothing where there is no file, or it says "max" or -1.
std::optional<uint64_t> number_in(const fs::path& file) {
  std::ifstream in(file);
  int64_t number = -1;
  if (!(in >> number) || number < 0 || static_cast<uint64_t>(number) >= unlimited) return std::nullopt;
  return static_cast<uint64_t>(number);
}

/// Of lines "key number".
uint64_t number_of(const char* key, const fs::path& file) {
  std::ifstream in(file);
  std::string word;
  for (uint64_t number = 0; in >> word >> number;) {
    if (word == key) return number;
  }
  return 0;
}

void take_tighter(std::optional<Limit>& tightest, const Limit& limit) {
  if (!tightest || limit.free() < tightest->free()) tightest = limit;
}

/// Pages of files that were read go before anything is refused.
uint64_t less(uint64_t used, uint64_t reclaimable) { return used > reclaimable ? used - reclaimable : 0; }

}  // namespace

Cgroups::Cgroups(fs::path root, fs::path own) : root_(std::move(root)), own_(std::move(own)) {}

std::vector<fs::path> Cgroups::folders(const std::string& controller) const {
  std::vector<fs::path> found;
  std::error_code error;
  std::ifstream in(own_);
  for (std::string line; std::getline(in, line);) {  // "4:cpu,cpuacct:/path", of version 2 "0::/path"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1);
    if (!names.empty() && ("," + names + ",").find("," + controller + ",") == std::string::npos) continue;
    fs::path top = names.empty() ? root_ : root_ / controller;
    if (names.empty() && !fs::exists(root_ / "cgroup.controllers", error)) top = root_ / "unified";
    if (!names.empty() && !fs::exists(top, error)) top = root_ / names;
    // In a container without a namespace of its own, the path is the machine's and not to be seen; the top is the own one then.
    const fs::path below = fs::path(line.substr(second + 1)).relative_path();
    fs::path folder = below.empty() ? top : top / below;
    if (!fs::exists(folder, error)) folder = top;
    for (;; folder = folder.parent_path()) {
      found.push_back(folder);
      if (folder == top || !folder.has_relative_path()) break;
    }
  }
  return found;
}

std::optional<Limit> Cgroups::memory_bytes() const {
  std::optional<Limit> tightest;
  for (const fs::path& folder : folders("memory")) {
    if (const auto limit = number_in(folder / "memory.max")) {
      const uint64_t used = number_in(folder / "memory.current").value_or(0);
      take_tighter(tightest, {*limit, less(used, number_of("inactive_file", folder / "memory.stat")), folder / "memory.max"});
    }
    if (const auto limit = number_in(folder / "memory.limit_in_bytes")) {
      const uint64_t used = number_in(folder / "memory.usage_in_bytes").value_or(0);
      take_tighter(tightest, {*limit, less(used, number_of("total_inactive_file", folder / "memory.stat")),
                              folder / "memory.limit_in_bytes"});
    }
  }
  return tightest;
}

std::optional<Limit> Cgroups::tasks() const {
  std::optional<Limit> tightest;
  for (const fs::path& folder : folders("pids")) {
    if (const auto limit = number_in(folder / "pids.max"))
      take_tighter(tightest, {*limit, number_in(folder / "pids.current").value_or(0), folder / "pids.max"});
  }
  return tightest;
}

std::optional<double> Cgroups::cpus() const {
  std::optional<double> least;
  const auto take = [&](std::optional<uint64_t> quota, std::optional<uint64_t> period) {
    if (!quota || !period || *quota == 0 || *period == 0) return;
    const double cpus = static_cast<double>(*quota) / static_cast<double>(*period);
    least = std::min(least.value_or(cpus), cpus);
  };
  for (const fs::path& folder : folders("cpu")) {
    std::ifstream in(folder / "cpu.max");  // "200000 100000", or "max 100000"
    if (uint64_t quota = 0, period = 0; in >> quota >> period) take(quota, period);
    take(number_in(folder / "cpu.cfs_quota_us"), number_in(folder / "cpu.cfs_period_us"));
  }
  return least;
}

}  // namespace stratagem
