/* SPDX-License-Identifier: Apache-2.0
 *
 * What several processes or device memories would make hard, and one process on one CPU makes the identity: the same tree comes
 * back, moved on if it was moved in, as a copy if it was borrowed (an output never aliases a borrowed argument).
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "sequential.h"

/* `error` is what the caller found wrong already; the object is consumed all the same. */
static stg_error* pass(stg_strategy* self, seq_function function, const stg_call* call, stg_tree* object, stg_error* error,
                       stg_tree* out) {
  seq_batch* taken = NULL;
  stg_call time;
  stg_error* fault = seq_take_batch(object, "object", &taken);
  if (error == NULL) {
    error = fault;
  } else {
    seq_release_error(fault);
  }
  if (error == NULL && out == NULL) error = seq_error(STG_INVALID_ARGUMENT, "out is null");
  if (error == NULL) error = seq_enter(self, function, call, &time);
  if (error == NULL) {
    *out = taken->tree;
    memset(&taken->tree, 0, sizeof taken->tree);
    error = seq_leave(self, NULL);
  }
  seq_drop_batch(taken);
  return error;
}

stg_error* seq_broadcast(stg_strategy* self, const stg_call* call, stg_tree* object, int32_t src, stg_tree* out) {
  stg_error* error = NULL;
  if (src != 0) error = seq_error(STG_INVALID_ARGUMENT, "broadcast: src is %" PRId32 "; the one process here is rank 0", src);
  return pass(self, SEQ_broadcast, call, object, error, out);
}

stg_error* seq_all_gather(stg_strategy* self, const stg_call* call, stg_tree* object, stg_tree* out) {
  return pass(self, SEQ_all_gather, call, object, NULL, out);
}

stg_error* seq_to_host(stg_strategy* self, const stg_call* call, stg_tree* object, stg_tree* out) {
  return pass(self, SEQ_to_host, call, object, NULL, out);
}

stg_error* seq_batch_to_device(stg_strategy* self, const stg_call* call, const stg_transfer_args* args, stg_tree* out) {
  stg_transfer_args read;
  stg_error* error = seq_read_struct(&read, sizeof read, args, STG_TRANSFER_ARGS_MIN_SIZE, "transfer_args");
  if (error != NULL) return error;
  if (read.device.kind != STG_DEVICE_NONE && read.device.kind != STG_DEVICE_CPU) {
    error = seq_error(STG_INVALID_ARGUMENT, "transfer_args.device: kind %" PRIu32 ", but this strategy has CPU devices only",
                      read.device.kind);
  }
  return pass(self, SEQ_batch_to_device, call, read.batch, error, out);
}

stg_error* seq_reduce_boolean_decision(stg_strategy* self, const stg_call* call, uint32_t decision, uint32_t mode,
                                       uint32_t* out) {
  stg_call time;
  if (out == NULL) return seq_error(STG_INVALID_ARGUMENT, "reduce_boolean_decision: out is null");
  if (decision > 1)
    return seq_error(STG_INVALID_ARGUMENT, "reduce_boolean_decision: decision is %" PRIu32 ", not 0 or 1", decision);
  if (mode > STG_DECIDE_ANY) return seq_error(STG_INVALID_ARGUMENT, "reduce_boolean_decision: mode %" PRIu32 " is unknown", mode);
  stg_error* error = seq_enter(self, SEQ_reduce_boolean_decision, call, &time);
  if (error != NULL) return error;
  *out = decision;
  return seq_leave(self, NULL);
}

stg_error* seq_barrier(stg_strategy* self, const stg_call* call, stg_string name) {
  stg_call time;
  (void)name; /* all ranks, which is this one, have entered */
  stg_error* error = seq_enter(self, SEQ_barrier, call, &time);
  return error != NULL ? error : seq_leave(self, NULL);
}
