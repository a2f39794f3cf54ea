/* SPDX-License-Identifier: Apache-2.0
 *
 * Value trees (rules E1 and E3): their limits, and that what comes in comes out. All are borrowed and given to broadcast.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "conformance/checks/check.h"

static stg_error* pass(const session* s, const stg_value* root, stg_tree* out) {
  stg_tree tree;
  memset(&tree, 0, sizeof tree);
  memset(out, 0, sizeof *out);
  tree.root = *root;
  return the_host.api->broadcast(s->strategy, NULL, &tree, 0, out);
}

/* A list in a list in a list: `depth` values above one another. */
static void nest(stg_value* values, uint32_t depth) {
  memset(values, 0, depth * sizeof *values);
  for (uint32_t i = 0; i + 1 < depth; ++i) {
    values[i].type = i % 2 == 0 ? STG_LIST : STG_TUPLE;
    values[i].count = 1;
    values[i].as.items = &values[i + 1];
  }
}

static void depth_has_a_limit(void) {
  session s;
  stg_tree out;
  stg_value values[STG_MAX_TREE_DEPTH + 1];
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  nest(values, STG_MAX_TREE_DEPTH);
  if (SUCCEEDS(pass(&s, values, &out))) release_tree(&out);
  nest(values, STG_MAX_TREE_DEPTH + 1);
  FAILS(pass(&s, values, &out), STG_INVALID_ARGUMENT, "64");
  close_session(&s);
}

static void nodes_have_a_limit(void) {
  session s;
  stg_tree out;
  stg_value root;
  stg_value* items = calloc(STG_MAX_TREE_NODES, sizeof *items);
  if (items == NULL || !open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  memset(&root, 0, sizeof root);
  root.type = STG_LIST;
  root.as.items = items;
  root.count = STG_MAX_TREE_NODES - 1; /* and the list itself */
  if (SUCCEEDS(pass(&s, &root, &out))) {
    CHECK_THAT(out.root.count == STG_MAX_TREE_NODES - 1, "all come back: %u", out.root.count);
    release_tree(&out);
  }
  root.count = STG_MAX_TREE_NODES;
  FAILS(pass(&s, &root, &out), STG_INVALID_ARGUMENT, "1048576");
  free(items);
  close_session(&s);
}

static void null_pointers_are_refused(void) {
  static const uint32_t types[] = {STG_STRING, STG_BYTES, STG_TENSOR, STG_LIST, STG_TUPLE, STG_DICT, STG_OPAQUE};
  session s;
  stg_tree out;
  stg_value items[2], root;
  stg_entry entry;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  for (size_t i = 0; i < sizeof types / sizeof *types; ++i) {
    memset(items, 0, sizeof items);
    memset(&root, 0, sizeof root);
    items[1].type = types[i];
    items[1].count = types[i] == STG_TENSOR || types[i] == STG_OPAQUE ? 0 : 3;
    root.type = STG_LIST;
    root.count = 2;
    root.as.items = items;
    FAILS(pass(&s, &root, &out), STG_INVALID_ARGUMENT, "[1]");
  }
  memset(&entry, 0, sizeof entry);
  entry.key.size_bytes = 5;
  root.type = STG_DICT;
  root.count = 1;
  root.as.entries = &entry;
  FAILS(pass(&s, &root, &out), STG_INVALID_ARGUMENT, NULL);
  close_session(&s);
}

/* ---- what comes in comes out ---- */

static int same_text(stg_string a, stg_string b) {
  return a.size_bytes == b.size_bytes && (a.size_bytes == 0 || memcmp(a.data, b.data, a.size_bytes) == 0);
}

static int is_same(const stg_value* a, const stg_value* b) {
  if (a->type != b->type || a->count != b->count) return 0;
  switch (a->type) {
    case STG_BOOL:
    case STG_INT64:
    case STG_DOUBLE: /* bit for bit: a NaN, too */
      return a->as.i64 == b->as.i64;
    case STG_STRING:
    case STG_BYTES:
      return a->count == 0 || memcmp(a->as.bytes, b->as.bytes, a->count) == 0;
    case STG_LIST:
    case STG_TUPLE:
      for (uint32_t i = 0; i < a->count; ++i) {
        if (!is_same(&a->as.items[i], &b->as.items[i])) return 0;
      }
      return 1;
    case STG_DICT:
      for (uint32_t i = 0; i < a->count; ++i) {
        if (!same_text(a->as.entries[i].key, b->as.entries[i].key)) return 0;
        if (!is_same(&a->as.entries[i].value, &b->as.entries[i].value)) return 0;
      }
      return 1;
    default:
      return a->type == STG_NONE;
  }
}

static stg_value of_int(uint32_t type, int64_t number) {
  stg_value value;
  memset(&value, 0, sizeof value);
  value.type = type;
  value.as.i64 = number;
  return value;
}

static stg_value of_bytes(uint32_t type, const char* bytes, uint32_t count) {
  stg_value value = of_int(type, 0);
  value.count = count;
  value.as.utf8 = bytes;
  return value;
}

static stg_value of_double(double number) {
  stg_value value = of_int(STG_DOUBLE, 0);
  value.as.f64 = number;
  return value;
}

static stg_value of_items(uint32_t type, stg_value* items, uint32_t count) {
  stg_value value = of_int(type, 0);
  value.count = count;
  value.as.items = items;
  return value;
}

static void structure_is_kept(void) {
  static const char* const keys[] = {"zeta", "alpha", "", "\xc3\xa4\xe2\x82\xac", "with\0nul", "last"};
  static const uint64_t key_bytes[] = {4, 5, 0, 5, 8, 4};
  session s;
  stg_tree out;
  stg_entry entries[6];
  stg_value root = of_int(STG_DICT, 0);
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  stg_value numbers[] = {of_int(STG_BOOL, 1), of_int(STG_INT64, INT64_MIN), of_int(STG_INT64, INT64_MAX), of_double(-0.0),
                         of_double(NAN),      of_double(INFINITY),          of_int(STG_NONE, 0)};
  stg_value texts[] = {of_bytes(STG_STRING, "", 0), of_bytes(STG_STRING, NULL, 0), of_bytes(STG_STRING, "a\0b", 3),
                       of_bytes(STG_BYTES, "\xff\0\xfe", 3)};
  stg_value inner[] = {of_items(STG_TUPLE, numbers, 7), of_items(STG_LIST, NULL, 0)};
  const stg_value values[] = {of_items(STG_TUPLE, numbers, 7), of_items(STG_LIST, texts, 4), of_items(STG_TUPLE, NULL, 0),
                              of_items(STG_LIST, inner, 2),    of_items(STG_DICT, NULL, 0),  of_int(STG_NONE, 0)};
  for (int i = 0; i < 6; ++i) {
    entries[i].key.data = keys[i];
    entries[i].key.size_bytes = key_bytes[i];
    entries[i].value = values[i];
  }
  root.count = 6;
  root.as.entries = entries;
  if (SUCCEEDS(pass(&s, &root, &out))) {
    CHECK_THAT(out.root.type == STG_DICT && out.root.count == 6, "the dict comes back with its 6 keys");
    for (uint32_t i = 0; i < 6 && out.root.type == STG_DICT && i < out.root.count; ++i) {
      CHECK_THAT(same_text(out.root.as.entries[i].key, entries[i].key), "key %u is where it was", i);
      CHECK_THAT(is_same(&out.root.as.entries[i].value, &entries[i].value), "value %u is as it was: type %u, count %u", i,
                 out.root.as.entries[i].value.type, out.root.as.entries[i].value.count);
      CHECK_THAT(out.root.as.entries[i].key.size_bytes == 0 || out.root.as.entries[i].key.data != keys[i],
                 "the copy's keys are its own");
    }
    release_tree(&out);
  }
  close_session(&s);
}

DEFINE_CHECKS(tree_checks,
              {"tree-depth-limit", "A tree of depth 64 is taken, one of 65 refused, with the limit", "E1",
               NEEDS_STRATEGY | IS_ONCE, depth_has_a_limit},
              {"tree-node-limit", "A tree of 1048576 nodes is taken, one more refused, with the limit", "E1",
               NEEDS_STRATEGY | IS_ONCE, nodes_have_a_limit},
              {"tree-null-pointers-refused",
               "A null pointer with a count, a null tensor, a null opaque value and a null key are refused by their place", "E1",
               NEEDS_STRATEGY | IS_ONCE, null_pointers_are_refused},
              {"tree-structure-kept",
               "Tuples, lists, empty ones, the order of keys, texts with NULs, NaN, -0 and the largest integers come back as "
               "they were, in memory of their own",
               "E3", NEEDS_STRATEGY | IS_ONCE, structure_is_kept});
