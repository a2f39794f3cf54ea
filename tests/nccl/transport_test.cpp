// SPDX-License-Identifier: Apache-2.0
//
// The transport's own file, with the real CUDA and NCCL: what of it needs no GPU, and what it says without one.
#include "accelerator/transport.hpp"

#include <dlfcn.h>

#include <regex>

#include "base/error.hpp"
#include "base/gpu.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using Catch::Contains;

namespace {

const TransportApi& transport() {
  static const TransportApi* api = [] {
    void* library = dlopen(TRANSPORT, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    return reinterpret_cast<const TransportApi* (*)()>(dlsym(library, "stratagem_transport"))();
  }();
  return *api;
}

std::string message_of(stg_error* error) {
  if (error == nullptr) return "no error";
  const ErrorPtr owner(error);
  return error->message.data;
}

std::string open(const std::vector<stg_device>& devices, const char* settings) {
  TransportGroup* group = nullptr;
  const std::string message = message_of(transport().open(devices.data(), devices.size(), settings, 0, &group));
  CHECK(group == nullptr);
  return message;
}

c10::StreamData3 wrap(const stg_stream& stream) {
  c10::StreamData3 wrapped{};
  check(transport().wrap_stream(&stream, &wrapped));
  return wrapped;
}

}  // namespace

TEST_CASE("The transport is of this build, and named for NCCL's version") {
  CHECK(transport().struct_size == sizeof(TransportApi));
  CHECK(std::string(transport().build_id) == STRATAGEM_BUILD_ID);
  CHECK(std::regex_match(transport().name, std::regex("NCCL 2\\.[0-9]+\\.[0-9]+")));
}

TEST_CASE("Devices that don't exist are told with CUDA's own text, and settings before them") {
  const std::vector<stg_device> devices{{STG_DEVICE_CUDA, 9998}, {STG_DEVICE_CUDA, 9999}};
  CHECK_THAT(open(devices, "{}"),
             Contains("rank 0 on cuda:9998: cudaSetDevice: ") &&
                 Contains(find_gpus().missing.empty() ? "invalid device" : "CUDA driver version is insufficient"));
  CHECK_THAT(open(devices, R"({"ctas": 1})"), Contains("/options/nccl/ctas is unknown"));
  CHECK_THAT(open({}, "{}"), Contains("no devices"));
}

TEST_CASE("A host's stream is wrapped as one of LibTorch's, and given back as it was") {
  int place = 0;
  stg_stream stream{{STG_DEVICE_CUDA, 3}, &place, STG_STREAM_HANDLE, 0};
  const c10::StreamData3 wrapped = wrap(stream);
  CHECK(wrapped.device_index == 3);
  CHECK(wrapped.device_type == c10::DeviceType::CUDA);
  CHECK(wrapped.stream_id == static_cast<c10::StreamId>(reinterpret_cast<intptr_t>(&place)));
  stg_stream of_thread = stream;
  of_thread.kind = STG_STREAM_PER_THREAD_DEFAULT;
  CHECK(wrap(of_thread).stream_id == 2);  // CUDA's handle for it
  if (!find_gpus().missing.empty()) return;
  stream.device.index = 0;
  stg_stream back{};
  check(transport().native_stream(wrap(stream), &back));
  CHECK(back.handle == &place);
  CHECK(back.device.kind == STG_DEVICE_CUDA);
  CHECK(back.device.index == 0);
  CHECK(back.kind == STG_STREAM_HANDLE);
}

TEST_CASE("Both handles of the legacy default stream are that stream") {
  for (const uintptr_t handle : {0, 1}) {
    const stg_stream stream{{STG_DEVICE_CUDA, 0}, reinterpret_cast<void*>(handle), STG_STREAM_HANDLE, 0};
    if (find_gpus().missing.empty()) {
      CHECK(wrap(stream).stream_id == 0);
    } else {  // LibTorch counts devices for this stream, as for no other
      c10::StreamData3 wrapped{};
      const std::string message = message_of(transport().wrap_stream(&stream, &wrapped));
      CHECK(message != "no error");
      CHECK_THAT(message, !Contains("Exception raised from"));  // a backtrace
    }
  }
}

TEST_CASE("A stream of another device, or of none, is refused") {
  c10::StreamData3 wrapped{};
  for (const stg_device device : {stg_device{STG_DEVICE_CPU, 0}, {STG_DEVICE_CUDA, 300}, {STG_DEVICE_CUDA, -1}}) {
    const stg_stream stream{device, &wrapped, STG_STREAM_HANDLE, 0};
    CHECK_THAT(message_of(transport().wrap_stream(&stream, &wrapped)), Contains("none of a CUDA device's"));
  }
  const stg_stream stream{{STG_DEVICE_CUDA, 0}, &wrapped, 7, 0};
  CHECK_THAT(message_of(transport().wrap_stream(&stream, &wrapped)), Contains("kind is 7"));
}
