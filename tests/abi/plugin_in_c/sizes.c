/* SPDX-License-Identifier: Apache-2.0
 *
 * Growing structs: what lets a host and a plugin of different minors work together. A plugin never reads a struct of the host's
 * through its pointer beyond struct_size, so arguments are copied into a struct of the size compiled here.
 */
#include <inttypes.h>
#include <string.h>

#include "sequential.h"

static uint64_t size_of(const void* of) {
  uint64_t size_bytes;
  memcpy(&size_bytes, of, sizeof size_bytes);
  return size_bytes;
}

stg_error* seq_check_size(const void* of, uint64_t min_bytes, const char* name) {
  if (of == NULL) return seq_error(STG_INVALID_ARGUMENT, "%s is null", name);
  const uint64_t size_bytes = size_of(of);
  if (size_bytes < min_bytes) {
    return seq_error(STG_INVALID_ARGUMENT,
                     "%s.struct_size is %" PRIu64 "; the smallest ever released is %" PRIu64 ": set it to sizeof", name,
                     size_bytes, min_bytes);
  }
  if (size_bytes > STG_MAX_STRUCT_SIZE_BYTES) {
    return seq_error(STG_INVALID_ARGUMENT, "%s.struct_size is %" PRIu64 ", above the limit of %u: it looks uninitialised", name,
                     size_bytes, STG_MAX_STRUCT_SIZE_BYTES);
  }
  return NULL;
}

stg_error* seq_read_struct(void* to, uint64_t known_bytes, const void* from, uint64_t min_bytes, const char* name) {
  stg_error* error = seq_check_size(from, min_bytes, name);
  if (error != NULL) return error;
  const uint64_t size_bytes = size_of(from);
  memset(to, 0, known_bytes);
  memcpy(to, from, size_bytes < known_bytes ? size_bytes : known_bytes);
  for (uint64_t offset = known_bytes; offset < size_bytes; ++offset) {
    if (((const char*)from)[offset] != 0) {
      return seq_error(STG_UNIMPLEMENTED,
                       "%s has a value at offset %" PRIu64 ", but this plugin (ABI %u.%u) knows it up to %" PRIu64 " only", name,
                       offset, STG_ABI_MAJOR, STG_ABI_MINOR, known_bytes);
    }
  }
  return NULL;
}

void seq_write_struct(void* to, const void* from, uint64_t known_bytes) {
  uint64_t honoured_bytes = size_of(to);
  if (honoured_bytes > known_bytes) honoured_bytes = known_bytes;
  memcpy(to, from, honoured_bytes);
  memcpy(to, &honoured_bytes, sizeof honoured_bytes);
}
