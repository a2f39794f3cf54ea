// SPDX-License-Identifier: Apache-2.0
//
// Driver, devices, and the versions of CUDA and NCCL that have to fit each other.
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <set>

#include "base/error.hpp"
#include "base/note.hpp"
#include "libstratagem/doctor/checks.hpp"

namespace stratagem {
namespace fs = std::filesystem;
namespace {

constexpr double bytes_per_gib = 1 << 30;

bool has_gpu(const Gpus& gpus) { return gpus.state == Gpus::State::found; }

/// `missing` is "what; the way out"; the first "; " divides it.
std::pair<std::string, std::string> parts_of(const std::string& missing) {
  const size_t middle = missing.find("; ");
  if (middle == std::string::npos) return {missing, "see nvidia-smi"};
  return {missing.substr(0, middle), missing.substr(middle + 2)};
}

std::string in_gib(uint64_t size_bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GiB", static_cast<double>(size_bytes) / bytes_per_gib);
  return text;
}

const char* oldest_driver_for(int cuda_major) { return cuda_major >= 13 ? "580" : cuda_major == 12 ? "525" : "450"; }

void check_copy(const LibTorchCopy& copy, const Gpus& gpus, const LoaderPlaces& places, Check& check) {
  const int needed = major_of(copy.cudart), driver = gpus.cuda_version / 1000;
  if (needed > 0 && driver > 0 && driver < needed) {
    check.fault(concat("NVIDIA's driver has CUDA ", cuda_version_text(gpus.cuda_version), ", and LibTorch ", copy.version, " (",
                       copy.cpu.string(), ") needs ", copy.cudart),
                concat("update the driver to ", oldest_driver_for(needed),
                       " or newer, or build the plugins with a LibTorch for CUDA ", driver));
  }
  if (needed > 0 && find_needed(copy.cudart, copy.cpu, places).empty()) {
    check.fault(
        concat(copy.cpu.string(), " needs ", copy.cudart, ", which is not found"),
        concat("install CUDA ", needed, "'s runtime (with pip: nvidia-cuda-runtime), or have LD_LIBRARY_PATH name its folder"));
  }
  for (const LibTorchCopy::User& user : copy.users) {
    if (user.cuda.empty() || needed < 0 || major_of(user.cuda) == needed) continue;
    check.fault(concat(user.plugin.string(), " was built with CUDA ", user.cuda, ", and LibTorch (", copy.cpu.string(),
                       ") needs ", copy.cudart),
                "build both with the same CUDA");
  }
}

/// What a GPU's libraries need and isn't there. NCCL and CUDA's runtime are told of by themselves.
void check_cuda_libraries(const LibTorchCopy& copy, const LoaderPlaces& places, Check& check) {
  std::set<fs::path> files;
  if (!copy.cuda.empty()) files.insert(copy.cuda);
  for (const LibTorchCopy::User& user : copy.users) {
    std::error_code error;
    const fs::path transport = user.plugin.parent_path() / "libstratagem_cuda.so";
    if (fs::exists(transport, error)) files.insert(transport);
  }
  for (const fs::path& file : files) {
    std::vector<std::string> missing = missing_libraries(file, places);
    std::erase_if(missing,
                  [](const std::string& name) { return name.rfind("libnccl.", 0) == 0 || name.rfind("libcudart.", 0) == 0; });
    if (!missing.empty()) {
      check.fault(concat(file.string(), " needs ", join(missing), ", which is not found"),
                  "install LibTorch with its CUDA libraries again, or have LD_LIBRARY_PATH name their folders");
    }
  }
}

/// Compares "2.28.9" and "2.30.7+cuda13.3" number by number.
bool is_older(const std::string& version, const std::string& than) {
  const auto numbers = [](const std::string& text) {
    int major = 0, minor = 0, patch = 0;
    std::sscanf(text.c_str(), "%d.%d.%d", &major, &minor, &patch);
    return std::vector<int>{major, minor, patch};
  };
  return numbers(version) < numbers(than);
}

/// "13.3" of "2.30.7+cuda13.3".
std::string cuda_of_nccl(const std::string& version) {
  const size_t at = version.find("cuda");
  return at == std::string::npos ? "" : version.substr(at + 4);
}

bool needs_nccl(const fs::path& file) {
  const std::vector<std::string> needed = read_dynamic_section(file).needed;
  return std::find(needed.begin(), needed.end(), "libnccl.so.2") != needed.end();
}

std::string check_nccl_of(const LibTorchCopy& copy, const LoaderPlaces& places, Check& check) {
  constexpr const char* install =
      "install NCCL for LibTorch's CUDA (with pip: nvidia-nccl-cu13), or have LD_LIBRARY_PATH name its folder";
  if (!needs_nccl(copy.cuda)) return "no NCCL of its own";
  const fs::path file = find_needed("libnccl.so.2", copy.cuda, places);
  if (file.empty()) {
    check.fault(concat(copy.cuda.string(), " needs libnccl.so.2, which is not found"), install);
    return "no libnccl.so.2";
  }
  const std::string version = nccl_version(file), cuda = cuda_of_nccl(version);
  if (major_of(cuda) > 0 && major_of(copy.cudart) > 0 && major_of(cuda) != major_of(copy.cudart)) {
    check.fault(concat("NCCL ", version, " (", file.string(), ") is for CUDA ", cuda, ", and LibTorch (", copy.cpu.string(),
                       ") needs ", copy.cudart),
                install);
  }
  for (const LibTorchCopy::User& user : copy.users) {
    if (user.nccl.empty() || version.empty() || !is_older(version, user.nccl)) continue;
    check.fault(
        concat(user.plugin.string(), " was built with NCCL ", user.nccl, ", and would load ", version, " (", file.string(), ")"),
        "install NCCL of that version or newer, or build the plugin with the older one");
  }
  return concat("NCCL ", version.empty() ? "of unknown version" : version, ", ", file.string());
}

}  // namespace

Check check_driver(const Gpus& gpus, const Wanted& wanted) {
  Check check("driver");
  if (gpus.cuda_version > 0) check.found = concat("NVIDIA's driver, for CUDA up to ", cuda_version_text(gpus.cuda_version));
  const auto [wrong, remedy] = parts_of(gpus.missing);
  if (check.found.empty()) check.found = gpus.state == Gpus::State::no_driver ? "no NVIDIA driver" : "NVIDIA's driver";
  if (gpus.state == Gpus::State::broken_driver) check.fault(wrong, remedy);
  if (gpus.state != Gpus::State::no_driver) return check;
  check.is_skipped = true;
  if (wanted.needs_gpu()) check.fault(concat("the config's /strategy/accelerator is \"cuda\", but ", wrong), remedy);
  return check;
}

Check check_devices(const Gpus& gpus, const Wanted& wanted) {
  Check check("devices");
  std::vector<std::string> known;
  for (size_t i = 0; i < gpus.names.size(); ++i) known.push_back(concat("cuda:", i, " ", gpus.names[i]));
  check.found = has_gpu(gpus) ? join(known) : "no GPU";
  if (!has_gpu(gpus)) {
    check.is_skipped = true;
    const auto [wrong, remedy] = parts_of(gpus.missing);
    // Of a driver that is missing or doesn't work, its own check tells.
    if (gpus.state == Gpus::State::no_gpu) check.add(wanted.needs_gpu() ? Health::fault : Health::warning, wrong, remedy);
    return check;
  }
  if (!wanted.needs_gpu()) return check;
  const auto count = static_cast<int64_t>(gpus.names.size());
  for (const int64_t index : wanted.devices) {
    if (index >= 0 && index < count) continue;
    check.fault(concat("the config's /strategy/devices names ", index, ", and there is no such GPU; there are ", join(known)),
                "list indices that there are");
  }
  if (wanted.devices.empty() && wanted.num_devices.value_or(0) > count) {
    check.fault(concat("the config's /strategy/devices wants ", *wanted.num_devices, " GPUs, and there are ", count),
                concat("set it to ", count, " or \"auto\"; CUDA_VISIBLE_DEVICES hides those that it doesn't list"));
  }
  return check;
}

Check check_cuda_versions(const Gpus& gpus, const std::vector<LibTorchCopy>& copies, const Wanted& wanted,
                          const LoaderPlaces& places) {
  Check check("cuda-versions");
  std::vector<std::string> found;
  for (const LibTorchCopy& copy : copies) {
    if (copy.cpu.empty()) continue;
    check_copy(copy, gpus, places, check);
    const bool has_cuda = !copy.cuda.empty(), uses_gpu = has_gpu(gpus) || wanted.needs_gpu();
    if (uses_gpu) check_cuda_libraries(copy, places, check);
    found.push_back(concat("LibTorch ", copy.version,
                           has_cuda && major_of(copy.cudart) > 0 ? concat(" for CUDA ", major_of(copy.cudart))
                           : has_cuda                            ? " with CUDA"
                                                                 : " without CUDA"));
    if (has_cuda || !uses_gpu) continue;
    check.add(wanted.needs_gpu() ? Health::fault : Health::warning,
              concat("LibTorch ", copy.version, " (", copy.cpu.string(),
                     ") is built without CUDA: there is no libtorch_cuda.so beside it"),
              "build the plugins with a LibTorch for CUDA to use the GPUs");
  }
  check.is_skipped = found.empty();
  if (gpus.cuda_version > 0) found.push_back(concat("driver for CUDA up to ", cuda_version_text(gpus.cuda_version)));
  check.found = found.empty() ? "nothing that uses CUDA" : join(found, "; ");
  return check;
}

Check check_nccl(const Gpus& gpus, const std::vector<LibTorchCopy>& copies, const Wanted& wanted, const LoaderPlaces& places) {
  Check check("nccl");
  std::vector<std::string> found;
  for (const LibTorchCopy& copy : copies) {
    if (!copy.cuda.empty()) found.push_back(check_nccl_of(copy, places, check));
  }
  check.found = found.empty() ? "no LibTorch that uses it" : join(found, "; ");
  check.is_skipped = found.empty() || (!has_gpu(gpus) && !wanted.needs_gpu());
  if (check.is_skipped) check.complaints.clear();  // nothing will load it
  return check;
}

Check check_shared_memory(const fs::path& folder, const Gpus& gpus, const Wanted& wanted) {
  constexpr uint64_t enough_bytes = uint64_t{1} << 30;
  constexpr const char* remedy =
      "make it larger: docker run --shm-size=4g (or --ipc=host), or mount -o remount,size=4G /dev/shm as root";
  Check check("shared-memory");
  struct statvfs info {};
  const bool is_there = statvfs(folder.c_str(), &info) == 0;
  const std::string why_not = is_there ? "" : std::strerror(errno);
  const uint64_t size_bytes = info.f_blocks * info.f_frsize, free_bytes = info.f_bavail * info.f_frsize;
  check.found = is_there ? concat(folder.string(), ": ", in_gib(free_bytes), " free of ", in_gib(size_bytes))
                         : concat("no ", folder.string());
  const size_t num_gpus =
      wanted.num_devices ? std::min<size_t>(static_cast<size_t>(std::max<int64_t>(0, *wanted.num_devices)), gpus.names.size())
                         : gpus.names.size();
  if (num_gpus < 2 || wanted.accelerator == "cpu") {
    check.is_skipped = !is_there;
  } else if (!is_there) {
    check.warn(concat("NCCL between ", num_gpus, " GPUs needs ", folder.string(), ": ", why_not), "mount a tmpfs there");
  } else if (free_bytes < enough_bytes) {
    check.warn(concat(folder.string(), " has ", in_gib(free_bytes), " free of ", in_gib(size_bytes), "; NCCL between ", num_gpus,
                      " GPUs should have 1 GiB"),
               remedy);
  }
  return check;
}

}  // namespace stratagem
