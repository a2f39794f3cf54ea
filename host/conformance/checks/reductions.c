/* SPDX-License-Identifier: Apache-2.0
 *
 * What reduce_gradients promises, one sentence at a time: weights, null slots, what is refused and that nothing is written then.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "conformance/checks/check.h"

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
static double expected(const double* factors, int k) {
  double sum = 0;
  for (uint64_t i = 0; i < all->num_sets; ++i) sum += factors[i] * (10.0 * (double)i + k + 1);
  return sum;
}

static void check_results(uint64_t gradient, const double* factors, double divisor) {
  for (uint64_t i = 0; i < all->num_sets; ++i) {
    for (int k = 0; k < 3 && all->of[i].gradients[gradient] != NULL; ++k) {
      const double got = element(all->of[i].gradients[gradient], k), wanted = expected(factors, k) / divisor;
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
  double factors[64], total = 0;
  if (!begin(2)) return;
  for (uint64_t i = 0; i < all->num_sets; ++i) total += factors[i] = all->of[i].weight = 0.5 + (double)i;
  if (SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN))) {
    check_results(0, factors, total);
    check_results(1, factors, total);
  }
  end();
}

static void sum_ignores_weights(void) {
  double factors[64];
  if (!begin(1)) return;
  for (uint64_t i = 0; i < all->num_sets; ++i) {
    factors[i] = 1;
    all->of[i].weight = i == 0 ? 0 : 7; /* 0 too: under sum it is read */
  }
  if (SUCCEEDS(reduce(strategy, all, STG_REDUCE_SUM))) check_results(0, factors, 1);
  end();
}

static void weight_zero_is_not_read(void) {
  double factors[64];
  if (!begin(1)) return;
  for (uint64_t i = 0; i < all->num_sets; ++i) factors[i] = 1;
  if (all->num_sets > 1) { /* with one set the total would be 0 */
    factors[1] = all->of[1].weight = 0;
    for (int k = 0; k < 3; ++k) floats(all->of[1].gradients[0])[k] = NAN;
  }
  if (SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN))) {
    check_results(0, factors, (double)all->num_sets - (all->num_sets > 1));
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
    double factors[64], total = 0;
    if (!begin(1)) return;
    for (uint64_t i = 0; i < all->num_sets; ++i) {
      total += factors[i] = (double)i + 1;
      all->of[i].weight = units[u] * factors[i];
    }
    if (SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN))) check_results(0, factors, total);
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
  double factors[64];
  if (!begin(1)) return;
  for (uint64_t i = 0; i < all->num_sets; ++i) factors[i] = all->num_sets > 1 && i == 0 ? 0 : 1;
  if (all->num_sets > 1) {
    release_tensor(all->of[0].gradients[0]);
    all->of[0].gradients[0] = NULL;
  }
  if (SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN)) && CHECK(all->of[0].gradients[0] != NULL)) {
    CHECK(all->of[0].gradients[0]->view.num_dims == 1 && all->of[0].gradients[0]->view.shape[0] == 3);
    check_results(0, factors, (double)all->num_sets);
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
  double factors[64];
  if (!begin(1)) return;
  stg_tensor_view* view = &all->of[0].gradients[0]->view;
  view->strides = NULL;
  memmove((char*)view->data + 4, view->data, 12); /* there is room: data is padded to 64 bytes */
  view->byte_offset = 4;
  for (uint64_t i = 0; i < all->num_sets; ++i) factors[i] = 1;
  if (SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN))) check_results(0, factors, (double)all->num_sets);
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

DEFINE_CHECKS(
    reduction_checks,
    {"reduce-mean-weighted", "A mean weights each set, and every set gets it", "H", NEEDS_STRATEGY, mean_is_weighted},
    {"reduce-sum-ignores-weights", "A sum ignores weights", "H", NEEDS_STRATEGY, sum_ignores_weights},
    {"reduce-weight-zero-not-read", "A set of weight 0 is not read under mean, but gets the result", "H", NEEDS_STRATEGY,
     weight_zero_is_not_read},
    {"reduce-bad-weights-refused", "Weights of -1, NaN and infinity and a total of 0 are refused before anything is written", "H",
     NEEDS_STRATEGY | IS_ONCE, bad_weights_are_refused},
    {"reduce-weights-of-any-size",
     "Weights from 5e-324 to 5e307 are taken, though their sum or a float32 may have no such number", "H",
     NEEDS_STRATEGY | IS_ONCE, weights_of_any_size_are_taken},
    {"reduce-null-in-all-stays-null", "A slot that is null in all sets stays null", "H", NEEDS_STRATEGY, null_in_all_stays_null},
    {"reduce-null-in-some-is-zero",
     "A slot that is null in some sets counts as zero and gets a tensor that outlives the instance", "H", NEEDS_STRATEGY,
     null_in_some_counts_as_zero},
    {"reduce-read-only-refused", "A read-only gradient is refused before anything is written", "H", NEEDS_STRATEGY,
     read_only_is_refused},
    {"reduce-overlap-refused", "Gradients that overlap wholly, by two elements or by one are refused before anything is written",
     "H", NEEDS_STRATEGY, overlap_is_refused},
    {"reduce-stride-0-refused", "A stride of 0 is refused before anything is written", "H", NEEDS_STRATEGY | IS_ONCE,
     stride_zero_is_refused},
    {"reduce-wild-shapes-refused", "Shapes, strides, offsets and versions that can't be are refused before anything is written",
     "E2", NEEDS_STRATEGY | IS_ONCE, wild_shapes_are_refused},
    {"reduce-null-strides-and-offsets", "Null strides and a byte_offset of 4 are honoured", "E2", NEEDS_STRATEGY,
     null_strides_and_offsets_are_honoured},
    {"reduce-other-strides", "A stride of 2 works or is named as unimplemented, and what is between is left alone", "E2",
     NEEDS_STRATEGY, other_strides_work_or_are_named},
    {"reduce-mismatches-refused", "Sets that don't match the devices or each other are refused, and the next call works", "H",
     NEEDS_STRATEGY, mismatched_sets_are_refused},
    {"reduce-set-sizes-checked",
     "A set below 80 bytes or of an absurd size is refused, one with an unknown field is unimplemented", "B1",
     NEEDS_STRATEGY | IS_ONCE, sizes_of_sets_are_checked},
    {"reduce-moved-sets-released", "Sets that are moved in are released once, on an error too", "D2", NEEDS_STRATEGY,
     moved_sets_are_released_once},
    {"reduce-bad-set-alone", "Of moved sets one that can't be read stays the caller's, and the others are released", "D2",
     NEEDS_STRATEGY | NEEDS_DEVICES | IS_ONCE, a_bad_set_leaves_no_other_behind},
    {"reduce-streams-checked", "A set's stream of kind 77, or with a reserved field of 1, is refused", "F3",
     NEEDS_STRATEGY | IS_ONCE, streams_of_sets_are_checked},
    {"reduce-modelless-only", "reduce_gradients is legal without a model only", "F1", NEEDS_STRATEGY | IS_ONCE,
     only_modelless_instances_reduce});
