/* SPDX-License-Identifier: Apache-2.0
 *
 * Values that can't be: memory of another device, bools of 2, keys that are there twice, streams of an unknown kind. Each is refused
 * with the value and the place, by every function that takes such a thing.
 */
#include <stdio.h>
#include <string.h>

#include "conformance/checks/check.h"

/* ---- every function that takes a tree ---- */

typedef struct given {
  session* s;
  stg_tree* tree;
  stg_tree out;
  stg_step_args step;
  stg_step_result result;
  stg_transfer_args transfer;
} given;

static stg_error* give_broadcast(given* g) { return the_host.api->broadcast(g->s->strategy, NULL, g->tree, 0, &g->out); }
static stg_error* give_all_gather(given* g) { return the_host.api->all_gather(g->s->strategy, NULL, g->tree, &g->out); }
static stg_error* give_reduce(given* g) { return the_host.api->reduce(g->s->strategy, NULL, g->tree, STG_REDUCE_MEAN, &g->out); }
static stg_error* give_to_host(given* g) { return the_host.api->to_host(g->s->strategy, NULL, g->tree, &g->out); }
static stg_error* give_to_device(given* g) { return the_host.api->batch_to_device(g->s->strategy, NULL, &g->transfer, &g->out); }
static stg_error* give_training(given* g) { return the_host.api->training_step(g->s->strategy, NULL, &g->step, &g->result); }
static stg_error* give_train(given* g) { return the_host.api->train_batch(g->s->strategy, NULL, &g->step, &g->result, NULL); }
static stg_error* give_validation(given* g) { return the_host.api->validation_step(g->s->strategy, NULL, &g->step, &g->result); }
static stg_error* give_test(given* g) { return the_host.api->test_step(g->s->strategy, NULL, &g->step, &g->result); }
static stg_error* give_predict(given* g) { return the_host.api->predict_step(g->s->strategy, NULL, &g->step, &g->result); }

static const struct {
  const char* name;
  stg_error* (*give)(given* g);
} takers[] = {
    {"broadcast", give_broadcast},  {"all_gather", give_all_gather},      {"reduce", give_reduce},
    {"to_host", give_to_host},      {"batch_to_device", give_to_device},  {"training_step", give_training},
    {"train_batch", give_train},    {"validation_step", give_validation}, {"test_step", give_test},
    {"predict_step", give_predict},
};

/* Gives the borrowed `tree` to each; all must refuse it and say `part`. */
static void check_refused_by_all(session* s, stg_tree* tree, const char* part) {
  for (uint64_t i = 0; i < sizeof takers / sizeof *takers; ++i) {
    given g;
    stg_tree view = borrowed(tree);
    memset(&g, 0, sizeof g);
    g.s = s;
    g.tree = g.transfer.batch = g.step.batch = &view;
    g.transfer.struct_size = sizeof g.transfer;
    g.transfer.device.index = -1;
    g.step.struct_size = sizeof g.step;
    g.result.struct_size = sizeof g.result;
    stg_error* error = takers[i].give(&g);
    CHECK_THAT(error != NULL, "%s refuses it", takers[i].name);
    if (error == NULL) {
      release_tree(&g.out);
      release_tree(&g.result.outputs);
      continue;
    }
    /* A function that a strategy lacks knows nothing of its argument. */
    const int is_absent = error->code == STG_UNIMPLEMENTED && text_has(error->message, takers[i].name);
    CHECK_THAT(error->code == STG_INVALID_ARGUMENT || error->code == STG_UNIMPLEMENTED, "%s: code %u", takers[i].name,
               error->code);
    CHECK_THAT(is_absent || text_has(error->message, part), "%s says %s: %.*s", takers[i].name, part,
               (int)error->message.size_bytes, error->message.data);
    error->release(error);
  }
}

/* Memory that nobody may read: a plugin that does ends this program. */
static void put_on_cuda(stg_tensor* tensor) {
  tensor->view.device.kind = STG_DEVICE_CUDA;
  tensor->view.data = (void*)4096;
}

static void other_devices_are_refused(void) {
  session s;
  batch b;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, 1);
  stg_tree tree = batch_tree(&b, 0);
  put_on_cuda(tree.root.as.entries[1].value.as.tensor);
  check_refused_by_all(&s, &tree, "targets");
  release_tree(&tree);
  SUCCEEDS(train_on(&s, &b, 0.1));
  close_session(&s);
}

/* The same in a state, at setup and at import. */
static void states_on_other_devices_are_refused(void) {
  session s;
  stg_tree state;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  memset(&state, 0, sizeof state);
  stg_error* absent = the_host.api->export_state(s.strategy, NULL, STG_EXPORT_COPY, &state);
  if (absent != NULL) { /* a function that a strategy may lack */
    FAILS(absent, STG_UNIMPLEMENTED, "export_state");
    close_session(&s);
    return;
  }
  const stg_value* weight = find_key(find_key(&state.root, "model"), "out.weight");
  if (CHECK(weight != NULL && weight->type == STG_TENSOR)) {
    const stg_tensor_view before = weight->as.tensor->view;
    put_on_cuda(weight->as.tensor);
    for (int in_setup = 0; in_setup < 2; ++in_setup) {
      stg_tree view = borrowed(&state);
      if (in_setup) SUCCEEDS(the_host.api->teardown(s.strategy, NULL));
      stg_error* error = in_setup ? set_up(&s, STG_STAGE_FIT, &view)
                                  : the_host.api->import_state(s.strategy, NULL, &view, STG_IMPORT_STRICT, NULL);
      if (!CHECK(error != NULL)) continue;
      CHECK(error->code == STG_INVALID_ARGUMENT || error->code == STG_UNIMPLEMENTED);
      CHECK_THAT(text_has(error->message, "out.weight"), "the error names it: %.*s", (int)error->message.size_bytes,
                 error->message.data);
      error->release(error);
    }
    weight->as.tensor->view = before;
  }
  release_tree(&state);
  close_session(&s);
}

static void bools_are_0_or_1(void) {
  static const int64_t bad[] = {2, -1};
  session s;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  for (int i = 0; i < 2; ++i) {
    stg_value items[2];
    stg_tree tree;
    memset(items, 0, sizeof items);
    memset(&tree, 0, sizeof tree);
    items[1].type = STG_BOOL;
    items[1].as.i64 = bad[i];
    tree.root.type = STG_LIST;
    tree.root.count = 2;
    tree.root.as.items = items;
    check_refused_by_all(&s, &tree, "[1]");
  }
  close_session(&s);
}

static void keys_are_distinct(void) {
  session s;
  stg_entry entries[3];
  stg_tree tree;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  memset(entries, 0, sizeof entries);
  memset(&tree, 0, sizeof tree);
  for (int i = 0; i < 3; ++i) {
    entries[i].key.data = i == 1 ? "other" : "again";
    entries[i].key.size_bytes = 5;
  }
  tree.root.type = STG_DICT;
  tree.root.count = 3;
  tree.root.as.entries = entries;
  check_refused_by_all(&s, &tree, "again");
  close_session(&s);
}

/* ---- streams ---- */

static void streams_that_can_not_be(void) {
  static const stg_string name = {"streams", 7};
  session s;
  stg_call call;
  stg_stream streams[2];
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  memset(&call, 0, sizeof call);
  memset(streams, 0, sizeof streams);
  call.struct_size = sizeof call;
  call.streams = streams;
  call.num_streams = 2;
  SUCCEEDS(the_host.api->barrier(s.strategy, &call, name));
  streams[1].kind = 77;
  FAILS(the_host.api->barrier(s.strategy, &call, name), STG_INVALID_ARGUMENT, "77");
  streams[1].kind = STG_STREAM_PER_THREAD_DEFAULT;
  SUCCEEDS(the_host.api->barrier(s.strategy, &call, name));
  streams[1].reserved = 5;
  FAILS(the_host.api->barrier(s.strategy, &call, name), STG_INVALID_ARGUMENT, "reserved");
  call.streams = NULL;
  FAILS(the_host.api->barrier(s.strategy, &call, name), STG_INVALID_ARGUMENT, "null");
  close_session(&s);
}

DEFINE_CHECKS(
    value_checks,
    {"tree-foreign-memory-refused",
     "A borrowed tensor in another device's memory is refused by its key, unread, by each of the 10 functions that take a tree",
     "E2", NEEDS_STRATEGY | IS_ONCE, other_devices_are_refused},
    {"state-foreign-memory-refused", "So is one in a state, at import and at setup", "E2", NEEDS_STRATEGY | IS_ONCE,
     states_on_other_devices_are_refused},
    {"tree-bools-0-or-1", "A bool of 2 or -1 is refused by its place", "E1", NEEDS_STRATEGY | IS_ONCE, bools_are_0_or_1},
    {"tree-keys-distinct", "A key that is there twice is refused by its name", "E1", NEEDS_STRATEGY | IS_ONCE, keys_are_distinct},
    {"streams-checked", "A stream of kind 77, a reserved field of 5, and null for 2 streams are refused", "F3",
     NEEDS_STRATEGY | IS_ONCE, streams_that_can_not_be});
