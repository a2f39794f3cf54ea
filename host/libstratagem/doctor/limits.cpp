// SPDX-License-Identifier: Apache-2.0
//
// What this process may have of CPUs, threads, memory and disk, against what a run takes.
#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "base/error.hpp"
#include "libstratagem/doctor/checks.hpp"

namespace stratagem {
namespace fs = std::filesystem;
namespace {

constexpr uint64_t gib = uint64_t{1} << 30;

std::string size_text(uint64_t size_bytes) {
  char text[32];
  std::snprintf(text, sizeof text, size_bytes < gib ? "%.0f MiB" : "%.1f GiB",
                static_cast<double>(size_bytes) / static_cast<double>(size_bytes < gib ? 1 << 20 : gib));
  return text;
}

/// The number after `key` in a file of lines "Key: number".
std::optional<uint64_t> number_after(const std::string& key, const fs::path& file) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(key, 0) == 0) return std::strtoull(line.c_str() + key.size(), nullptr, 10);
  }
  return std::nullopt;
}

uint64_t count_threads_of(uid_t user) {
  uint64_t count = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const fs::path status = entry.path() / "status";
    if (number_after("Uid:", status) == std::optional<uint64_t>(user)) count += number_after("Threads:", status).value_or(0);
  }
  return count;
}

uint64_t bound_of(__rlimit_resource resource) {
  rlimit limit{};
  return getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ? no_bound : limit.rlim_cur;
}

size_t usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return std::max(1u, std::thread::hardware_concurrency());
  return static_cast<size_t>(std::max(1, CPU_COUNT(&set)));
}

/// "8", or "4,2" of nested regions, whose first is meant; nothing where OpenMP would not take it.
std::optional<uint64_t> omp_threads(const Machine& machine) {
  if (!machine.omp_num_threads) return std::nullopt;
  const std::string text = machine.omp_num_threads->substr(0, machine.omp_num_threads->find(','));
  const bool is_number = !text.empty() && text.size() < 7 && text.find_first_not_of("0123456789") == std::string::npos;
  if (!is_number || std::stoull(text) == 0) return std::nullopt;
  return std::stoull(text);
}

struct AskedThreads {
  uint64_t count;
  std::string origin;  // empty: nobody asked, it is what LibTorch takes then
};

AskedThreads asked_threads(const Machine& machine, const Wanted& wanted) {
  if (wanted.threads && *wanted.threads > 0) return {static_cast<uint64_t>(*wanted.threads), "the config's threads"};
  if (const auto count = omp_threads(machine)) return {*count, "OMP_NUM_THREADS"};
  return {machine.num_cpus, {}};
}

bool is_on_cpu(const Gpus& gpus, const Wanted& wanted) {
  return wanted.accelerator == "cpu" || (wanted.accelerator == "auto" && gpus.names.empty());
}

/// CPUs' worth of time, rounded up.
uint64_t cpu_share(const Machine& machine) {
  const double quota = machine.cgroup_cpus.value_or(static_cast<double>(machine.num_cpus));
  return std::min<uint64_t>(machine.num_cpus, static_cast<uint64_t>(std::max(1.0, std::ceil(quota))));
}

/// The nearest folder above that there is.
fs::path existing(fs::path folder) {
  std::error_code error;
  while (!fs::exists(folder, error) && folder.has_relative_path()) folder = folder.parent_path();
  return folder;
}

}  // namespace

Machine Machine::own(const Cgroups& cgroups) {
  Machine machine;
  machine.num_cpus = usable_cpus();
  machine.cgroup_cpus = cgroups.cpus();
  machine.cgroup_tasks = cgroups.tasks();
  machine.cgroup_memory = cgroups.memory_bytes();
  // The kernel doesn't hold root to it.
  machine.max_user_threads = getuid() == 0 ? no_bound : bound_of(RLIMIT_NPROC);
  if (machine.max_user_threads != no_bound) machine.num_user_threads = count_threads_of(getuid());
  machine.max_address_space = bound_of(RLIMIT_AS);
  if (const auto available = number_after("MemAvailable:", "/proc/meminfo")) machine.available_bytes = *available * 1024;
  if (const char* given = std::getenv("OMP_NUM_THREADS")) machine.omp_num_threads = given;
  return machine;
}

Check check_threads(const Machine& machine, const Gpus& gpus, const Wanted& wanted) {
  // LibTorch's pools hold as many again as a step uses; a GPU's driver and NCCL have some of their own.
  const uint64_t needed = 2 * asked_threads(machine, wanted).count + 16 * gpus.names.size() + 16;
  Check check("threads");
  std::vector<std::string> found;
  const auto judge = [&](const std::string& name, const Limit& limit, const std::string& remedy) {
    found.push_back(concat(name, " ", limit.limit, ", ", limit.used, " in use"));
    if (limit.free() < needed)
      check.fault(concat(name, " is ", limit.limit, ", and ", limit.used, " are in use; a run here takes about ", needed),
                  remedy);
  };
  if (machine.max_user_threads != no_bound) {
    judge("your limit on threads (ulimit -u)", {machine.max_user_threads, machine.num_user_threads, {}},
          "raise it: ulimit -u, or nproc in /etc/security/limits.conf; or set the config's threads lower");
  }
  if (machine.cgroup_tasks) {
    judge(concat("the limit of ", machine.cgroup_tasks->file.string()), *machine.cgroup_tasks,
          "raise it: docker run --pids-limit, or TasksMax= of systemd; or set the config's threads lower");
  }
  check.found = found.empty() ? "no limit" : join(found, "; ");
  return check;
}

Check check_memory(const Machine& machine, const Gpus& gpus, const Wanted& wanted) {
  Check check("memory");
  std::vector<std::string> found;
  const auto judge = [&](uint64_t free_bytes, const std::string& where, const std::string& remedy) {
    found.push_back(where);
    if (free_bytes < gib) check.fault(concat(where, "; LibTorch alone takes about 0.5 GiB"), remedy);
    if (free_bytes >= gib && free_bytes < 2 * gib)
      check.warn(concat(where, "; that is little beside LibTorch's 0.5 GiB"), remedy);
  };
  if (machine.available_bytes)
    judge(*machine.available_bytes, concat(size_text(*machine.available_bytes), " free"),
          "end other programs, or add memory or swap");
  if (const auto& limit = machine.cgroup_memory) {
    judge(limit->free(),
          concat(size_text(limit->free()), " left under the limit of ", size_text(limit->limit), " in ", limit->file.string()),
          "raise it: docker run --memory, or MemoryMax= of systemd");
  }
  if (machine.max_address_space != no_bound) {
    const std::string where = concat("the limit on address space (ulimit -v) is ", size_text(machine.max_address_space));
    constexpr const char* remedy = "take it away: ulimit -v unlimited, or \"as\" in /etc/security/limits.conf";
    found.push_back(where);
    const bool uses_gpu = !gpus.names.empty() && wanted.accelerator != "cpu";
    if (uses_gpu) check.fault(concat(where, "; CUDA reserves more than all GPUs and the host have together"), remedy);
    if (!uses_gpu && machine.max_address_space < 4 * gib) {
      check.add(machine.max_address_space < gib ? Health::fault : Health::warning,
                concat(where, "; LibTorch's libraries and its threads' stacks are mapped there, whether or not they use memory"),
                remedy);
    }
  }
  check.found = found.empty() ? "no limit" : join(found, "; ");
  return check;
}

Check check_cpus(const Machine& machine, const Gpus& gpus, const Wanted& wanted) {
  Check check("cpus");
  const AskedThreads asked = asked_threads(machine, wanted);
  const uint64_t share = cpu_share(machine);
  check.found = concat(machine.num_cpus, machine.num_cpus == 1 ? " CPU" : " CPUs");
  if (machine.cgroup_cpus)
    check.found += concat(", of their time a control group gives ", std::round(*machine.cgroup_cpus * 100) / 100);
  check.found += asked.origin.empty() ? concat("; ", asked.count, " threads by default")
                                      : concat("; ", asked.count, " threads by ", asked.origin);
  if (machine.omp_num_threads && !machine.omp_num_threads->empty() && !omp_threads(machine)) {
    check.warn(concat("OMP_NUM_THREADS is \"", *machine.omp_num_threads, "\", which is no number of threads and is not taken"),
               concat("set it to ", share, ", or unset it"));
  }
  if (asked.count > share) {
    check.warn(concat(asked.count, " threads ", asked.origin.empty() ? "by default" : concat("asked for by ", asked.origin),
                      ", and ", share, share == 1 ? " CPU" : " CPUs", " to run on: they wait for each other"),
               concat("set the config's threads (or OMP_NUM_THREADS) to ", share));
  }
  if (const int64_t replicas = wanted.num_devices.value_or(0);
      is_on_cpu(gpus, wanted) && replicas > static_cast<int64_t>(share)) {
    check.warn(concat("the config's /strategy/devices makes ", replicas, " replicas on ", share, share == 1 ? " CPU" : " CPUs",
                      ": each has a thread of its own"),
               concat("set it to ", share, " or less, unless it is a trial"));
  }
  return check;
}

Check check_outputs(const Wanted& wanted, const fs::path& otherwise) {
  Check check("output");
  std::vector<fs::path> folders = wanted.outputs;
  if (folders.empty()) folders.push_back(otherwise);
  std::sort(folders.begin(), folders.end());
  folders.erase(std::unique(folders.begin(), folders.end()), folders.end());
  std::vector<std::string> found;
  for (const fs::path& folder : folders) {
    const fs::path there = existing(folder);
    const std::string named =
        there == folder ? folder.string() : concat(folder.string(), " (to be made in ", there.string(), ")");
    std::error_code error;
    struct statvfs info {};
    if (!fs::is_directory(there, error)) {
      check.fault(concat("the folder ", folder.string(), " can't be made: ", there.string(), " is a file"),
                  "name another folder");
    } else if (faccessat(AT_FDCWD, there.c_str(), W_OK | X_OK, AT_EACCESS) != 0) {
      check.fault(concat("can't write to ", named, ": ", std::strerror(errno)),
                  "name a folder that you can write to, or give yourself the right (chmod u+wx)");
    } else if (statvfs(there.c_str(), &info) == 0 && info.f_blocks != 0) {
      const uint64_t free_bytes = info.f_bavail * info.f_frsize;
      found.push_back(concat(named, ": ", size_text(free_bytes), " free"));
      if (free_bytes < gib)
        check.warn(concat(named, " has ", size_text(free_bytes), " free"),
                   "make room; a checkpoint takes about three times the weights");
      continue;
    }
    found.push_back(named);
  }
  check.found = join(found, "; ");
  return check;
}

}  // namespace stratagem
