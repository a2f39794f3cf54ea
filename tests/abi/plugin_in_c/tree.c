/* SPDX-License-Identifier: Apache-2.0
 *
 * Value trees. A tree made here owns its memory through an arena (a chain of blocks) and its leaves one by one: the receiver may
 * take a leaf out, so a tensor never points into its tree's arena. Slots are none (zeros) until they are filled, and counts are set first:
 * a tree that failed half-way is released like any other.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sequential.h"

typedef struct block {
  struct block* next;
  uint64_t reserved; /* keeps what follows aligned to 16 */
} block;

typedef struct arena {
  block* blocks;
} arena;

/* ---- making and releasing ---- */

void* seq_tree_alloc(stg_tree* tree, uint64_t size_bytes) {
  arena* owner = tree->owner;
  block* added = calloc(1, sizeof *added + size_bytes);
  if (added == NULL) return NULL;
  added->next = owner->blocks;
  owner->blocks = added;
  return added + 1;
}

int seq_tree_text(stg_tree* tree, stg_value* to, const char* text, uint64_t size_bytes) {
  char* copy = seq_tree_alloc(tree, size_bytes + 1);
  if (copy == NULL) return 0;
  if (size_bytes > 0) memcpy(copy, text, size_bytes);
  to->as.utf8 = copy;
  to->count = (uint32_t)size_bytes;
  to->type = STG_STRING;
  return 1;
}

static void release_leaves(stg_value* value) {
  if (value->type == STG_TENSOR) seq_release_tensor(value->as.tensor);
  if (value->type == STG_OPAQUE) value->as.opaque->release(value->as.opaque);
  for (uint32_t i = 0; (value->type == STG_LIST || value->type == STG_TUPLE) && i < value->count; ++i) {
    release_leaves(&value->as.items[i]);
  }
  for (uint32_t i = 0; value->type == STG_DICT && i < value->count; ++i) release_leaves(&value->as.entries[i].value);
}

static void release_own_tree(stg_tree* self) {
  arena* owner = self->owner;
  release_leaves(&self->root);
  while (owner->blocks != NULL) {
    block* next = owner->blocks->next;
    free(owner->blocks);
    owner->blocks = next;
  }
  free(owner);
  memset(self, 0, sizeof *self);
}

stg_error* seq_new_tree(stg_tree* out) {
  arena* owner = calloc(1, sizeof *owner);
  if (owner == NULL) return seq_out_of_memory();
  memset(out, 0, sizeof *out);
  out->release = release_own_tree;
  out->owner = owner;
  return NULL;
}

void seq_release_tree(stg_tree* tree) {
  if (tree->release != NULL) tree->release(tree);
  memset(tree, 0, sizeof *tree);
}

/* ---- batches that several shares read ---- */

void seq_hold_batch(seq_batch* batch) { __atomic_add_fetch(&batch->references, 1, __ATOMIC_RELAXED); }

void seq_drop_batch(seq_batch* batch) {
  if (batch == NULL || __atomic_sub_fetch(&batch->references, 1, __ATOMIC_ACQ_REL) > 0) return;
  seq_release_tree(&batch->tree);
  free(batch);
}

/* ---- paths ---- */

const char* seq_path_text(const seq_path* path, char* text, uint64_t capacity_bytes) {
  if (path == NULL || path->parent == NULL) {
    snprintf(text, capacity_bytes, "the root");
    return text;
  }
  const uint64_t used = path->parent->parent == NULL ? 0 : strlen(seq_path_text(path->parent, text, capacity_bytes));
  char* end = text + used;
  if (path->key.data == NULL) {
    snprintf(end, capacity_bytes - used, "[%" PRIu64 "]", path->index);
  } else {
    const int size_bytes = path->key.size_bytes > 100 ? 100 : (int)path->key.size_bytes;
    snprintf(end, capacity_bytes - used, used == 0 ? "%.*s" : ".%.*s", size_bytes, path->key.data);
  }
  return text;
}

int seq_same_text(stg_string a, stg_string b) {
  return a.size_bytes == b.size_bytes && (a.size_bytes == 0 || memcmp(a.data, b.data, a.size_bytes) == 0);
}

/* ---- checking what came in ---- */

typedef struct check {
  const char* name;
  uint64_t num_nodes;
  stg_error* error;
} check;

static void complain(check* state, const seq_path* path, const char* fault) {
  char text[512];
  if (state->error != NULL) return;
  state->error = seq_error(STG_INVALID_ARGUMENT, "%s: %s has %s", state->name, seq_path_text(path, text, sizeof text), fault);
}

static void check_value(check* state, const stg_value* value, const seq_path* path, uint32_t depth) {
  if (depth > STG_MAX_TREE_DEPTH) complain(state, path, "a depth above 64");
  if (++state->num_nodes > STG_MAX_TREE_NODES) complain(state, path, "the node number 1048577; a tree can have 1048576");
  if (value->type > STG_OPAQUE) complain(state, path, "an unknown type of value");
  if (state->error != NULL) return;
  if (value->type == STG_BOOL && value->as.i64 != 0 && value->as.i64 != 1) complain(state, path, "a bool that is not 0 or 1");
  if (value->type == STG_TENSOR && seq_tensor_fault(value->as.tensor) != NULL) {
    complain(state, path, seq_tensor_fault(value->as.tensor));
  }
  if (value->type == STG_OPAQUE) {
    const stg_opaque* opaque = value->as.opaque;
    if (opaque == NULL || opaque->struct_size < STG_OPAQUE_MIN_SIZE || !opaque->retain || !opaque->release) {
      complain(state, path, "an opaque value without retain and release");
    }
  }
  if (value->type >= STG_STRING && value->type != STG_TENSOR && value->type != STG_OPAQUE && value->count > 0 &&
      value->as.items == NULL) {
    complain(state, path, "a count but a null pointer");
    return;
  }
  for (uint32_t i = 0; value->type == STG_DICT && i < value->count && state->error == NULL; ++i) {
    const seq_path child = {path, value->as.entries[i].key, i};
    if (child.key.data == NULL && child.key.size_bytes > 0) complain(state, path, "a key without text");
    for (uint32_t before = 0; before < i && state->error == NULL; ++before) {
      if (seq_same_text(value->as.entries[before].key, child.key)) complain(state, &child, "a key that is there twice");
    }
    check_value(state, &value->as.entries[i].value, &child, depth + 1);
  }
  for (uint32_t i = 0; (value->type == STG_LIST || value->type == STG_TUPLE) && i < value->count && state->error == NULL; ++i) {
    const seq_path child = {path, {NULL, 0}, i};
    check_value(state, &value->as.items[i], &child, depth + 1);
  }
}

stg_error* seq_check_tree(const stg_value* root, const char* name) {
  const seq_path path = {NULL, {NULL, 0}, 0};
  check state = {name, 0, NULL};
  check_value(&state, root, &path, 1);
  return state.error;
}

stg_error* seq_take_batch(stg_tree* tree, const char* name, seq_batch** out) {
  if (tree == NULL) return seq_error(STG_INVALID_ARGUMENT, "%s is null", name);
  stg_tree taken = *tree;
  const int is_moved = taken.release != NULL;
  if (is_moved) memset(tree, 0, sizeof *tree);

  stg_error* error = seq_check_tree(&taken.root, name);
  seq_batch* batch = error == NULL ? calloc(1, sizeof *batch) : NULL;
  if (error == NULL && batch == NULL) error = seq_out_of_memory();
  if (error == NULL && !is_moved) error = seq_copy_tree(&taken.root, &batch->tree);
  if (error != NULL) {
    free(batch);
    if (is_moved) seq_release_tree(&taken);
    return error;
  }
  if (is_moved) batch->tree = taken;
  batch->references = 1;
  *out = batch;
  return NULL;
}

/* ---- copying ---- */

/* Text and structure are the copy's own; tensors are what `make` gives for each. */
static int copy_value(stg_tree* tree, stg_value* to, const stg_value* from, seq_make_tensor make, void* context) {
  if (from->type == STG_TENSOR) {
    to->as.tensor = make(from->as.tensor, context);
    if (to->as.tensor == NULL) return 0;
  } else if (from->type == STG_OPAQUE) {
    to->as.opaque = from->as.opaque;
    to->as.opaque->retain(to->as.opaque);
  } else if (from->type == STG_STRING || from->type == STG_BYTES) {
    if (!seq_tree_text(tree, to, from->as.utf8, from->count)) return 0;
  } else if (from->type == STG_LIST || from->type == STG_TUPLE) {
    to->as.items = seq_tree_alloc(tree, from->count * sizeof(stg_value));
    if (to->as.items == NULL) return 0;
    to->type = from->type;
    to->count = from->count;
    for (uint32_t at = 0; at < to->count; ++at) {
      if (!copy_value(tree, &to->as.items[at], &from->as.items[at], make, context)) return 0;
    }
  } else if (from->type == STG_DICT) {
    to->as.entries = seq_tree_alloc(tree, from->count * sizeof(stg_entry));
    if (to->as.entries == NULL) return 0;
    to->type = from->type;
    to->count = from->count;
    for (uint32_t at = 0; at < to->count; ++at) {
      const stg_entry* entry = &from->as.entries[at];
      stg_entry* copy = &to->as.entries[at];
      stg_value key = {STG_NONE, 0, {0}};
      if (!seq_tree_text(tree, &key, entry->key.data, entry->key.size_bytes)) return 0;
      copy->key.data = key.as.utf8;
      copy->key.size_bytes = key.count;
      if (!copy_value(tree, &copy->value, &entry->value, make, context)) return 0;
    }
  } else {
    to->as = from->as;
  }
  to->type = from->type;
  to->count = from->count;
  return 1;
}

stg_error* seq_map_tree(const stg_value* root, seq_make_tensor make, void* context, stg_tree* out) {
  stg_error* error = seq_new_tree(out);
  if (error != NULL) return error;
  if (copy_value(out, &out->root, root, make, context)) return NULL;
  seq_release_tree(out);
  return seq_out_of_memory();
}

static stg_tensor* copy_tensor(const stg_tensor* from, void* context) {
  (void)context;
  return seq_copy_tensor(&from->view);
}

stg_error* seq_copy_tree(const stg_value* root, stg_tree* out) { return seq_map_tree(root, copy_tensor, NULL, out); }

/* ---- finding ---- */

const stg_value* seq_find(const stg_value* dict, const char* key) {
  const stg_string wanted = {key, strlen(key)};
  for (uint32_t i = 0; dict != NULL && dict->type == STG_DICT && i < dict->count; ++i) {
    if (seq_same_text(dict->as.entries[i].key, wanted)) return &dict->as.entries[i].value;
  }
  return NULL;
}
