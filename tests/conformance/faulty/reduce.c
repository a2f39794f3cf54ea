/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults in reduce_gradients: the sets are changed before or after.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fault.h"

extern uint64_t create_flags;

typedef struct kept {
  double weights[64];
  uint64_t flags[64][8];
  void (*releases[64])(stg_gradient_set* self);
  int were_null[64][8];
} kept;

static double changed_weight(double weight, uint64_t op) {
  if (is_fault("reduce-mean-weighted")) return 1;
  if (is_fault("reduce-weight-zero-not-read") && weight == 0 && op == STG_REDUCE_MEAN) return 1e-30;
  if (is_fault("reduce-bad-weights-refused")) return fabs(weight);
  if (is_fault("reduce-weights-of-any-size")) return (double)(float)weight;
  return weight;
}

static int is_small(const stg_reduce_gradients_args* args) {
  for (uint64_t i = 0; i < args->num_sets; ++i) {
    if (args->sets[i]->struct_size < STG_GRADIENT_SET_MIN_SIZE) return 1;
  }
  return 0;
}

static void change(const stg_reduce_gradients_args* args, kept* before) {
  const int loses = is_fault("reduce-moved-sets-released") || (is_fault("reduce-bad-set-alone") && is_small(args));
  for (uint64_t i = 0; i < args->num_sets; ++i) {
    stg_gradient_set* set = args->sets[i];
    before->weights[i] = set->weight;
    before->releases[i] = set->release;
    set->weight = changed_weight(set->weight, args->op);
    if (loses) set->release = NULL;
    for (uint64_t g = 0; g < set->num_gradients && g < 8; ++g) {
      before->were_null[i][g] = set->gradients[g] == NULL;
      if (set->gradients[g] == NULL) continue;
      before->flags[i][g] = set->gradients[g]->flags;
      if (is_fault("reduce-read-only-refused")) set->gradients[g]->flags = 0;
    }
  }
}

static void restore(const stg_reduce_gradients_args* args, const kept* before) {
  for (uint64_t i = 0; i < args->num_sets; ++i) {
    stg_gradient_set* set = args->sets[i];
    set->weight = before->weights[i];
    set->release = before->releases[i];
    for (uint64_t g = 0; g < set->num_gradients && g < 8; ++g) {
      if (set->gradients[g] != NULL && !before->were_null[i][g]) set->gradients[g]->flags = before->flags[i][g];
    }
  }
}

static void change_result(const stg_reduce_gradients_args* args, uint64_t set, uint64_t g, int was_null) {
  const stg_tensor_view* view = &args->sets[set]->gradients[g]->view;
  float* floats = (float*)(void*)seq_data(view);
  double* doubles = (double*)(void*)seq_data(view);
  const int is_double = view->dtype.bits == 64;
  for (int64_t i = 0; i < seq_numel(view); ++i) {
    if (is_double && is_fault("reduce-trains-in-float64")) doubles[i] = (double)(float)doubles[i];
    if (!is_double && is_fault("reduce-trains-in-float32")) floats[i] *= 1.001f;
    if (!is_double && is_fault("reduce-sum-ignores-weights") && args->op == STG_REDUCE_SUM)
      floats[i] *= (float)args->sets[0]->weight;
    if (!is_double && is_fault("reduce-null-in-some-is-zero") && was_null) floats[i] = 0;
    if (is_double && is_fault("reduce-trains-on-caller-thread") && create_flags != 0 && set == 0) doubles[i] += 0.001;
  }
}

static void change_results(const stg_reduce_gradients_args* args, const kept* before) {
  static const int64_t shape[] = {3};
  static const stg_dtype float32 = {STG_DTYPE_FLOAT, 32, 1};
  for (uint64_t i = 0; i < args->num_sets; ++i) {
    stg_gradient_set* set = args->sets[i];
    for (uint64_t g = 0; g < set->num_gradients && g < 8; ++g) {
      if (set->gradients[g] != NULL) {
        change_result(args, i, g, before->were_null[i][g]);
      } else if (is_fault("reduce-null-in-all-stays-null")) {
        set->gradients[g] = seq_new_tensor(float32, 1, shape);
      }
    }
  }
}

static stg_error* forgive_some(stg_error* error) {
  error = forgive("reduce-overlap-refused", error, "overlap in memory");
  error = forgive("reduce-stride-0-refused", error, "a stride of 0");
  error = forgive("reduce-wild-shapes-refused", error, "byte_offset that overflows");
  return forgive("reduce-mismatches-refused", error, "one per device");
}

WRAP(stg_error*, seq_reduce_gradients, stg_strategy* self, const stg_call* call, const stg_reduce_gradients_args* args) {
  if (is_fault("reduce-modelless-only") && self != NULL && self->state == STG_STATE_CREATED) return NULL;
  if (args == NULL || args->struct_size != sizeof *args || args->sets == NULL || args->num_sets > 64)
    return __real_seq_reduce_gradients(self, call, args);
  kept* before = calloc(1, sizeof *before);
  change(args, before);
  stg_error* error = __real_seq_reduce_gradients(self, call, args);
  restore(args, before);
  if (error == NULL) change_results(args, before);
  free(before);
  return forgive_some(error);
}
