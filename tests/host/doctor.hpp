// SPDX-License-Identifier: Apache-2.0
//
// What the tests of stratagem doctor share: what a check says, and a LibTorch that is files alone.
#pragma once

#include <sys/stat.h>

#include "libstratagem/doctor/checks.hpp"
#include "support.hpp"

namespace stratagem::test {

/// What is wrong, with what to do; each a line.
inline std::string complaints(const Check& check) {
  std::string text;
  for (const Complaint& complaint : check.complaints) text += complaint.wrong + " | " + complaint.remedy + "\n";
  return text;
}

inline bool is_fine(const Check& check) {
  UNSCOPED_INFO(check.id << ": " << check.found << "\n" << complaints(check));
  return check.health() == Health::ok && check.complaints.empty();
}

/// One complaint, with these parts.
inline void check_complaint(const Check& check, Health health, std::initializer_list<std::string> parts) {
  INFO(check.id << ": " << check.found);
  CHECK(check.health() == health);
  REQUIRE(check.complaints.size() == 1);
  CHECK(!check.complaints[0].remedy.empty());
  for (const std::string& part : parts) CHECK(complaints(check) == Contains{part});
}

inline Gpus gpus_with(int count, int cuda_version = 13020) {
  Gpus gpus{Gpus::State::found, {}, cuda_version, {}};
  for (int i = 0; i < count; ++i) gpus.names.push_back("Fake GPU " + std::to_string(i));
  return gpus;
}

inline Gpus no_gpus(Gpus::State state = Gpus::State::no_driver) { return {state, {}, 0, "nothing is here; install it"}; }

inline Wanted wants_cuda() {
  Wanted wanted;
  wanted.accelerator = "cuda";
  return wanted;
}

/// A plugin at `folder`/plugin.so, whose run path is `folder`/lib; there a LibTorch with CUDA and NCCL.
struct FakeTorch {
  explicit FakeTorch(const fs::path& at, const std::string& version = "2.15.0+cu132", const Json& note = {{"libtorch", "2.15.0"}})
      : folder(at) {
    fs::create_directories(folder / "lib");
    fs::copy_file(TEST_PLUGINS "/other_libtorch/toy_other_libtorch.so", folder / "plugin.so");
    for (const char* name : {"libtorch_cpu.so", "libtorch_cuda.so", "libcudart.so.13", "libnccl.so.2"})
      fs::copy_file(fs::path(TEST_PLUGINS "/fake_torch") / name, folder / "lib" / name);
    write_file(folder / "version.py", "__version__ = '" + version + "'\n");
    plugin = {folder / "plugin.so", 0, note, {}, {}};
  }
  /// Nothing but what is in the folder counts.
  std::vector<LibTorchCopy> copies(const LoaderPlaces& where) const { return find_libtorch({plugin}, where); }
  std::vector<LibTorchCopy> copies() const { return copies(places); }

  fs::path folder;
  PluginFile plugin;
  LoaderPlaces places{"", "/nowhere", {"/lib/x86_64-linux-gnu", "/lib64", "/usr/lib", "/lib/aarch64-linux-gnu"}};
};

}  // namespace stratagem::test
