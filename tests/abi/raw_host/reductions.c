/* SPDX-License-Identifier: Apache-2.0
 *
 * What reduce_gradients promises, one sentence at a time: weights, null slots, what is refused and that nothing is written then.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sets.h"

/* A new instance with one slot per set of 3 float32 elements: set i holds 10 i + 1, + 2, + 3. */
static stg_strategy* strategy;
static sets* all;

static int begin(uint64_t num_gradients) {
  static const int64_t shape[] = {3};
  strategy = ready_to_reduce(0);
  all = new_sets(strategy, num_gradients);
  if (all == NULL) return 0;
  for (uint64_t i = 0; i < all->num_sets; ++i) {
    for (uint64_t g = 0; g < num_gradients; ++g) {
      all->of[i].gradients[g] = new_float32(1, shape);
      for (int k = 0; k < 3; ++k) floats(all->of[i].gradients[g])[k] = (float)(10 * (int)i + k + 1);
    }
  }
  return 1;
}

static void end(void) {
  if (all != NULL) free_sets(all);
  if (strategy != NULL) destroy_strategy(strategy);
  CHECK(num_live_tensors == 0);
}

/* Sum over the sets of weight[i] x (10 i + k + 1). */
static double expected(const double* weights, int k) {
  double sum = 0;
  for (uint64_t i = 0; i < all->num_sets; ++i) sum += weights[i] * (10.0 * (double)i + k + 1);
  return sum;
}

static void check_results(uint64_t gradient, const double* weights, double divisor) {
  for (uint64_t i = 0; i < all->num_sets; ++i) {
    for (int k = 0; k < 3 && all->of[i].gradients[gradient] != NULL; ++k) {
      const double got = element(all->of[i].gradients[gradient], k), wanted = expected(weights, k) / divisor;
      CHECK_THAT(is_close(got, wanted, 1e-6), "set %d, element %d: %g equals %g", (int)i, k, got, wanted);
    }
  }
}

static void check_untouched(void) {
  for (uint64_t i = 0; i < all->num_sets; ++i) {
    for (int k = 0; k < 3; ++k) CHECK(floats(all->of[i].gradients[0])[k] == (float)(10 * (int)i + k + 1));
  }
}

/* ---- weights ---- */

static void mean_is_weighted(void) {
  double weights[64], total = 0;
  if (!begin(2)) return;
  for (uint64_t i = 0; i < all->num_sets; ++i) total += weights[i] = all->of[i].weight = 0.5 + (double)i;
  if (SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN))) {
    check_results(0, weights, total);
    check_results(1, weights, total);
  }
  end();
}

static void sum_ignores_weights(void) {
  double weights[64];
  if (!begin(1)) return;
  for (uint64_t i = 0; i < all->num_sets; ++i) {
    weights[i] = 1;
    all->of[i].weight = i == 0 ? 0 : 7; /* 0 too: under sum it is read */
  }
  if (SUCCEEDS(reduce(strategy, all, STG_REDUCE_SUM))) check_results(0, weights, 1);
  end();
}

static void weight_zero_is_not_read(void) {
  double weights[64];
  if (!begin(1)) return;
  for (uint64_t i = 0; i < all->num_sets; ++i) weights[i] = 1;
  if (all->num_sets > 1) { /* with one set the total would be 0 */
    weights[1] = all->of[1].weight = 0;
    for (int k = 0; k < 3; ++k) floats(all->of[1].gradients[0])[k] = NAN;
  }
  if (SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN))) {
    check_results(0, weights, (double)all->num_sets - (all->num_sets > 1));
  }
  end();
}

static void bad_weights_are_refused(void) {
  static const double bad[] = {-1, NAN, INFINITY, 0};
  if (!begin(1)) return;
  for (int i = 0; i < 4; ++i) {
    for (uint64_t set = 0; set < all->num_sets; ++set) all->of[set].weight = i == 3 ? 0 : 1;
    all->of[0].weight = bad[i];
    FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, NULL);
  }
  check_untouched();
  end();
}

static void weights_of_any_size_are_taken(void) {
  static const double units[] = {5e307, 1e300, 1e30, 1e-45, 1e-300, 5e-324};
  for (int u = 0; u < 6; ++u) {
    double weights[64], total = 0;
    if (!begin(1)) return;
    for (uint64_t i = 0; i < all->num_sets; ++i) {
      total += weights[i] = (double)i + 1;
      all->of[i].weight = units[u] * weights[i];
    }
    if (SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN))) check_results(0, weights, total);
    end();
  }
}

/* ---- null slots ---- */

static void null_in_all_stays_null(void) {
  if (!begin(2)) return;
  for (uint64_t i = 0; i < all->num_sets; ++i) {
    release_tensor(all->of[i].gradients[1]);
    all->of[i].gradients[1] = NULL;
  }
  SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN));
  for (uint64_t i = 0; i < all->num_sets; ++i) CHECK(all->of[i].gradients[1] == NULL && all->of[i].gradients[0] != NULL);
  end();
}

static void null_in_some_counts_as_zero(void) {
  double weights[64];
  if (!begin(1)) return;
  for (uint64_t i = 0; i < all->num_sets; ++i) weights[i] = all->num_sets > 1 && i == 0 ? 0 : 1;
  if (all->num_sets > 1) {
    release_tensor(all->of[0].gradients[0]);
    all->of[0].gradients[0] = NULL;
  }
  if (SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN)) && CHECK(all->of[0].gradients[0] != NULL)) {
    CHECK(all->of[0].gradients[0]->view.num_dims == 1 && all->of[0].gradients[0]->view.shape[0] == 3);
    check_results(0, weights, (double)all->num_sets);
  }
  if (strategy != NULL) destroy_strategy(strategy); /* the new tensor outlives its maker */
  strategy = NULL;
  CHECK(element(all->of[0].gradients[0], 0) == element(all->of[all->num_sets - 1].gradients[0], 0));
  end();
}

/* ---- tensors that are refused ---- */

static void read_only_is_refused(void) {
  if (!begin(1)) return;
  all->of[all->num_sets - 1].gradients[0]->flags = STG_TENSOR_READ_ONLY;
  FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, "read");
  check_untouched();
  end();
}

static void overlap_is_refused(void) {
  if (!begin(2)) return;
  stg_tensor* last = all->of[all->num_sets - 1].gradients[1];
  void* own = last->view.data;
  for (uint64_t offset = 0; offset < 12; offset += 4) { /* whole, by two elements, by one */
    last->view.data = all->of[0].gradients[0]->view.data;
    last->view.byte_offset = offset;
    FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, "overlap");
  }
  last->view.data = own;
  last->view.byte_offset = 0;
  check_untouched();
  end();
}

static void stride_zero_is_refused(void) {
  if (!begin(1)) return;
  all->of[0].gradients[0]->view.strides[0] = 0;
  FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, "stride");
  check_untouched();
  end();
}

static void wild_shapes_are_refused(void) {
  if (!begin(1)) return;
  stg_tensor_view* view = &all->of[0].gradients[0]->view;
  static const int64_t sizes[] = {-1, INT64_MAX, INT64_C(1) << 62, 4};
  for (int i = 0; i < 4; ++i) {
    view->shape[0] = sizes[i];
    if (i < 3 || all->num_sets > 1) FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, NULL);
  }
  view->shape[0] = 3;
  view->strides[0] = -1;
  FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, NULL);
  view->strides[0] = 1;
  view->byte_offset = 2;
  FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, NULL);
  static const uint64_t offsets[] = {UINT64_C(1) << 62, UINT64_C(1) << 63, UINT64_MAX - 3};
  for (int i = 0; i < 3; ++i) {
    view->byte_offset = offsets[i];
    FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, "byte_offset");
  }
  view->byte_offset = 0;
  all->of[0].gradients[0]->dlpack_major = 2;
  FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, NULL);
  check_untouched();
  end();
}

static void null_strides_and_offsets_are_honoured(void) {
  double weights[64];
  if (!begin(1)) return;
  stg_tensor_view* view = &all->of[0].gradients[0]->view;
  view->strides = NULL;
  memmove((char*)view->data + 4, view->data, 12); /* there is room: data is padded to 64 bytes */
  view->byte_offset = 4;
  for (uint64_t i = 0; i < all->num_sets; ++i) weights[i] = 1;
  if (SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN))) check_results(0, weights, (double)all->num_sets);
  end();
}

/* Any strides are the ABI's promise for imports; a strategy that lacks them says so. */
static void other_strides_work_or_are_named(void) {
  if (!begin(1)) return;
  stg_tensor_view* view = &all->of[0].gradients[0]->view;
  view->strides[0] = 2; /* 3 elements at 0, 2, 4 of the padded memory */
  for (int k = 2; k >= 0; --k) ((float*)view->data)[2 * k] = (float)(k + 1);
  ((float*)view->data)[1] = ((float*)view->data)[3] = -5;
  stg_error* error = reduce(strategy, all, STG_REDUCE_SUM);
  if (error != NULL) {
    FAILS(error, STG_UNIMPLEMENTED, "stride");
  } else {
    const double ones[64] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    for (int k = 0; k < 3; ++k) CHECK(is_close(((float*)view->data)[2 * k], expected(ones, k), 1e-6));
    CHECK(((float*)view->data)[1] == -5 && ((float*)view->data)[3] == -5);
  }
  end();
}

/* ---- arguments that are refused ---- */

static void mismatched_sets_are_refused(void) {
  if (!begin(2)) return;
  all->num_sets -= 1;
  FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, NULL);
  all->num_sets += 1;
  FAILS(reduce(strategy, all, STG_REDUCE_MIN), STG_INVALID_ARGUMENT, NULL);
  FAILS(reduce(strategy, all, 77), STG_INVALID_ARGUMENT, "77");
  if (all->num_sets > 1) {
    all->of[1].num_gradients = 1;
    FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, NULL);
    all->of[1].num_gradients = 2;
    const stg_device device = all->of[1].device;
    all->of[1].device = all->of[0].device;
    FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, NULL);
    all->of[1].device = device;
    all->of[1].gradients[0]->view.dtype.bits = 64;
    FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, NULL);
    all->of[1].gradients[0]->view.dtype.bits = 32;
  }
  check_untouched();
  SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN)); /* after all those errors it works */
  end();
}

static void sizes_of_sets_are_checked(void) {
  struct {
    stg_gradient_set set;
    uint64_t later;
  } newer;
  if (!begin(1)) return;
  all->of[0].struct_size = STG_GRADIENT_SET_MIN_SIZE - 8;
  FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, NULL);
  all->of[0].struct_size = UINT64_MAX;
  FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, NULL);
  all->of[0].struct_size = sizeof *all->of;
  memset(&newer, 0, sizeof newer);
  newer.set = all->of[0];
  newer.set.struct_size = sizeof newer;
  newer.later = 1;
  all->pointers[0] = &newer.set;
  FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_UNIMPLEMENTED, "80");
  check_untouched();
  newer.later = 0;
  SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN));
  end();
}

/* ---- moved sets ---- */

static int num_released;

static void count_release(stg_gradient_set* self) {
  (void)self;
  ++num_released;
}

static void moved_sets_are_released_once(void) {
  if (!begin(1)) return;
  for (uint64_t i = 0; i < all->num_sets; ++i) all->of[i].release = count_release;
  num_released = 0;
  SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN));
  CHECK(num_released == (int)all->num_sets);
  num_released = 0;
  FAILS(reduce(strategy, all, STG_REDUCE_MAX), STG_INVALID_ARGUMENT, NULL);
  CHECK(num_released == (int)all->num_sets);
  end();
}

/* Of sets that are moved in, one that can't be read stays the caller's; those on both sides of it are consumed. */
static void a_bad_set_leaves_no_other_behind(void) {
  if (!begin(1)) return;
  for (uint64_t bad = 0; bad < all->num_sets; ++bad) {
    struct {
      stg_gradient_set set;
      uint64_t later;
    } newer;
    for (uint64_t i = 0; i < all->num_sets; ++i) all->of[i].release = count_release;
    all->of[bad].struct_size = STG_GRADIENT_SET_MIN_SIZE - 8;
    num_released = 0;
    FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, NULL);
    CHECK_THAT(num_released == (int)all->num_sets - 1, "%d of %d sets are released", num_released, (int)all->num_sets - 1);
    all->of[bad].struct_size = sizeof *all->of;
    memset(&newer, 0, sizeof newer);
    newer.set = all->of[bad];
    newer.set.struct_size = sizeof newer;
    newer.later = 1;
    all->pointers[bad] = &newer.set;
    num_released = 0;
    FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_UNIMPLEMENTED, "80");
    CHECK_THAT(num_released == (int)all->num_sets - 1, "%d of %d sets are released", num_released, (int)all->num_sets - 1);
    all->pointers[bad] = &all->of[bad];
  }
  check_untouched();
  end();
}

static void streams_of_sets_are_checked(void) {
  if (!begin(1)) return;
  all->of[0].stream.kind = 77;
  FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, "77");
  all->of[0].stream.kind = 0;
  all->of[0].stream.reserved = 1;
  FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_INVALID_ARGUMENT, "reserved");
  all->of[0].stream.reserved = 0;
  check_untouched();
  SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN));
  end();
}

static void only_modelless_instances_reduce(void) {
  if (!begin(1)) return;
  SUCCEEDS(the_host.api->teardown(strategy, NULL));
  FAILS(reduce(strategy, all, STG_REDUCE_MEAN), STG_FAILED_PRECONDITION, NULL);
  check_untouched();
  end();
}

static const test tests[] = {
    {"a mean weights each set and every set gets it", mean_is_weighted},
    {"a sum ignores weights", sum_ignores_weights},
    {"a set of weight 0 is not read under mean, but gets the result", weight_zero_is_not_read},
    {"negative, infinite, NaN weights and a total of 0 are refused", bad_weights_are_refused},
    {"weights of any size are taken, though their sum or a gradient's type has no such number", weights_of_any_size_are_taken},
    {"a slot that is null in all sets stays null", null_in_all_stays_null},
    {"a slot that is null in some sets counts as zero and gets a tensor that outlives the instance", null_in_some_counts_as_zero},
    {"a read-only gradient is refused before anything is written", read_only_is_refused},
    {"gradients that overlap are refused before anything is written", overlap_is_refused},
    {"a stride of 0 is refused before anything is written", stride_zero_is_refused},
    {"shapes, strides, offsets and versions that can't be are refused", wild_shapes_are_refused},
    {"null strides and byte offsets are honoured", null_strides_and_offsets_are_honoured},
    {"other strides work or are named as unimplemented", other_strides_work_or_are_named},
    {"sets that don't match the devices or each other are refused, and the next call works", mismatched_sets_are_refused},
    {"the size of each set is checked", sizes_of_sets_are_checked},
    {"sets that are moved in are released once, on an error too", moved_sets_are_released_once},
    {"a set that can't be read leaves no other one behind", a_bad_set_leaves_no_other_behind},
    {"a set's stream of an unknown kind, or with its reserved field set, is refused", streams_of_sets_are_checked},
    {"reduce_gradients is legal without a model only", only_modelless_instances_reduce},
};

int run_reduction_tests(void) { return run_tests(tests, sizeof tests / sizeof *tests); }
