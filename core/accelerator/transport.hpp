// SPDX-License-Identifier: Apache-2.0
//
// How one kind of accelerator moves gradients between its devices, and what else of it c10's generic API doesn't have: a table of C
// functions, so that it can be in a shared object of its own, opened where there is such an accelerator. Both sides are of one build.
//
// A group is made over distinct devices of this process; rank r is the r-th of them. A collective is queued for every rank, each on a
// stream of its device, between begin and end of one thread; a mutex of the caller's sees to it that no two threads are inside a group
// at a time. Nothing here waits for a device.
#pragma once

#include <c10/core/Stream.h>
#include <stratagem/error.h>
#include <stratagem/tensor.h>
#include <stratagem/types.h>

#include <cstdint>

namespace stratagem {

struct TransportGroup;  // the transport's own

/// Contiguous elements on a rank's device: float16, bfloat16, float32 or float64.
struct TransportBuffer {
  void* data;
  int64_t numel;
  stg_dtype dtype;
};

/// What a rank's buffer counts in a sum: a number, or an element of the buffer's type in the rank's memory, which is read when the
/// collective runs and must be left alone until it has. 1 but for float32 and float64.
struct TransportFactor {
  TransportFactor(double factor) : number(factor) {}                                // NOLINT(google-explicit-constructor)
  explicit TransportFactor(const void* element) : number(1), on_device(element) {}  // not null
  double number;
  const void* on_device = nullptr;
};

/// All functions that return an error return null when all is well; the error is the caller's. They name device and operation. After
/// an error of begin, end or a collective the group can only be aborted and closed.
struct TransportApi {
  uint64_t struct_size;
  const char* build_id;  ///< STRATAGEM_BUILD_ID of the build; another one is refused
  const char* name;      ///< for messages: "NCCL 2.28.9"

  /// Makes a group. `settings_json` is an object; a key that the transport doesn't know is an error that names it and those it knows.
  /// Waits until the communicators can be used, at most to `deadline_ns` (CLOCK_MONOTONIC; 0: for ever), else gives what was not ready.
  stg_error* (*open)(const stg_device* devices, uint64_t num_devices, const char* settings_json, uint64_t deadline_ns,
                     TransportGroup** out);
  /// Ends a group whose work is done, or which was aborted.
  void (*close)(TransportGroup* group);
  /// Ends what is queued or running of the group, on every device. Any thread, more than once. The streams go on.
  void (*abort)(TransportGroup* group);
  /// What went wrong since on one of the devices. Any thread; null: nothing. Doesn't wait.
  stg_error* (*poll)(TransportGroup* group);

  stg_error* (*begin)(TransportGroup* group);
  stg_error* (*end)(TransportGroup* group);
  /// In place: the sum over the ranks of factor times the buffer.
  stg_error* (*all_reduce)(TransportGroup* group, uint64_t rank, const TransportBuffer* buffer, TransportFactor factor,
                           c10::StreamData3 stream);
  /// The rank's part (rank * out.numel elements on) of the sum over the ranks of factor times `in` (num_ranks * out.numel elements).
  stg_error* (*reduce_scatter)(TransportGroup* group, uint64_t rank, const TransportBuffer* in, const TransportBuffer* out,
                               TransportFactor factor, c10::StreamData3 stream);
  /// `out` (num_ranks * in.numel elements): the ranks' `in` one after the other.
  stg_error* (*all_gather)(TransportGroup* group, uint64_t rank, const TransportBuffer* in, const TransportBuffer* out,
                           c10::StreamData3 stream);
  /// In place: the buffer of rank `source`.
  stg_error* (*broadcast)(TransportGroup* group, uint64_t rank, const TransportBuffer* buffer, uint64_t source,
                          c10::StreamData3 stream);

  /// A host's stream as one of c10's; of a kind that it doesn't have: an error.
  stg_error* (*wrap_stream)(const stg_stream* stream, c10::StreamData3* out);
  /// And the other way round: what a host or a model takes for its handle.
  stg_error* (*native_stream)(c10::StreamData3 stream, stg_stream* out);
};

}  // namespace stratagem
