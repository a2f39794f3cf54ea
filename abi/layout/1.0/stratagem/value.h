/* SPDX-License-Identifier: Apache-2.0
 *
 * Value trees: batches, outputs, states and broadcast objects. A tree is made of 16-byte tagged values; what comes in with a
 * structure goes out with it: a tuple stays a tuple, key order stays.
 *
 * Limits: depth at most STG_MAX_TREE_DEPTH, nodes at most STG_MAX_TREE_NODES (counted per visit, so a cycle is refused). A tensor
 * stands in a tree once; two places need two handles.
 */
#ifndef STRATAGEM_VALUE_H
#define STRATAGEM_VALUE_H

#include <stratagem/tensor.h>

STG_EXTERN_C_BEGIN

#define STG_MAX_TREE_DEPTH 64u
#define STG_MAX_TREE_NODES 1048576u

/* Types of a value, and which member of `as` holds it. */
#define STG_NONE 0u
#define STG_BOOL 1u    /* as.i64: 0 or 1 */
#define STG_INT64 2u   /* as.i64 */
#define STG_DOUBLE 3u  /* as.f64 */
#define STG_STRING 4u  /* as.utf8, `count` bytes */
#define STG_BYTES 5u   /* as.bytes, `count` bytes */
#define STG_TENSOR 6u  /* as.tensor, never null */
#define STG_LIST 7u    /* as.items, `count` values */
#define STG_TUPLE 8u   /* as.items, `count` values */
#define STG_DICT 9u    /* as.entries, `count` entries with distinct keys, in order */
#define STG_OPAQUE 10u /* as.opaque, never null */

struct stg_entry;
struct stg_opaque;

/* One value. Fixed. `count` is 0 for types that have none; `items` and `entries` may be null when it is 0. All pointers live until
 * the tree's release; the memory of items and entries is writable, so that a leaf can be taken out. */
typedef struct stg_value {
  uint32_t type;
  uint32_t count;
  union {
    int64_t i64;
    double f64;
    const char *utf8;          /* lifetime: until the tree's release */
    const uint8_t *bytes;      /* lifetime: until the tree's release */
    stg_tensor *tensor;        /* lifetime: until the tree's release, which calls its deleter */
    struct stg_value *items;   /* lifetime: until the tree's release */
    struct stg_entry *entries; /* lifetime: until the tree's release */
    struct stg_opaque *opaque; /* lifetime: until the tree's release, which calls its release */
  } as;
} stg_value;
STG_ASSERT_SIZE(stg_value, 16);

/* One entry of a dict. Fixed. */
typedef struct stg_entry {
  stg_string key; /* lifetime: until the tree's release */
  stg_value value;
} stg_entry;
STG_ASSERT_SIZE(stg_entry, 32);

/* A whole tree. Fixed.
 *
 * An owner calls `release` once; it releases every tensor and opaque still in the tree, then the tree's memory. A leaf is taken out
 * by copying its pointer and setting its slot to {STG_NONE}: then it is the taker's. A null `release` marks a borrowed view.
 *
 * A function takes a tree as `stg_tree *`. With a release it is *moved*: the callee consumes it on every return, success or error,
 * and sets the caller's struct to zeros; so releasing it again is harmless. With a null release it is borrowed for the call; an
 * output that would alias a borrowed tree is copied. */
typedef struct stg_tree {
  stg_value root;
  /* Releases what is left in the tree. [any] */
  void (*release)(struct stg_tree *self);
  void *owner; /* the maker's own; lifetime: until release */
} stg_tree;
STG_ASSERT_SIZE(stg_tree, 32);

/* An object of the host's that passes through unread: the same pointer comes back. Handed to replicas by retain, on the calling
 * thread; never copied by content, never sent to another process. Growing. */
typedef struct stg_opaque {
  uint64_t struct_size;
  stg_string type_name; /* lifetime: the object */
  /* Adds a reference. [any] */
  void (*retain)(struct stg_opaque *self);
  /* Drops a reference. [any] */
  void (*release)(struct stg_opaque *self);
  /* Merges one object per replica, in replica order, into a new one: how a metric brings its own reduction. Null: objects are
   * listed, one per replica. `objects` is borrowed; `out` is owned by the caller. [any] */
  struct stg_error *(*reduce)(struct stg_opaque *const *objects, uint64_t num_objects, struct stg_opaque **out);
} stg_opaque;
#define STG_OPAQUE_MIN_SIZE 48u
STG_ASSERT_SIZE(stg_opaque, 48);

STG_EXTERN_C_END
#endif
