// SPDX-License-Identifier: Apache-2.0
//
// The transport of CUDA devices: NCCL's and CUDA's own functions behind the table of accelerator/transport.hpp.
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <time.h>

#include <chrono>
#include <thread>

#include "base/dlpack.hpp"
#include "base/host.hpp"
#include "nccl/group.hpp"
#include "torch/errors.hpp"

namespace stratagem {

struct TransportGroup {
  NcclGroup group;
};

namespace {

uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

void rest() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

constexpr NcclFunctions functions{&ncclGetUniqueId,
                                  &ncclCommInitRankConfig,
                                  &ncclGroupStart,
                                  &ncclGroupEnd,
                                  &ncclAllReduce,
                                  &ncclReduceScatter,
                                  &ncclAllGather,
                                  &ncclBroadcast,
                                  &ncclRedOpCreatePreMulSum,
                                  &ncclRedOpDestroy,
                                  &ncclCommGetAsyncError,
                                  &ncclCommFinalize,
                                  &ncclCommDestroy,
                                  &ncclCommAbort,
                                  &ncclGetErrorString,
                                  &ncclGetLastError,
                                  &cudaSetDevice,
                                  &cudaGetErrorString,
                                  &now_ns,
                                  &rest};

cudaStream_t native(c10::StreamData3 stream) {
  return c10::cuda::CUDAStream::unpack3(stream.stream_id, stream.device_index, stream.device_type).stream();
}

stg_error* open(const stg_device* devices, uint64_t num_devices, const char* settings_json, uint64_t deadline_ns,
                TransportGroup** out) {
  return guard([&] {
    const NcclSettings settings(settings_json);
    if (num_devices == 0) throw invalid_argument("a group of no devices");
    *out = new TransportGroup{{functions, {devices, devices + num_devices}, settings, deadline_ns}};
  });
}

void close(TransportGroup* group) { delete group; }
void abort(TransportGroup* group) { group->group.abort(); }
stg_error* poll(TransportGroup* group) {
  return guard([&] { group->group.poll(); });
}
stg_error* begin(TransportGroup* group) {
  return guard([&] { group->group.begin(); });
}
stg_error* end(TransportGroup* group) {
  return guard([&] { group->group.end(); });
}

stg_error* all_reduce(TransportGroup* group, uint64_t rank, const TransportBuffer* buffer, TransportFactor factor,
                      c10::StreamData3 stream) {
  return guard([&] { group->group.all_reduce(rank, *buffer, factor, native(stream)); });
}

stg_error* reduce_scatter(TransportGroup* group, uint64_t rank, const TransportBuffer* in, const TransportBuffer* out,
                          TransportFactor factor, c10::StreamData3 stream) {
  return guard([&] { group->group.reduce_scatter(rank, *in, *out, factor, native(stream)); });
}

stg_error* all_gather(TransportGroup* group, uint64_t rank, const TransportBuffer* in, const TransportBuffer* out,
                      c10::StreamData3 stream) {
  return guard([&] { group->group.all_gather(rank, *in, *out, native(stream)); });
}

stg_error* broadcast(TransportGroup* group, uint64_t rank, const TransportBuffer* buffer, uint64_t source,
                     c10::StreamData3 stream) {
  return guard([&] { group->group.broadcast(rank, *buffer, source, native(stream)); });
}

// LibTorch's name of a stream has no place for the legacy default stream's other handle, 1.
c10::cuda::CUDAStream wrapped(void* handle, c10::DeviceIndex device) {
  if (handle == nullptr || handle == cudaStreamLegacy) return c10::cuda::getDefaultCUDAStream(device);
  return c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(handle), device);
}

stg_error* wrap_stream(const stg_stream* stream, c10::StreamData3* out) {
  return guard([&] {
    check_stream(*stream, "the stream");
    const auto device = static_cast<c10::DeviceIndex>(stream->device.index);
    if (stream->device.kind != STG_DEVICE_CUDA || device < 0 || device != stream->device.index)
      throw invalid_argument("a stream of ", device_name(stream->device), " is none of a CUDA device's");
    void* handle = stream->kind == STG_STREAM_PER_THREAD_DEFAULT ? cudaStreamPerThread : stream->handle;
    *out = wrapped(handle, device).pack3();
  });
}

stg_error* native_stream(c10::StreamData3 stream, stg_stream* out) {
  return guard([&] { *out = {{STG_DEVICE_CUDA, stream.device_index}, native(stream), STG_STREAM_HANDLE, 0}; });
}

std::string name_of_nccl() {
  int version = 0;  // 22809 for 2.28.9
  ncclGetVersion(&version);
  return concat("NCCL ", version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace
}  // namespace stratagem

extern "C" __attribute__((visibility("default"))) const stratagem::TransportApi* stratagem_transport() {
  using namespace stratagem;
  initialise_torch();  // its errors are told as such
  static const std::string name = name_of_nccl();
  static const TransportApi api{
      sizeof(TransportApi), STRATAGEM_BUILD_ID, name.c_str(), &open,      &close,       &abort,        &poll, &begin, &end,
      &all_reduce,          &reduce_scatter,    &all_gather,  &broadcast, &wrap_stream, &native_stream};
  return &api;
}
