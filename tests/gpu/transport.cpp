// SPDX-License-Identifier: Apache-2.0
#include "gpu/transport.hpp"

#include <dlfcn.h>

#include "base/error.hpp"
#include "support/beside.hpp"

namespace stratagem::test {

const TransportApi& cuda_transport() {
  static const TransportApi* api = [] {
    void* library = dlopen(beside("libstratagem_cuda.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw Error{STG_UNAVAILABLE, dlerror()};
    return reinterpret_cast<const TransportApi* (*)()>(dlsym(library, "stratagem_transport"))();
  }();
  return *api;
}

stg_stream abi_stream(const c10::Stream& stream) {
  stg_stream out{};
  check(cuda_transport().native_stream(stream.pack3(), &out));
  return out;
}

}  // namespace stratagem::test
