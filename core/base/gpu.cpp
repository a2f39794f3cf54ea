// SPDX-License-Identifier: Apache-2.0
//
// The few functions of NVIDIA's driver are declared here: its ABI doesn't change, and its header comes with a toolkit that nobody needs
// in order to ask.
#include "base/gpu.hpp"

#include <dlfcn.h>

#include <cstdlib>

#include "base/text.hpp"

namespace stratagem {
namespace {

constexpr int success = 0, no_device_code = 100;  // CUDA_SUCCESS, CUDA_ERROR_NO_DEVICE

struct Driver {
  int (*init)(unsigned flags) = nullptr;
  int (*version)(int* version) = nullptr;
  int (*count)(int* count) = nullptr;
  int (*device)(int* device, int index) = nullptr;
  int (*name)(char* name, int capacity_bytes, int device) = nullptr;
  int (*error_text)(int code, const char** text) = nullptr;  // may be missing
};

template <class Function>
bool load(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  return function != nullptr;
}

constexpr const char* install_driver =
    "install NVIDIA's driver; in a container, start it with the GPUs (docker run --gpus all, with NVIDIA's container toolkit)";

/// What is known to help.
const char* way_out(int code) {
  switch (code) {
    case 34:
      return "this libcuda.so.1 is a toolkit's stub; take its folder (.../stubs) out of LD_LIBRARY_PATH";
    case 802:
      return "start nvidia-fabricmanager, of the driver's version";
    case 803:
      return "the kernel module and libcuda.so.1 are of different versions; restart the machine after an update of the driver, "
             "or "
             "take another version's libcuda.so.1 (a toolkit's compat folder) out of LD_LIBRARY_PATH";
    case 804:
      return "this libcuda.so.1 is a toolkit's compat library, which this GPU can't use; take its folder out of LD_LIBRARY_PATH";
    default:
      return "see whether nvidia-smi works; load the kernel modules nvidia and nvidia_uvm, or install the driver again";
  }
}

class Search {
 public:
  explicit Search(const char* driver_library) : library_(driver_library) {}

  Gpus run() {
    if (!open()) return std::move(gpus_);
    if (driver_.version(&gpus_.cuda_version) != success) gpus_.cuda_version = 0;
    if (const int code = driver_.init(0); code != success) return missing_by("cuInit", code);
    int count = 0;
    if (const int code = driver_.count(&count); code != success) return missing_by("cuDeviceGetCount", code);
    if (count <= 0) return missing_by("cuDeviceGetCount", no_device_code);
    for (int i = 0; i < count; ++i) gpus_.names.push_back(name_of(i));
    gpus_.state = Gpus::State::found;
    return std::move(gpus_);
  }

 private:
  bool open() {
    // Never closed: the driver keeps threads.
    void* library = dlopen(library_, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* given = dlerror();
      const std::string why = given == nullptr ? "" : given;
      // The loader says the same of a library that this one needs; then it begins with that one's name.
      const bool is_absent = why.rfind(concat(library_, ": cannot open shared object file"), 0) == 0;
      gpus_.state = is_absent ? Gpus::State::no_driver : Gpus::State::broken_driver;
      gpus_.missing = is_absent ? concat("there is no NVIDIA driver here (", library_, " is not found); ", install_driver)
                                : concat("NVIDIA's driver library can't be loaded: ", why, "; install the driver again");
      return false;
    }
    load(library, "cuGetErrorString", driver_.error_text);
    const char* lacking = !load(library, "cuInit", driver_.init)                  ? "cuInit"
                          : !load(library, "cuDriverGetVersion", driver_.version) ? "cuDriverGetVersion"
                          : !load(library, "cuDeviceGetCount", driver_.count)     ? "cuDeviceGetCount"
                          : !load(library, "cuDeviceGet", driver_.device)         ? "cuDeviceGet"
                          : !load(library, "cuDeviceGetName", driver_.name)       ? "cuDeviceGetName"
                                                                                  : nullptr;
    if (lacking == nullptr) return true;
    gpus_.state = Gpus::State::broken_driver;
    gpus_.missing = concat(library_, " is not NVIDIA's: it has no function ", lacking, "; ", install_driver);
    return false;
  }

  std::string text_of(int code) const {
    const char* text = nullptr;
    if (driver_.error_text == nullptr || driver_.error_text(code, &text) != success || text == nullptr) return {};
    return concat(" (", text, ")");
  }

  std::string name_of(int index) const {
    char name[256] = "";
    int device = 0;
    if (driver_.device(&device, index) != success || driver_.name(name, sizeof name - 1, device) != success)
      return "a GPU without a name";
    return name;
  }

  Gpus missing_by(const char* function, int code) {
    if (code != no_device_code) {
      gpus_.state = Gpus::State::broken_driver;
      gpus_.missing =
          concat("NVIDIA's driver is here but doesn't work: ", function, " gives ", code, text_of(code), "; ", way_out(code));
      return std::move(gpus_);
    }
    gpus_.state = Gpus::State::no_gpu;
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    gpus_.missing =
        visible != nullptr
            ? concat("NVIDIA's driver finds no GPU under CUDA_VISIBLE_DEVICES=\"", visible,
                     "\"; unset it, or list indices that nvidia-smi -L shows")
            : std::string(
                  "NVIDIA's driver is here, but finds no GPU; nvidia-smi -L lists what it knows. In a container, start it with "
                  "the GPUs (docker run --gpus all)");
    return std::move(gpus_);
  }

  const char* library_;
  Driver driver_;
  Gpus gpus_;
};

}  // namespace

Gpus find_gpus(const char* driver_library) { return Search(driver_library).run(); }

std::string cuda_version_text(int version) { return concat(version / 1000, ".", version % 1000 / 10); }

}  // namespace stratagem
