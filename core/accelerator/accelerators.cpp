// SPDX-License-Identifier: Apache-2.0
//
// CUDA: looked for by the driver alone, so that nothing of it is loaded where there is none; its part of ours lies beside the plugin.
#include "accelerator/accelerators.hpp"

#include <ATen/detail/CUDAHooksInterface.h>
#include <dlfcn.h>

#include <array>
#include <filesystem>
#include <typeinfo>

#include "base/error.hpp"
#include "base/gpu.hpp"

namespace stratagem {

namespace {

constexpr const char* library_name = "libstratagem_cuda.so";

Accelerator::Found find_cuda() {
  Gpus gpus = find_gpus();
  return {std::move(gpus.names), std::move(gpus.missing)};
}

// The folder of the plugin that this is a part of.
std::filesystem::path own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&find_cuda), &info) == 0 || info.dli_fname == nullptr) return ".";
  return std::filesystem::absolute(info.dli_fname).parent_path();
}

template <class... Parts>
Error cannot_open(const Parts&... parts) {
  return {STG_FAILED_PRECONDITION, concat(parts...)};
}

// LibTorch's CUDA part is in the process now; whether LibTorch makes use of it is another matter.
void check_libtorch() {
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  if (typeid(hooks) == typeid(at::CUDAHooksInterface)) {  // the base class stands in for a part that isn't there
    throw cannot_open(
        "LibTorch was used in this process before its CUDA part was loaded, and looks for that only once; create a strategy on "
        "cuda before anything else uses LibTorch, or link the program to libtorch_cuda");
  }
  if (!hooks.hasCUDA()) {
    throw cannot_open(
        "LibTorch finds no device that it can use: the driver, which has CUDA ", cuda_version_text(find_gpus().cuda_version),
        ", may be too old for it; update the driver, or use a LibTorch of an older CUDA (`stratagem doctor` tells more)");
  }
}

const TransportApi& load_cuda() {
  const std::filesystem::path file = own_folder() / library_name;
  if (!std::filesystem::exists(file)) {
    throw cannot_open("there is no ", file.string(),
                      ": this Stratagem was built without CUDA; build it with -DSTRATAGEM_CUDA=ON");
  }
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw cannot_open(dlerror(), "; LibTorch with CUDA, the CUDA runtime and NCCL must be where ", library_name,
                      " was built against them, or in LD_LIBRARY_PATH (`stratagem doctor` tells more)");
  }
  using Entry = const TransportApi* (*)();
  const auto entry = reinterpret_cast<Entry>(dlsym(library, "stratagem_transport"));
  const TransportApi* api = entry == nullptr ? nullptr : entry();
  if (api == nullptr || api->struct_size != sizeof(TransportApi) || std::string_view(api->build_id) != STRATAGEM_BUILD_ID) {
    throw cannot_open(file.string(), " is of another build of Stratagem than the plugin beside it; install both together");
  }
  check_libtorch();
  return *api;
}

const TransportApi& open_cuda() {
  static const TransportApi& api = load_cuda();  // tried again after an error
  return api;
}

}  // namespace

std::span<const Accelerator> accelerators() {
  static constexpr std::array<Accelerator, 1> list{{{"cuda", STG_DEVICE_CUDA, c10::DeviceType::CUDA, &find_cuda, &open_cuda}}};
  return list;
}

}  // namespace stratagem
