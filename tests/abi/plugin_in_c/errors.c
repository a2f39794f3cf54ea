/* SPDX-License-Identifier: Apache-2.0
 *
 * Errors: one allocation each, header and text together. Without memory the answer is a static error whose release does nothing,
 * so that reporting can't fail.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sequential.h"

static void release_nothing(stg_error* self) { (void)self; }

static const char out_of_memory_text[] =
    "out of memory in the plugin 'sequential'; the instance can be used again once there is some";

static stg_error out_of_memory = {
    STG_RESOURCE_EXHAUSTED,
    STG_ERROR_RETRYABLE | STG_ERROR_INSTANCE_USABLE,
    -1,
    -1,
    {STG_DEVICE_NONE, -1},
    {out_of_memory_text, sizeof out_of_memory_text - 1},
    NULL,
    release_nothing,
    NULL,
};

stg_error* seq_out_of_memory(void) { return &out_of_memory; }

static void release(stg_error* self) {
  seq_release_error(self->cause);
  free(self);
}

void seq_release_error(stg_error* error) {
  if (error != NULL) error->release(error);
}

stg_error* seq_error(uint32_t code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int size_bytes = vsnprintf(NULL, 0, format, arguments);
  va_end(arguments);
  stg_error* error = size_bytes < 0 ? NULL : malloc(sizeof *error + (size_t)size_bytes + 1);
  if (error == NULL) return seq_out_of_memory();

  char* text = (char*)(error + 1);
  va_start(arguments, format);
  vsnprintf(text, (size_t)size_bytes + 1, format, arguments);
  va_end(arguments);
  memset(error, 0, sizeof *error);
  error->code = code;
  error->flags = STG_ERROR_INSTANCE_USABLE;
  error->replica = -1;
  error->rank = -1;
  error->device.index = -1;
  error->message.data = text;
  error->message.size_bytes = (uint64_t)size_bytes;
  error->release = release;
  return error;
}

stg_error* seq_replica_error(stg_error* cause, const char* what, int32_t replica, stg_device device) {
  const int shown_bytes = cause->message.size_bytes > 4096 ? 4096 : (int)cause->message.size_bytes;
  stg_error* error = seq_error(cause->code, "%s failed on replica %d (cpu:%d): %.*s", what, (int)replica, (int)device.index,
                               shown_bytes, cause->message.data == NULL ? "" : cause->message.data);
  if (error == &out_of_memory) return cause;          /* less said, nothing lost */
  error->flags |= cause->flags & STG_ERROR_RETRYABLE; /* the rest of them is about somebody else's instance */
  error->replica = replica;
  error->device = device;
  error->cause = cause;
  return error;
}
