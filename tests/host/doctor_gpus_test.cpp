// SPDX-License-Identifier: Apache-2.0
//
// stratagem doctor about driver, devices, CUDA, NCCL and /dev/shm, each fault simulated.
#include <sys/statvfs.h>

#include "doctor.hpp"

using namespace stratagem;
using namespace stratagem::test;

TEST_CASE("doctor tells the driver, and that there is none only where a config wants a GPU") {
  const Check there = check_driver(gpus_with(1, 12040), {});
  CHECK(is_fine(there));
  CHECK(there.found == "NVIDIA's driver, for CUDA up to 12.4");
  const Check none = check_driver(no_gpus(), {});
  CHECK(none.health() == Health::skipped);
  CHECK(none.complaints.empty());
  check_complaint(check_driver(no_gpus(), wants_cuda()), Health::fault,
                  {"the config's /strategy/accelerator is \"cuda\", but nothing is here | install it"});
}

TEST_CASE("doctor finds a fault in a driver that doesn't work, whoever needs it") {
  Gpus broken = no_gpus(Gpus::State::broken_driver);
  broken.cuda_version = 13000;
  for (const Wanted& wanted : {Wanted(), wants_cuda()})
    check_complaint(check_driver(broken, wanted), Health::fault, {"nothing is here | install it"});
  CHECK(check_devices(broken, {}).complaints.empty());  // told once
}

TEST_CASE("doctor lists the GPUs, and those that a config names and that are not there") {
  const Check two = check_devices(gpus_with(2), wants_cuda());
  CHECK(is_fine(two));
  CHECK(two.found == "cuda:0 Fake GPU 0, cuda:1 Fake GPU 1");
  Wanted wanted = wants_cuda();
  wanted.devices = {1, 2};
  wanted.num_devices = 2;
  check_complaint(check_devices(gpus_with(2), wanted), Health::fault,
                  {"names 2, and there is no such GPU; there are cuda:0 Fake GPU 0, cuda:1 Fake GPU 1"});
  wanted.devices = {0, 0, 1};  // one may be listed twice
  wanted.num_devices = 3;
  CHECK(is_fine(check_devices(gpus_with(2), wanted)));
  wanted.devices.clear();
  check_complaint(check_devices(gpus_with(2), wanted), Health::fault, {"wants 3 GPUs, and there are 2"});
  wanted.accelerator = "cpu";
  CHECK(is_fine(check_devices(gpus_with(2), wanted)));
}

TEST_CASE("doctor warns of a driver without a GPU, and finds a fault where a config wants one") {
  check_complaint(check_devices(no_gpus(Gpus::State::no_gpu), {}), Health::warning, {"nothing is here | install it"});
  check_complaint(check_devices(no_gpus(Gpus::State::no_gpu), wants_cuda()), Health::fault, {"nothing is here | install it"});
  const Check none = check_devices(no_gpus(), {});
  CHECK(none.health() == Health::skipped);
  CHECK(none.found == "no GPU");
}

TEST_CASE("doctor compares the driver's CUDA with the one that LibTorch needs, by its first number") {
  const TemporaryFolder folder;
  const FakeTorch torch(folder / "a");
  const auto check = [&](int version) { return check_cuda_versions(gpus_with(1, version), torch.copies(), {}, torch.places); };
  CHECK(is_fine(check(13000)));
  CHECK(is_fine(check(14010)));
  CHECK(check(13000).found == "LibTorch 2.15.0+cu132 for CUDA 13; driver for CUDA up to 13.0");
  check_complaint(check(12080), Health::fault,
                  {"NVIDIA's driver has CUDA 12.8, and LibTorch 2.15.0+cu132", "needs libcudart.so.13 | update the driver to 580",
                   "a LibTorch for CUDA 12"});
  CHECK(is_fine(check_cuda_versions(no_gpus(), torch.copies(), {}, torch.places)));
  CHECK(check_cuda_versions(no_gpus(), {}, {}, torch.places).health() == Health::skipped);
}

TEST_CASE("doctor finds a fault where CUDA's runtime is not found, on any machine, since LibTorch needs it") {
  const TemporaryFolder folder;
  const FakeTorch torch(folder / "a");
  fs::remove(folder / "a/lib/libcudart.so.13");
  check_complaint(check_cuda_versions(no_gpus(), torch.copies(), {}, torch.places), Health::fault,
                  {"libtorch_cpu.so needs libcudart.so.13, which is not found | install CUDA 13's runtime"});
}

TEST_CASE("doctor finds a fault where a plugin was built with another CUDA than LibTorch") {
  const TemporaryFolder folder;
  const FakeTorch torch(folder / "a", "2.15.0", {{"libtorch", "2.15.0"}, {"cuda", "12.6"}});
  check_complaint(check_cuda_versions(no_gpus(), torch.copies(), {}, torch.places), Health::fault,
                  {"plugin.so was built with CUDA 12.6, and LibTorch (", "needs libcudart.so.13"});
}

TEST_CASE("doctor tells a LibTorch without CUDA where there are GPUs to use") {
  const TemporaryFolder folder;
  const FakeTorch torch(folder / "a");
  fs::remove(folder / "a/lib/libtorch_cuda.so");
  check_complaint(check_cuda_versions(gpus_with(1), torch.copies(), {}, torch.places), Health::warning,
                  {"is built without CUDA: there is no libtorch_cuda.so beside it"});
  check_complaint(check_cuda_versions(gpus_with(1), torch.copies(), wants_cuda(), torch.places), Health::fault, {"without CUDA"});
  const Check nowhere = check_cuda_versions(no_gpus(), torch.copies(), {}, torch.places);
  CHECK(is_fine(nowhere));
  CHECK(nowhere.found == "LibTorch 2.15.0+cu132 without CUDA");
}

TEST_CASE("doctor finds a fault where a GPU's libraries need what is not there") {
  const TemporaryFolder folder;
  const FakeTorch torch(folder / "a");
  // Stands for one that needs cuDNN: what libtorch_cpu.so needs here is told of apart, so another name is put in.
  std::string file = read_file(folder / "a/lib/libtorch_cuda.so");
  file.replace(file.find("libnccl.so.2"), 12, "libcuddn.so9");
  write_file(folder / "a/lib/libtorch_cuda.so", file);
  fs::copy_file(folder / "a/lib/libtorch_cuda.so", folder / "a/libstratagem_cuda.so");
  const Check check = check_cuda_versions(gpus_with(1), torch.copies(), {}, torch.places);
  CHECK(check.health() == Health::fault);
  CHECK(complaints(check) == Contains{(folder / "a/lib/libtorch_cuda.so").string() + " needs libcuddn.so9, which is not found"});
  CHECK(complaints(check) == Contains{(folder / "a/libstratagem_cuda.so").string() + " needs libcuddn.so9, which is not found"});
  CHECK(is_fine(check_cuda_versions(no_gpus(), torch.copies(), {}, torch.places)));
}

TEST_CASE("doctor tells NCCL's version, from the library itself") {
  const TemporaryFolder folder;
  const FakeTorch torch(folder / "a");
  const Check check = check_nccl(gpus_with(1), torch.copies(), {}, torch.places);
  CHECK(is_fine(check));
  CHECK(check.found == "NCCL 2.28.9+cuda13.0, " + (folder / "a/lib/libnccl.so.2").string());
  const Check unused = check_nccl(no_gpus(), torch.copies(), {}, torch.places);
  CHECK(unused.health() == Health::skipped);
  CHECK(unused.found == check.found);
}

TEST_CASE("NCCL's version is found where it crosses what is read at once, and an unknown one stays unknown") {
  const TemporaryFolder folder;
  for (size_t before = (1 << 20) - 40; before < (1 << 20) + 8; ++before) {
    write_file(folder / "x", std::string(before, '.') + "NCCL version 2.30.7+cuda13.3" + std::string(1, '\0') + "9");
    CHECK(nccl_version(folder / "x") == "2.30.7+cuda13.3");
  }
  write_file(folder / "x", "NCCL version 2.30.7+cuda13.3");
  CHECK(nccl_version(folder / "x") == "2.30.7+cuda13.3");
  write_file(folder / "x", "NCCL version info");
  CHECK(nccl_version(folder / "x").empty());
  CHECK(nccl_version(folder / "none").empty());
}

TEST_CASE("doctor finds a fault where NCCL is not found, is for another CUDA, or older than a plugin's") {
  const TemporaryFolder folder;
  const FakeTorch torch(folder / "a", "2.15.0", {{"libtorch", "2.15.0"}, {"nccl", "2.28.9"}});
  CHECK(is_fine(check_nccl(gpus_with(1), torch.copies(), {}, torch.places)));
  std::string file = read_file(folder / "a/lib/libnccl.so.2");
  const size_t at = file.find("2.28.9+cuda13.0");
  write_file(folder / "a/lib/libnccl.so.2", std::string(file).replace(at, 15, "2.27.9+cuda13.0"));
  check_complaint(check_nccl(gpus_with(1), torch.copies(), {}, torch.places), Health::fault,
                  {"plugin.so was built with NCCL 2.28.9, and would load 2.27.9+cuda13.0"});
  write_file(folder / "a/lib/libnccl.so.2", std::string(file).replace(at, 15, "2.28.9+cuda12.9"));
  check_complaint(check_nccl(gpus_with(1), torch.copies(), {}, torch.places), Health::fault,
                  {"NCCL 2.28.9+cuda12.9", "is for CUDA 12.9, and LibTorch (", "needs libcudart.so.13"});
  fs::remove(folder / "a/lib/libnccl.so.2");
  check_complaint(check_nccl(no_gpus(), torch.copies(), wants_cuda(), torch.places), Health::fault,
                  {"libtorch_cuda.so needs libnccl.so.2, which is not found"});
  CHECK(check_nccl(no_gpus(), torch.copies(), {}, torch.places).health() == Health::skipped);
}

TEST_CASE("doctor warns of too little shared memory where several GPUs use NCCL") {
  const TemporaryFolder folder;
  struct statvfs info {};
  REQUIRE(statvfs(folder.path.c_str(), &info) == 0);
  if (info.f_bavail * info.f_frsize > uint64_t{1} << 30) CHECK(is_fine(check_shared_memory(folder.path, gpus_with(2), {})));
  // /proc is a file system that has no room at all.
  check_complaint(check_shared_memory("/proc", gpus_with(2), {}), Health::warning,
                  {"/proc has 0.0 GiB free of 0.0 GiB; NCCL between 2 GPUs should have 1 GiB", "--shm-size"});
  CHECK(is_fine(check_shared_memory("/proc", gpus_with(1), {})));
  Wanted one = wants_cuda();
  one.num_devices = 1;
  CHECK(is_fine(check_shared_memory("/proc", gpus_with(2), one)));
  check_complaint(check_shared_memory(folder / "none", gpus_with(2), {}), Health::warning,
                  {"NCCL between 2 GPUs needs " + (folder / "none").string() + ": No such file or directory"});
  CHECK(check_shared_memory(folder / "none", no_gpus(), {}).health() == Health::skipped);
}
