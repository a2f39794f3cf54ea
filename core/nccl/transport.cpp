// SPDX-License-Identifier: Apache-2.0
//
// The transport of CUDA devices: NCCL's and CUDA's own functions behind the table of accelerator/transport.hpp.
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "base/host.hpp"
#include "nccl/group.hpp"

namespace stratagem {

struct TransportGroup {
  NcclGroup group;
};

namespace {

constexpr NcclFunctions functions{&ncclGetUniqueId,   &ncclCommInitRankConfig, &ncclGroupStart,
                                  &ncclGroupEnd,      &ncclAllReduce,          &ncclReduceScatter,
                                  &ncclAllGather,     &ncclBroadcast,          &ncclRedOpCreatePreMulSum,
                                  &ncclRedOpDestroy,  &ncclCommGetAsyncError,  &ncclCommFinalize,
                                  &ncclCommDestroy,   &ncclCommAbort,          &ncclGetErrorString,
                                  &ncclGetLastError,  &cudaGetDevice,          &cudaSetDevice,
                                  &cudaGetErrorString};

cudaStream_t native(c10::StreamData3 stream) {
  return c10::cuda::CUDAStream::unpack3(stream.stream_id, stream.device_index, stream.device_type).stream();
}

stg_error* open(const stg_device* devices, uint64_t num_devices, const char* settings_json, uint64_t deadline_ns,
                TransportGroup** out) {
  return guard([&] {
    const NcclSettings settings(settings_json);
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

stg_error* all_reduce(TransportGroup* group, uint64_t rank, const TransportBuffer* buffer, double factor,
                      c10::StreamData3 stream) {
  return guard([&] { group->group.all_reduce(rank, *buffer, factor, native(stream)); });
}

stg_error* reduce_scatter(TransportGroup* group, uint64_t rank, const TransportBuffer* in, const TransportBuffer* out,
                          double factor, c10::StreamData3 stream) {
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

stg_error* wrap_stream(const stg_stream* stream, c10::StreamData3* out) {
  return guard([&] {
    check_stream(*stream, "the stream");
    if (stream->device.kind != STG_DEVICE_CUDA) throw invalid_argument("a stream of another kind of device than cuda");
    void* handle = stream->kind == STG_STREAM_PER_THREAD_DEFAULT ? cudaStreamPerThread : stream->handle;
    const auto device = static_cast<c10::DeviceIndex>(stream->device.index);
    *out = (handle == nullptr ? c10::cuda::getDefaultCUDAStream(device)
                              : c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(handle), device))
               .pack3();
  });
}

stg_error* native_stream(c10::StreamData3 stream, stg_stream* out) {
  return guard([&] { *out = {{STG_DEVICE_CUDA, stream.device_index}, native(stream), STG_STREAM_HANDLE, 0}; });
}

}  // namespace
}  // namespace stratagem

extern "C" __attribute__((visibility("default"))) const stratagem::TransportApi* stratagem_transport() {
  using namespace stratagem;
  static const TransportApi api{
      sizeof(TransportApi), STRATAGEM_BUILD_ID, "NCCL",      &open,      &close,       &abort,        &poll, &begin, &end,
      &all_reduce,          &reduce_scatter,    &all_gather, &broadcast, &wrap_stream, &native_stream};
  return &api;
}
