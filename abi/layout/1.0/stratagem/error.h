/* SPDX-License-Identifier: Apache-2.0
 *
 * Errors. A function that can fail returns `stg_error *`: null is success. On failure its outputs are untouched. Functions that
 * release or destroy return nothing and cannot fail.
 *
 * The struct is public and brings its own release, so that hosts, models and plugins in any language make errors of their own; an
 * error that came from another party becomes the `cause` of the one that reports it.
 */
#ifndef STRATAGEM_ERROR_H
#define STRATAGEM_ERROR_H

#include <stratagem/types.h>

STG_EXTERN_C_BEGIN

/* Codes: those of gRPC and Abseil, with their meanings. */
#define STG_OK 0u
#define STG_CANCELLED 1u
#define STG_UNKNOWN 2u
#define STG_INVALID_ARGUMENT 3u
#define STG_DEADLINE_EXCEEDED 4u
#define STG_NOT_FOUND 5u
#define STG_ALREADY_EXISTS 6u
#define STG_PERMISSION_DENIED 7u
#define STG_RESOURCE_EXHAUSTED 8u  /* out of memory, on the host or a device; a full disk */
#define STG_FAILED_PRECONDITION 9u /* the call is not legal in this state, or from this thread */
#define STG_ABORTED 10u
#define STG_OUT_OF_RANGE 11u
#define STG_UNIMPLEMENTED 12u
#define STG_INTERNAL 13u
#define STG_UNAVAILABLE 14u
#define STG_DATA_LOSS 15u /* a truncated or damaged file */
#define STG_UNAUTHENTICATED 16u

/* Flags: what the caller can do next. */
#define STG_ERROR_RETRYABLE 1u         /* the same call may succeed later */
#define STG_ERROR_INSTANCE_USABLE 2u   /* the instance takes further calls */
#define STG_ERROR_INSTANCE_DRAINING 4u /* only abort and destroy are legal now */

/* One error. Fixed. */
typedef struct stg_error {
  uint32_t code; /* one of the codes above, never STG_OK */
  uint32_t flags;
  int32_t replica;         /* -1 if none */
  int32_t rank;            /* -1 if none */
  stg_device device;       /* {STG_DEVICE_NONE, -1} if none */
  stg_string message;      /* lifetime: the error; what was wrong, where, and what would be right */
  struct stg_error *cause; /* owned by this error, null if none; lifetime: the error */
  /* Releases the error and its causes. Called once, by the receiver, on any thread. Never null. [any] */
  void (*release)(struct stg_error *self);
  void *owner; /* the maker's own; lifetime: the error */
} stg_error;
STG_ASSERT_SIZE(stg_error, 64);

STG_EXTERN_C_END
#endif
