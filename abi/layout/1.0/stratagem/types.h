/* SPDX-License-Identifier: Apache-2.0
 *
 * Strings, devices and streams: the fixed structs that all others are made of.
 */
#ifndef STRATAGEM_TYPES_H
#define STRATAGEM_TYPES_H

#include <stratagem/common.h>

STG_EXTERN_C_BEGIN

/* UTF-8 text. Not NUL-terminated; `data` may be null when `size_bytes` is 0. Borrowed; a string that a getter returns lives as long
 * as the object it was read from. */
typedef struct stg_string {
  const char *data;    /* lifetime: that of the object it was read from, or of the call */
  uint64_t size_bytes; /* without any terminator */
} stg_string;
STG_ASSERT_SIZE(stg_string, 16);

/* Device kinds: DLPack's codes, so that a tensor's device needs no translation. */
#define STG_DEVICE_NONE 0u
#define STG_DEVICE_CPU 1u
#define STG_DEVICE_CUDA 2u
#define STG_DEVICE_CUDA_HOST 3u  /* pinned host memory; only in tensors */
#define STG_DEVICE_EXTENSION 12u /* LibTorch's PrivateUse1 */

/* A device. {STG_DEVICE_NONE, -1} means none.
 * Logical CPU devices (cpu:0, cpu:1, ...) are replicas on one CPU; a *tensor* on any of them says {STG_DEVICE_CPU, 0}. */
typedef struct stg_device {
  uint32_t kind;
  int32_t index;
} stg_device;
STG_ASSERT_SIZE(stg_device, 8);

/* How `handle` of a stream is read. */
#define STG_STREAM_HANDLE 0u             /* as it stands; null is the legacy default stream */
#define STG_STREAM_PER_THREAD_DEFAULT 1u /* the calling thread's default stream; `handle` is ignored */

/* The stream on which a caller has queued, or will queue, its own work on a device. A CPU has none. */
typedef struct stg_stream {
  stg_device device;
  void *handle; /* lifetime: the call; for CUDA a cudaStream_t */
  uint32_t kind;
  uint32_t reserved; /* 0 */
} stg_stream;
STG_ASSERT_SIZE(stg_stream, 24);

STG_EXTERN_C_END
#endif
