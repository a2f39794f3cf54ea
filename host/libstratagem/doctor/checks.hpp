// SPDX-License-Identifier: Apache-2.0
//
// The checks of `stratagem doctor`. Each takes what it judges, so that a test can give it a machine that isn't there; nothing here loads
// a plugin or LibTorch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/gpu.hpp"
#include "libstratagem/doctor/cgroups.hpp"
#include "libstratagem/doctor/check.hpp"
#include "libstratagem/doctor/libraries.hpp"
#include "libstratagem/doctor/wanted.hpp"
#include "libstratagem/plugins/search.hpp"

namespace stratagem {

// ---- plugins and what they load

/// What the folders offer, and what the config names by its path; without what can't be used or never is.
std::vector<PluginFile> find_plugins(const Catalogue& catalogue, const Wanted& wanted);

/// A LibTorch that plugins would load.
struct LibTorchCopy {
  struct User {
    std::filesystem::path plugin;
    std::string libtorch, cuda, nccl;  // what it was built with, as its note says; empty: it doesn't
  };
  std::filesystem::path cpu;   // libtorch_cpu.so; empty: it is not found
  std::filesystem::path cuda;  // libtorch_cuda.so beside it; empty: built without CUDA
  std::string version;         // "2.15.0+cu132"; empty: its files don't say
  std::string cudart;          // "libcudart.so.13", if it needs one
  std::vector<User> users;
};
std::vector<LibTorchCopy> find_libtorch(const std::vector<PluginFile>& plugins, const LoaderPlaces& places);

Check check_plugin_folders(const Catalogue& catalogue, const Wanted& wanted);
Check check_libtorch_copies(const std::vector<LibTorchCopy>& copies, const LoaderPlaces& places);

// ---- GPUs

Check check_driver(const Gpus& gpus, const Wanted& wanted);
Check check_devices(const Gpus& gpus, const Wanted& wanted);
/// Driver, LibTorch and plugins against each other.
Check check_cuda_versions(const Gpus& gpus, const std::vector<LibTorchCopy>& copies, const Wanted& wanted,
                          const LoaderPlaces& places);
Check check_nccl(const Gpus& gpus, const std::vector<LibTorchCopy>& copies, const Wanted& wanted, const LoaderPlaces& places);
Check check_shared_memory(const std::filesystem::path& folder, const Gpus& gpus, const Wanted& wanted);

// ---- limits

inline constexpr uint64_t no_bound = UINT64_MAX;

struct Machine {
  size_t num_cpus = 1;                      // that this process may run on
  std::optional<double> cgroup_cpus;        // of their time
  std::optional<Limit> cgroup_tasks;        // threads of the group
  std::optional<Limit> cgroup_memory;       // bytes
  uint64_t max_user_threads = no_bound;     // RLIMIT_NPROC, where it binds this user
  uint64_t num_user_threads = 0;            // that this user has now
  uint64_t max_address_space = no_bound;    // RLIMIT_AS, bytes
  std::optional<uint64_t> available_bytes;  // memory
  std::optional<std::string> omp_num_threads;

  /// This process's.
  static Machine own(const Cgroups& cgroups = Cgroups());
};

Check check_threads(const Machine& machine, const Gpus& gpus, const Wanted& wanted);
Check check_memory(const Machine& machine, const Gpus& gpus, const Wanted& wanted);
Check check_cpus(const Machine& machine, const Gpus& gpus, const Wanted& wanted);
/// The folders that are to be written to; without any, `otherwise`.
Check check_outputs(const Wanted& wanted, const std::filesystem::path& otherwise);

}  // namespace stratagem
