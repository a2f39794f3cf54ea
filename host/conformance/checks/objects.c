/* SPDX-License-Identifier: Apache-2.0
 *
 * Who owns what: trees that pass through, opaque values, the host's services, a null instance.
 */
#include <string.h>

#include "conformance/checks/check.h"

static void moved_and_borrowed_trees(void) {
  session s;
  batch b;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 4, 1);
  for (int is_moved = 0; is_moved < 2; ++is_moved) {
    stg_tree out, tree = batch_tree(&b, 0), view = borrowed(&tree);
    stg_tensor* inside = tree.root.as.entries[0].value.as.tensor;
    const void* data = inside->view.data;
    memset(&out, 0, sizeof out);
    if (!SUCCEEDS(the_host.api->broadcast(s.strategy, NULL, is_moved ? &tree : &view, 0, &out))) continue;
    CHECK_THAT((tree.release == NULL) == is_moved, "a moved tree is consumed, a borrowed one is not");
    const stg_value* same = find_key(&out.root, "inputs");
    if (CHECK(same != NULL && same->type == STG_TENSOR && out.release != NULL)) {
      CHECK_THAT(is_moved || same->as.tensor->view.data != data, "an output does not alias a borrowed tree");
      CHECK(element(same->as.tensor, 5) == (double)b.inputs[1][2]);
    }
    destroy_strategy(s.strategy); /* what it returned stays valid */
    s.strategy = NULL;
    if (same != NULL) CHECK(element(same->as.tensor, 5) == (double)b.inputs[1][2]);
    release_tree(&out);
    release_tree(&tree);
    close_session(&s);
    if (!is_moved && !open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  }
  CHECK(num_live_tensors == 0 && num_live_trees == 0);
}

static void a_leaf_can_be_taken_out(void) {
  session s;
  batch b;
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 5, 1);
  stg_tree tree = batch_tree(&b, 0);
  if (SUCCEEDS(training_step(&s, &tree, &result))) {
    const double loss = loss_of(&result);
    stg_value* slot = &result.outputs.root.as.entries[1].value; /* predictions, loss */
    stg_tensor* taken = slot->as.tensor;
    memset(slot, 0, sizeof *slot);
    release_tree(&result.outputs);
    CHECK_THAT(element(taken, 0) == loss, "a tensor that was taken out outlives its tree");
    release_tensor(taken);
  }
  close_session(&s);
}

/* ---- opaque values ---- */

static int64_t num_opaque_references;
static void retain_opaque(stg_opaque* self) {
  (void)self;
  __atomic_fetch_add(&num_opaque_references, 1, __ATOMIC_RELAXED);
}
static void release_opaque(stg_opaque* self) {
  (void)self;
  __atomic_fetch_sub(&num_opaque_references, 1, __ATOMIC_RELAXED);
}

static void opaque_values_come_back(void) {
  session s;
  stg_opaque object;
  stg_tree tree, out;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  memset(&object, 0, sizeof object);
  memset(&tree, 0, sizeof tree);
  memset(&out, 0, sizeof out);
  object.struct_size = sizeof object;
  object.type_name.data = "test.object";
  object.type_name.size_bytes = 11;
  object.retain = retain_opaque;
  object.release = release_opaque;
  tree.root.type = STG_OPAQUE;
  tree.root.as.opaque = &object; /* borrowed: it is retained for the output */
  if (SUCCEEDS(the_host.api->broadcast(s.strategy, NULL, &tree, 0, &out))) {
    CHECK(out.root.type == STG_OPAQUE && out.root.as.opaque == &object && num_opaque_references == 1);
    release_tree(&out);
  }
  close_session(&s);
  CHECK_THAT(num_opaque_references == 0, "retain and release are balanced: %d left", (int)num_opaque_references);
}

/* ---- services ---- */

static int64_t num_service_references;
static void retain_services(void* self) {
  (void)self;
  __atomic_fetch_add(&num_service_references, 1, __ATOMIC_RELAXED);
}
static void release_services(void* self) {
  (void)self;
  __atomic_fetch_sub(&num_service_references, 1, __ATOMIC_RELAXED);
}

static void services_may_be_absent(void) {
  stg_host services;
  memset(&services, 0, sizeof services);
  services.struct_size = sizeof services;
  for (int has_references = 0; has_references < 2; ++has_references) {
    session s;
    batch b;
    if (has_references) {
      services.retain = retain_services;
      services.release = release_services;
    }
    new_mlp(&s.model, 1);
    s.strategy = make_strategy(1, 0, &services);
    if (s.strategy == NULL) return;
    make_batch(&b, 5, 1);
    if (SUCCEEDS(set_up(&s, STG_STAGE_FIT, NULL))) SUCCEEDS(train_on(&s, &b, 0.1));
    close_session(&s);
    CHECK_THAT(num_service_references == 0, "the host's table is released as often as retained: %d left",
               (int)num_service_references);
  }
}

/* ---- the rest ---- */

static void identities(void) {
  session s;
  uint32_t decision = 7;
  stg_ranks ranks;
  const stg_device* devices = NULL;
  uint64_t num_devices = 0;
  const stg_string name = {"a", 1};
  stg_tree object, out;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  for (uint32_t given = 0; given < 2; ++given) {
    SUCCEEDS(the_host.api->reduce_boolean_decision(s.strategy, NULL, given, STG_DECIDE_ALL, &decision));
    CHECK(decision == given);
    SUCCEEDS(the_host.api->reduce_boolean_decision(s.strategy, NULL, given, STG_DECIDE_ANY, &decision));
    CHECK(decision == given);
  }
  SUCCEEDS(the_host.api->barrier(s.strategy, NULL, name));
  memset(&ranks, 0, sizeof ranks);
  ranks.struct_size = sizeof ranks;
  SUCCEEDS(the_host.api->ranks(s.strategy, &ranks));
  CHECK(ranks.global_rank == 0 && ranks.local_rank == 0 && ranks.node_rank == 0 && ranks.world_size == 1);
  SUCCEEDS(the_host.api->devices(s.strategy, &devices, &num_devices));
  CHECK(num_devices == the_host.num_devices && devices[0].kind == STG_DEVICE_CPU && devices[0].index == 0);
  memset(&object, 0, sizeof object);
  memset(&out, 0, sizeof out);
  object.root.type = STG_INT64;
  object.root.as.i64 = 42;
  FAILS(the_host.api->broadcast(s.strategy, NULL, &object, 1, &out), STG_INVALID_ARGUMENT, NULL);
  SUCCEEDS(the_host.api->broadcast(s.strategy, NULL, &object, 0, &out));
  CHECK(out.root.type == STG_INT64 && out.root.as.i64 == 42);
  release_tree(&out);
  close_session(&s);
}

static void null_instances_are_refused(void) {
  const stg_string name = {"a", 1};
  stg_status status;
  memset(&status, 0, sizeof status);
  status.struct_size = sizeof status;
  FAILS(the_host.api->barrier(NULL, NULL, name), STG_INVALID_ARGUMENT, NULL);
  FAILS(the_host.api->status(NULL, &status), STG_INVALID_ARGUMENT, NULL);
  the_host.api->abort(NULL);
  destroy_strategy(NULL); /* null is allowed */
}

DEFINE_CHECKS(
    object_checks,
    {"tree-moved-or-copied", "A moved tree is consumed, a borrowed one copied, and what comes back outlives the instance", "D2",
     NEEDS_STRATEGY | IS_ONCE, moved_and_borrowed_trees},
    {"tree-leaf-taken-out", "A leaf that is taken out of a returned tree outlives it", "E1", NEEDS_STRATEGY,
     a_leaf_can_be_taken_out},
    {"tree-opaque-comes-back", "An opaque value comes back as the same pointer, and retain and release are balanced", "E1",
     NEEDS_STRATEGY | IS_ONCE, opaque_values_come_back},
    {"services-absent", "Every service may be a null slot, and the table is released as often as it is retained", "G2",
     NEEDS_STRATEGY | IS_ONCE, services_may_be_absent},
    {"one-process-identities",
     "In one process decisions and objects come back as they are, the rank is 0 of 1, and broadcast from rank 1 is refused", "H",
     NEEDS_STRATEGY, identities},
    {"null-instance-refused", "A null instance is invalid_argument, and to abort or destroy one does nothing", "F1",
     NEEDS_STRATEGY | IS_ONCE, null_instances_are_refused});
