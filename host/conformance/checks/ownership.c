/* SPDX-License-Identifier: Apache-2.0
 *
 * Each thing is released exactly once, by whoever owns it (rules D1 to D3), wherever that happens.
 */
#include <string.h>

#include "conformance/checks/check.h"

#define LR 0.2

static void* release_it(void* tree) {
  release_tree(tree);
  return NULL;
}

static void release_on_another_thread(stg_tree* tree) {
  pthread_t thread;
  if (CHECK(pthread_create(&thread, NULL, release_it, tree) == 0)) pthread_join(thread, NULL);
}

static void check_all_released(int64_t tensors, int64_t trees, const char* when) {
  CHECK_THAT(num_live_tensors == tensors && num_live_trees == trees, "%s %d tensors and %d trees of the host's are not released",
             when, (int)(num_live_tensors - tensors), (int)(num_live_trees - trees));
}

static void batches_are_released_once(void) {
  session s;
  batch b;
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 7, the_host.seed);
  SUCCEEDS(train_on(&s, &b, LR)); /* what a strategy sets aside at the first step is there */
  const int64_t tensors = num_live_tensors, trees = num_live_trees;
  for (int i = 0; i < 3; ++i) SUCCEEDS(train_on(&s, &b, LR));
  check_all_released(tensors, trees, "after 3 batches");
  stg_tree tree = batch_tree(&b, 0);
  stg_error* error = validation_step(&s, &tree, &result);
  if (error == NULL) release_tree(&result.outputs);
  if (error != NULL) FAILS(error, STG_UNIMPLEMENTED, NULL);
  check_all_released(tensors, trees, "after an evaluation");
  tree = batch_tree(&b, 0);
  if (SUCCEEDS(training_step(&s, &tree, &result))) release_tree(&result.outputs);
  SUCCEEDS(the_host.api->zero_grad(s.strategy, NULL)); /* drops the graphs */
  check_all_released(tensors, trees, "after a forward whose graphs were dropped");
  tree = batch_tree(&b, 0);
  find_key(&tree.root, "targets")->as.tensor->view.shape[0] = 5;
  FAILS(training_step(&s, &tree, &result), STG_INVALID_ARGUMENT, NULL);
  check_all_released(tensors, trees, "after a batch that was refused");
  close_session(&s);
  check_all_released(0, 0, "after destroy");
}

/* Without bind, so that gradients are tensors of their own. */
static void gradients_are_released_once(void) {
  session s;
  batch b;
  if (!open_session(&s, 1, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 7, the_host.seed);
  SUCCEEDS(train_on(&s, &b, LR));
  const int64_t tensors = num_live_tensors;
  for (int i = 0; i < 3; ++i) SUCCEEDS(train_on(&s, &b, LR));
  check_all_released(tensors, num_live_trees, "after 3 updates");
  s.model.fail_replica = (int32_t)the_host.num_devices - 1;
  s.model.fail_in = MLP_IN_BACKWARD;
  stg_error* error = train_on(&s, &b, LR);
  if (CHECK(error != NULL)) error->release(error);
  check_all_released(tensors, num_live_trees, "after a backward that failed half-way");
  close_session(&s);
}

static void outputs_are_released_anywhere(void) {
  session s;
  batch b;
  stg_tree out;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 7, the_host.seed);
  for (int is_destroyed = 0; is_destroyed < 2; ++is_destroyed) {
    const int64_t tensors = num_live_tensors, trees = num_live_trees;
    stg_tree tree = batch_tree(&b, 0);
    memset(&out, 0, sizeof out);
    if (!SUCCEEDS(the_host.api->broadcast(s.strategy, NULL, &tree, 0, &out))) break;
    CHECK_THAT(num_live_tensors == tensors + 2, "tensors live as long as the tree that they are handed on in");
    if (is_destroyed) {
      destroy_strategy(s.strategy);
      s.strategy = NULL;
      release_on_another_thread(&out);
      check_all_released(0, 0, "after destroy, and a release on another thread,");
    } else {
      release_on_another_thread(&out);
      check_all_released(tensors, trees, "after a release on another thread");
    }
  }
  close_session(&s);
}

/* ---- opaque values in a batch ---- */

static int64_t num_references;
static void retain(stg_opaque* self) {
  (void)self;
  __atomic_fetch_add(&num_references, 1, __ATOMIC_RELAXED);
}
static void release(stg_opaque* self) {
  (void)self;
  __atomic_fetch_sub(&num_references, 1, __ATOMIC_RELAXED);
}

static void opaque_values_in_batches_are_balanced(void) {
  session s;
  batch b;
  stg_opaque object;
  stg_entry entries[3];
  stg_step_result result;
  stg_tree tree, whole;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 7, the_host.seed);
  memset(&object, 0, sizeof object);
  memset(&tree, 0, sizeof tree);
  memset(entries, 0, sizeof entries);
  object.struct_size = sizeof object;
  object.type_name.data = "test.object";
  object.type_name.size_bytes = 11;
  object.retain = retain;
  object.release = release;
  whole = batch_tree(&b, 0);
  entries[0] = whole.root.as.entries[0];
  entries[1] = whole.root.as.entries[1];
  entries[2].key.data = "meta";
  entries[2].key.size_bytes = 4;
  entries[2].value.type = STG_OPAQUE;
  entries[2].value.as.opaque = &object;
  tree.root.type = STG_DICT;
  tree.root.count = 3;
  tree.root.as.entries = entries;
  for (int i = 0; i < 3; ++i) {
    if (SUCCEEDS(train_batch(&s, NULL, &tree, LR, STG_BATCH_LAST_MICRO_BATCH, &result, NULL))) release_tree(&result.outputs);
  }
  close_session(&s);
  CHECK_THAT(num_references == 0, "retain and release of an object in 3 batches are balanced: %d left", (int)num_references);
  release_tree(&whole);
}

/* ---- states ---- */

static void states_are_consumed(void) {
  session s;
  stg_tree out;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  batch b;
  make_batch(&b, 4, 1);
  stg_tree no_state = batch_tree(&b, 0);
  stg_error* error = the_host.api->import_state(s.strategy, NULL, &no_state, STG_IMPORT_STRICT, NULL);
  if (error != NULL && error->code == STG_UNIMPLEMENTED) skip("import_state is unimplemented");
  if (CHECK_THAT(error != NULL, "a batch is no state")) error->release(error);
  CHECK_THAT(no_state.release == NULL, "a moved state is consumed, though it is refused");
  memset(&out, 0, sizeof out);
  if (SUCCEEDS(the_host.api->export_state(s.strategy, NULL, STG_EXPORT_COPY, &out))) {
    SUCCEEDS(the_host.api->import_state(s.strategy, NULL, &out, STG_IMPORT_STRICT, NULL));
    CHECK_THAT(out.release == NULL, "a moved state is consumed");
  }
  stg_tree for_setup = batch_tree(&b, 0);
  SUCCEEDS(the_host.api->teardown(s.strategy, NULL));
  error = set_up(&s, STG_STAGE_FIT, &for_setup);
  if (CHECK_THAT(error != NULL, "a batch is no state to begin from")) error->release(error);
  CHECK_THAT(for_setup.release == NULL, "a moved state is consumed by a setup that fails");
  close_session(&s);
  check_all_released(0, 0, "after destroy");
}

DEFINE_CHECKS(ownership_checks,
              {"batches-released-once",
               "After 3 batches, an evaluation, a forward whose graphs were dropped and a batch that was refused every tensor "
               "and tree of them is released, once",
               "D2", NEEDS_STRATEGY, batches_are_released_once},
              {"gradients-released-once",
               "Gradients that the model hands over are released, once, after 3 updates and after a backward that fails half-way",
               "D2", NEEDS_STRATEGY, gradients_are_released_once},
              {"outputs-released-anywhere",
               "What broadcast hands on is released on another thread, while the instance lives and after it", "D3",
               NEEDS_STRATEGY | IS_ONCE, outputs_are_released_anywhere},
              {"opaque-in-batch-balanced", "The references of an object in 3 batches are balanced", "E1", NEEDS_STRATEGY,
               opaque_values_in_batches_are_balanced},
              {"states-consumed", "A moved state is consumed by import_state and by setup, refused or not", "D2",
               NEEDS_STRATEGY | IS_ONCE, states_are_consumed});
