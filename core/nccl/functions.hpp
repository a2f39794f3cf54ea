// SPDX-License-Identifier: Apache-2.0
//
// What of NCCL, CUDA and the clock a group calls, as pointers: so that a test can stand in for them where there is no GPU.
#pragma once

#include <nccl.h>

#include <cstdint>

namespace stratagem {

struct NcclFunctions {
  ncclResult_t (*get_unique_id)(ncclUniqueId*);
  ncclResult_t (*init_rank)(ncclComm_t*, int num_ranks, ncclUniqueId, int rank, ncclConfig_t*);
  ncclResult_t (*group_start)();
  ncclResult_t (*group_end)();
  ncclResult_t (*all_reduce)(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
  ncclResult_t (*reduce_scatter)(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
  ncclResult_t (*all_gather)(const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);
  ncclResult_t (*broadcast)(const void*, void*, size_t, ncclDataType_t, int root, ncclComm_t, cudaStream_t);
  ncclResult_t (*create_scaled_sum)(ncclRedOp_t*, void* scalar, ncclDataType_t, ncclScalarResidence_t, ncclComm_t);
  ncclResult_t (*destroy_op)(ncclRedOp_t, ncclComm_t);
  ncclResult_t (*get_async_error)(ncclComm_t, ncclResult_t*);
  ncclResult_t (*finalize)(ncclComm_t);
  ncclResult_t (*destroy)(ncclComm_t);
  ncclResult_t (*abort)(ncclComm_t);
  const char* (*error_string)(ncclResult_t);
  const char* (*last_error)(ncclComm_t);
  cudaError_t (*set_device)(int);
  const char* (*cuda_error_string)(cudaError_t);
  uint64_t (*now_ns)();  ///< CLOCK_MONOTONIC
  void (*rest)();        ///< between two looks at communicators that are busy
};

}  // namespace stratagem
