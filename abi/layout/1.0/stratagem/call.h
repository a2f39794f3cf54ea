/* SPDX-License-Identifier: Apache-2.0
 *
 * The call struct: when a blocking call must be back, and how its work is ordered with the caller's. A null `stg_call *` means no
 * deadline, no cancel flag, default streams.
 */
#ifndef STRATAGEM_CALL_H
#define STRATAGEM_CALL_H

#include <stratagem/error.h>
#include <stratagem/types.h>

STG_EXTERN_C_BEGIN

/* Growing.
 *
 * At its deadline a call returns STG_DEADLINE_EXCEEDED within 100 ms (time in callbacks on the calling thread apart; a reduction or
 * an update that has begun is finished first), names what it waited for, and flags the instance as usable or draining. The clock
 * is read only when about to block. */
typedef struct stg_call {
  uint64_t struct_size;
  uint64_t deadline_ns;      /* CLOCK_MONOTONIC, in nanoseconds; 0: none */
  const uint32_t *cancel;    /* borrowed; read atomically; nonzero: return STG_CANCELLED as soon as possible; null: none */
  const stg_stream *streams; /* borrowed; the caller's stream on each device where it is not the default one */
  uint64_t num_streams;
} stg_call;
#define STG_CALL_MIN_SIZE 40u
STG_ASSERT_SIZE(stg_call, 40);

STG_EXTERN_C_END
#endif
