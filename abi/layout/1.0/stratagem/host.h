/* SPDX-License-Identifier: Apache-2.0
 *
 * What a host offers to plugins: log, progress, trace, memory, checkpoint storage. Every function may be absent, and the whole table
 * too. The table stays valid until the last object that was made with it is released; a plugin that keeps it calls `retain`.
 */
#ifndef STRATAGEM_HOST_H
#define STRATAGEM_HOST_H

#include <stratagem/error.h>
#include <stratagem/value.h>

STG_EXTERN_C_BEGIN

/* Levels of a log message. */
#define STG_LOG_DEBUG 1u
#define STG_LOG_INFO 2u
#define STG_LOG_WARNING 3u
#define STG_LOG_ERROR 4u

/* A checkpoint storage. A checkpoint is a folder of files, written in one transaction: nobody sees it before commit. Paths are UTF-8
 * with '/', relative to whatever the storage calls its root. Growing; a function table. */
typedef struct stg_storage {
  uint64_t struct_size;
  void *self; /* lifetime: until the host table's release */
  /* Begins the folder `path` under a temporary name. `transaction` is consumed by commit or rollback. [any] */
  stg_error *(*begin)(void *self, stg_string path, void **transaction);
  /* Writes `size_bytes` at `offset_bytes` of the file `name` in the folder of the `transaction`, borrowed. `data` is borrowed. [any] */
  stg_error *(*write)(void *self, void *transaction, stg_string name, uint64_t offset_bytes, const void *data,
                      uint64_t size_bytes);
  /* Makes the folder durable and visible under its path; replaces one of that name. Consumes the `transaction` on every return; on an
   * error the folder that was there before is untouched. [any] */
  stg_error *(*commit)(void *self, void *transaction);
  /* Drops what the `transaction` wrote, and consumes it. [any] */
  void (*rollback)(void *self, void *transaction);
  /* Opens the file `path` for reading. `file` is released by close. STG_NOT_FOUND if there is none. [any] */
  stg_error *(*open)(void *self, stg_string path, void **file, uint64_t *size_bytes);
  /* Reads exactly `size_bytes` from `offset_bytes` of `file` into `data`, both borrowed; STG_DATA_LOSS if the file is shorter. [any] */
  stg_error *(*read)(void *self, void *file, uint64_t offset_bytes, void *data, uint64_t size_bytes);
  /* Closes a `file` that open gave, and consumes it. [any] */
  void (*close)(void *self, void *file);
  /* What is directly inside the folder `path`: `names` is a list of strings, owned by the caller. [any] */
  stg_error *(*list)(void *self, stg_string path, stg_tree *names);
  /* Removes a file or a folder with all that is in it; nothing there is no error. [any] */
  stg_error *(*remove)(void *self, stg_string path);
  /* Replaces a small file as a whole, atomically and durably. `data` is borrowed. [any] */
  stg_error *(*replace)(void *self, stg_string path, const void *data, uint64_t size_bytes);
} stg_storage;
#define STG_STORAGE_MIN_SIZE 96u
STG_ASSERT_SIZE(stg_storage, 96);

/* The services. Growing; a function table. With STG_CREATE_CALLER_THREAD_ONLY every function here is called only on the thread
 * that is inside a call of the instance. */
typedef struct stg_host {
  uint64_t struct_size;
  void *self; /* lifetime: until release */
  /* Adds a reference to the table and `self`. Null with a null `release`: both outlive every plugin object. [any] */
  void (*retain)(void *self);
  /* Drops a reference. [any] */
  void (*release)(void *self);
  /* One message: level, UTF-8 text, and fields (a borrowed dict of plain values, null if none). [any] */
  void (*log)(void *self, uint32_t level, stg_string message, const stg_tree *fields);
  /* `done` of `total` units (0: unknown) of a long piece of work, such as saving. `what` is borrowed. [any] */
  void (*progress)(void *self, stg_string what, uint64_t done, uint64_t total);
  /* A phase ("forward", "backward", "reduce", "update", ...) begins on a replica. `phase` is borrowed. [any] */
  void (*trace_begin)(void *self, stg_string phase, int32_t replica);
  /* The phase ends. [any] */
  void (*trace_end)(void *self, stg_string phase, int32_t replica);
  /* Host memory of `size_bytes`, aligned to `alignment_bytes` (a power of two); null if there is none. The result
   * is the caller's, released by deallocate. [any] */
  void *(*allocate)(void *self, uint64_t size_bytes, uint64_t alignment_bytes);
  /* Consumes `memory` that allocate gave. [any] */
  void (*deallocate)(void *self, void *memory, uint64_t size_bytes);
  const stg_storage *storage; /* null: safetensors files on the local disk; lifetime: as this table */
} stg_host;
#define STG_HOST_MIN_SIZE 88u
STG_ASSERT_SIZE(stg_host, 88);

STG_EXTERN_C_END
#endif
