/* SPDX-License-Identifier: Apache-2.0
 *
 * reduce_gradients: for a host with its own model and optimizer, the one function that it needs. All sets are checked before
 * anything is written, so that an error leaves them as they were.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sequential.h"

typedef struct reduction {
  stg_gradient_set* sets; /* copies of the size compiled here; `gradients` still points to the host's slots */
  uint64_t num_sets;
  uint64_t num_gradients;
  int is_mean;
  int exponent; /* weights are divided by 2^exponent, which costs no bits, so that their sum is a number */
  double total_weight;
  stg_tensor** added; /* num_sets x num_gradients: what fills null slots */
} reduction;

static stg_tensor* slot(const reduction* state, uint64_t set, uint64_t index) { return state->sets[set].gradients[index]; }

static int is_read(const reduction* state, uint64_t set) { return !state->is_mean || state->sets[set].weight != 0; }

/* ---- checks ---- */

static stg_error* check_sets(const stg_strategy* self, const stg_reduce_gradients_args* args, reduction* state) {
  if (args->op > STG_REDUCE_SUM)
    return seq_error(STG_INVALID_ARGUMENT, "op is %" PRIu64 "; only mean and sum reduce gradients", args->op);
  double largest = 0;
  for (uint64_t i = 0; i < state->num_sets; ++i) {
    const stg_gradient_set* set = &state->sets[i];
    if (set->device.kind != STG_DEVICE_CPU || set->device.index != self->devices[i].index) {
      return seq_error(STG_INVALID_ARGUMENT, "set %" PRIu64 " is for device index %d; the instance's device there is cpu:%d", i,
                       (int)set->device.index, (int)self->devices[i].index);
    }
    stg_error* error = seq_check_stream(&set->stream, "set", i);
    if (error != NULL) return error;
    if (!isfinite(set->weight) || set->weight < 0) {
      return seq_error(STG_INVALID_ARGUMENT, "set %" PRIu64 ": weight %g; it must be a number >= 0", i, set->weight);
    }
    if (set->num_gradients != state->sets[0].num_gradients) {
      return seq_error(STG_INVALID_ARGUMENT, "set %" PRIu64 " has %" PRIu64 " gradients, set 0 has %" PRIu64, i,
                       set->num_gradients, state->sets[0].num_gradients);
    }
    if (set->num_gradients > 0 && set->gradients == NULL) {
      return seq_error(STG_INVALID_ARGUMENT, "set %" PRIu64 ": gradients is null", i);
    }
    if (set->weight > largest) largest = set->weight;
  }
  frexp(largest, &state->exponent);
  for (uint64_t i = 0; i < state->num_sets; ++i) state->total_weight += ldexp(state->sets[i].weight, -state->exponent);
  if (state->is_mean && state->total_weight == 0) return seq_error(STG_INVALID_ARGUMENT, "all weights are 0: a mean of nothing");
  return NULL;
}

static const char* gradient_fault(const stg_tensor* gradient) {
  const char* fault = seq_tensor_fault(gradient);
  if (fault != NULL) return fault;
  if ((gradient->flags & STG_TENSOR_READ_ONLY) != 0) return "read-only memory, but it is reduced in place";
  for (int32_t dim = 0; dim < gradient->view.num_dims; ++dim) {
    if (gradient->view.strides != NULL && gradient->view.shape[dim] > 1 && gradient->view.strides[dim] == 0) {
      return "a stride of 0: several elements are one place in memory";
    }
  }
  return NULL;
}

static stg_error* check_gradient(const reduction* state, uint64_t set, uint64_t index) {
  const stg_tensor *gradient = slot(state, set, index), *first = NULL;
  if (gradient == NULL) return NULL;
  const char* fault = gradient_fault(gradient);
  if (fault != NULL) return seq_error(STG_INVALID_ARGUMENT, "gradient %" PRIu64 " of set %" PRIu64 " has %s", index, set, fault);
  const int is_float =
      seq_is_dtype(gradient->view.dtype, STG_DTYPE_FLOAT, 32) || seq_is_dtype(gradient->view.dtype, STG_DTYPE_FLOAT, 64);
  if (!is_float || !seq_is_contiguous(&gradient->view)) {
    char text[128];
    seq_describe(&gradient->view, text, sizeof text);
    return seq_error(STG_UNIMPLEMENTED,
                     "gradient %" PRIu64 " of set %" PRIu64
                     " is %s%s; this strategy reduces row-major float32 and "
                     "float64",
                     index, set, text, is_float ? " with strides" : "");
  }
  for (uint64_t i = 0; first == NULL; ++i) first = slot(state, i, index);
  if (!seq_same_shape(&gradient->view, &first->view) ||
      memcmp(&gradient->view.dtype, &first->view.dtype, sizeof(stg_dtype)) != 0) {
    char here[128], there[128];
    seq_describe(&gradient->view, here, sizeof here);
    seq_describe(&first->view, there, sizeof there);
    return seq_error(STG_INVALID_ARGUMENT, "gradient %" PRIu64 ": set %" PRIu64 " has %s, an earlier set %s", index, set, here,
                     there);
  }
  return NULL;
}

typedef struct range {
  const char* begin;
  const char* end;
  uint64_t set;
  uint64_t index;
} range;

static int compare_ranges(const void* a, const void* b) {
  const range *x = a, *y = b;
  return x->begin < y->begin ? -1 : x->begin > y->begin;
}

static stg_error* check_overlap(const reduction* state) {
  const uint64_t capacity = state->num_sets * state->num_gradients;
  range* ranges = calloc(capacity + 1, sizeof *ranges);
  uint64_t num_ranges = 0;
  stg_error* error = NULL;
  if (ranges == NULL) return seq_out_of_memory();
  for (uint64_t set = 0; set < state->num_sets; ++set) {
    for (uint64_t index = 0; index < state->num_gradients; ++index) {
      const stg_tensor* gradient = slot(state, set, index);
      const int64_t numel = gradient == NULL ? 0 : seq_numel(&gradient->view);
      if (numel == 0) continue;
      const char* begin = seq_data(&gradient->view);
      const range added = {begin, begin + (uint64_t)numel * seq_element_bytes(gradient->view.dtype), set, index};
      ranges[num_ranges++] = added;
    }
  }
  qsort(ranges, num_ranges, sizeof *ranges, compare_ranges);
  for (uint64_t i = 1; error == NULL && i < num_ranges; ++i) {
    const range *a = &ranges[i - 1], *b = &ranges[i];
    if (b->begin >= a->end) continue;
    error = seq_error(STG_INVALID_ARGUMENT,
                      "gradient %" PRIu64 " of set %" PRIu64 " and gradient %" PRIu64 " of set %" PRIu64 " overlap in memory",
                      a->index, a->set, b->index, b->set);
  }
  free(ranges);
  return error;
}

/* ---- the reduction ---- */

/* A slot that is null here but not everywhere gets a new tensor. All are made before anything is written. */
static stg_error* add_tensors(reduction* state) {
  state->added = calloc(state->num_sets * state->num_gradients + 1, sizeof(stg_tensor*));
  if (state->added == NULL) return seq_out_of_memory();
  for (uint64_t index = 0; index < state->num_gradients; ++index) {
    const stg_tensor* like = NULL;
    for (uint64_t set = 0; like == NULL && set < state->num_sets; ++set) like = slot(state, set, index);
    for (uint64_t set = 0; like != NULL && set < state->num_sets; ++set) {
      if (slot(state, set, index) != NULL) continue;
      stg_tensor* made = seq_new_tensor(like->view.dtype, like->view.num_dims, like->view.shape);
      if (made == NULL) return seq_out_of_memory();
      state->added[set * state->num_gradients + index] = made;
    }
  }
  return NULL;
}

static double read_element(const stg_tensor_view* view, int64_t at) {
  const char* data = seq_data(view);
  return view->dtype.bits == 32 ? (double)((const float*)(const void*)data)[at] : ((const double*)(const void*)data)[at];
}

static void write_element(const stg_tensor_view* view, int64_t at, double value) {
  char* data = seq_data(view);
  if (view->dtype.bits == 32) {
    ((float*)(void*)data)[at] = (float)value;
  } else {
    ((double*)(void*)data)[at] = value;
  }
}

/* Summed in double, in the order of the sets: every set gets the same bits. */
static void reduce_slot(const reduction* state, uint64_t index) {
  const stg_tensor* like = NULL;
  for (uint64_t set = 0; like == NULL && set < state->num_sets; ++set) like = slot(state, set, index);
  if (like == NULL) return;
  const int64_t numel = seq_numel(&like->view);
  for (int64_t at = 0; at < numel; ++at) {
    double sum = 0;
    for (uint64_t set = 0; set < state->num_sets; ++set) {
      const stg_tensor* gradient = slot(state, set, index);
      if (gradient == NULL || !is_read(state, set)) continue;
      sum += (state->is_mean ? ldexp(state->sets[set].weight, -state->exponent) : 1) * read_element(&gradient->view, at);
    }
    if (state->is_mean) sum /= state->total_weight;
    for (uint64_t set = 0; set < state->num_sets; ++set) {
      stg_tensor* to = slot(state, set, index);
      if (to == NULL) to = state->added[set * state->num_gradients + index];
      write_element(&to->view, at, sum);
    }
  }
}

static stg_error* reduce(stg_strategy* self, const stg_call* call, const stg_reduce_gradients_args* args, reduction* state) {
  state->is_mean = args->op == STG_REDUCE_MEAN;
  state->num_gradients = state->sets[0].num_gradients;
  stg_error* error = check_sets(self, args, state);
  for (uint64_t set = 0; set < state->num_sets; ++set) {
    for (uint64_t index = 0; error == NULL && index < state->num_gradients; ++index) error = check_gradient(state, set, index);
  }
  if (error == NULL) error = check_overlap(state);
  if (error == NULL) error = add_tensors(state);
  if (error == NULL) error = seq_check_time(self, call, "the reduction", -1);
  if (error == NULL) {
    for (uint64_t index = 0; index < state->num_gradients; ++index) reduce_slot(state, index);
  }
  for (uint64_t i = 0; state->added != NULL && i < state->num_sets * state->num_gradients; ++i) {
    if (error != NULL) {
      seq_release_tensor(state->added[i]);
    } else if (state->added[i] != NULL) {
      state->sets[i / state->num_gradients].gradients[i % state->num_gradients] = state->added[i];
    }
  }
  free(state->added);
  return error;
}

/* The sets that were moved in are released on every return; one that can't be read stays the caller's. */
stg_error* seq_reduce_gradients(stg_strategy* self, const stg_call* call, const stg_reduce_gradients_args* args) {
  stg_reduce_gradients_args read;
  stg_call time;
  stg_error* error = seq_read_struct(&read, sizeof read, args, STG_REDUCE_GRADIENTS_ARGS_MIN_SIZE, "reduce_gradients_args");
  if (error != NULL) return error;
  if (self != NULL && read.num_sets == self->num_devices && read.sets != NULL) {
    reduction state = {calloc(read.num_sets, sizeof(stg_gradient_set)), read.num_sets, 0, 0, 0, 0, NULL};
    if (state.sets == NULL) error = seq_out_of_memory();
    for (uint64_t i = 0; error == NULL && i < read.num_sets; ++i) {
      error = seq_read_struct(&state.sets[i], sizeof *state.sets, read.sets[i], STG_GRADIENT_SET_MIN_SIZE, "gradient_set");
    }
    if (error == NULL && (error = seq_enter(self, SEQ_reduce_gradients, call, &time)) == NULL) {
      error = seq_leave(self, reduce(self, &time, &read, &state));
    }
    free(state.sets);
  } else {
    error = seq_error(STG_INVALID_ARGUMENT, "reduce_gradients: %" PRIu64 " sets; one per device of the instance is needed",
                      read.num_sets);
  }
  for (uint64_t i = 0; read.sets != NULL && i < read.num_sets; ++i) {
    stg_gradient_set* set = read.sets[i];
    stg_gradient_set known;
    stg_error* refused = seq_read_struct(&known, sizeof known, set, STG_GRADIENT_SET_MIN_SIZE, "gradient_set");
    if (refused == NULL && set->release != NULL) set->release(set);
    seq_release_error(refused);
  }
  return error;
}
