/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoints in a storage of the host's (rule G2): what is saved comes back, and a storage that fails, at whichever of its calls, is
 * told and leaves the checkpoint that was there.
 */
#include "conformance/fixture/storage.h"

#include <string.h>

#include "conformance/checks/check.h"

#define LR 0.2

static const char host_json[] = "{\"epoch\":3}";

static stg_checkpoint_args checkpoint(const char* path) {
  stg_checkpoint_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.path.data = path;
  args.path.size_bytes = strlen(path);
  args.host_json.data = host_json;
  args.host_json.size_bytes = sizeof host_json - 1;
  return args;
}

static int open_with_storage(session* out, memory_storage* storage) {
  new_mlp(&out->model, 1);
  out->strategy = make_strategy(1, 0, &storage->services);
  return out->strategy != NULL && SUCCEEDS(set_up(out, STG_STAGE_FIT, NULL));
}

static void saved_comes_back(void) {
  static memory_storage storage;
  session first, second;
  batch b;
  stg_tree json, report;
  new_storage(&storage);
  memset(&json, 0, sizeof json);
  memset(&report, 0, sizeof report);
  make_batch(&b, 7, the_host.seed);
  if (!open_with_storage(&first, &storage) || !open_with_storage(&second, &storage)) return;
  SUCCEEDS(train_on(&first, &b, LR));
  stg_checkpoint_args args = checkpoint("runs/last");
  const int is_saved = SUCCEEDS(the_host.api->save(first.strategy, NULL, &args));
  memset(&args.host_json, 0, sizeof args.host_json);
  args.flags = STG_IMPORT_STRICT;
  if (is_saved && SUCCEEDS(the_host.api->load(second.strategy, NULL, &args, &json, &report))) {
    CHECK_THAT(json.root.type == STG_STRING && json.root.count == sizeof host_json - 1 &&
                   memcmp(json.root.as.utf8, host_json, json.root.count) == 0,
               "the host's JSON comes back as it was");
    check_equal_weights(&first, &second, "after load");
    SUCCEEDS(train_on(&first, &b, LR));
    SUCCEEDS(train_on(&second, &b, LR));
    check_equal_weights(&first, &second, "a step later");
  }
  release_tree(&json);
  release_tree(&report);
  close_session(&first);
  close_session(&second);
  CHECK_THAT(storage.num_open == 0, "every transaction and file is closed: %d open", (int)storage.num_open);
}

static int comes_from(const stg_error* error, const memory_storage* storage) {
  while (error->cause != NULL) error = error->cause;
  return error->owner == storage;
}

/* 0: the save needs fewer calls. */
static int fail_at(session* s, memory_storage* storage, const stg_checkpoint_args* args, int64_t number) {
  const uint64_t before = fingerprint(storage);
  storage->num_calls = 0;
  storage->fail_at = number;
  stg_error* error = the_host.api->save(s->strategy, NULL, args);
  storage->fail_at = 0;
  if (storage->num_calls < number) {
    if (error != NULL) error->release(error);
    return 0;
  }
  if (CHECK_THAT(error != NULL, "the error of the storage's call number %d comes back", (int)number)) {
    CHECK_THAT(comes_from(error, storage), "and is the cause: %.*s", (int)error->message.size_bytes, error->message.data);
    error->release(error);
  }
  CHECK_THAT(fingerprint(storage) == before, "call number %d: what was saved before is as it was, and nothing else is there",
             (int)number);
  CHECK_THAT(storage->num_open == 0, "call number %d: %d transactions are left open", (int)number, (int)storage->num_open);
  CHECK_THAT(storage->num_errors == 0, "call number %d: the storage's error is released once: %d are left", (int)number,
             (int)storage->num_errors);
  return 1;
}

static void a_storage_fails_at_every_call(void) {
  static memory_storage storage;
  session s;
  batch b;
  int64_t number = 1;
  new_storage(&storage);
  make_batch(&b, 7, the_host.seed);
  if (!open_with_storage(&s, &storage)) return;
  const stg_checkpoint_args args = checkpoint("runs/last");
  if (SUCCEEDS(the_host.api->save(s.strategy, NULL, &args))) {
    SUCCEEDS(train_on(&s, &b, LR)); /* so that another checkpoint would be seen */
    while (number < 200 && count_failures() < 20 && fail_at(&s, &storage, &args, number)) ++number;
    CHECK_THAT(number > 2, "the storage is called at all: it failed %d times", (int)number - 1);
    SUCCEEDS(the_host.api->save(s.strategy, NULL, &args));
  }
  close_session(&s);
}

DEFINE_CHECKS(
    storage_checks,
    {"storage-round-trip",
     "A checkpoint in the host's storage comes back bitwise in another instance, with the host's JSON, and everything is closed",
     "G2", NEEDS_STRATEGY | IS_ONCE, saved_comes_back},
    {"storage-fails-at-every-call",
     "A storage that fails at its n-th call of a save, for every n: the error is the cause, the old checkpoint stays, nothing is "
     "left open",
     "G2", NEEDS_STRATEGY | IS_ONCE, a_storage_fails_at_every_call});
