/* SPDX-License-Identifier: Apache-2.0
 *
 * A host's own model behind stg_model: a small multi-layer perceptron with a backward written by hand. It watches how it is called:
 * on which thread, how many replicas, graphs and references are alive; and it can be told to fail, to dawdle, or to call back.
 *
 *   prediction = w2 tanh(w1 x + b1) + b2;  loss = mean over the rows (or over the mask's ones) of (prediction - target)^2
 *
 * A batch is {inputs: (n, 3), targets: (n)} with an optional mask: (n), a list or tuple of inputs and targets, or one tensor (n, 4)
 * whose last column is the target. All float32.
 */
#ifndef MLP_H
#define MLP_H

#include <pthread.h>

#include "../support/host.h"

#define MLP_NUM_FEATURES 3
#define MLP_NUM_HIDDEN 4
#define MLP_NUM_PARAMETERS 4

/* What can be asked of it, and what it counted. The host writes the first part only between calls of the strategy. */
typedef struct mlp {
  stg_model table;
  int32_t fail_replica;   /* -1: none; which one fails ... */
  int fail_in;            /* ... and where: MLP_IN_* */
  uint32_t fail_flags;    /* the flags of its error */
  int32_t slow_replica;   /* -1: none; sleeps for 300 ms in its step */
  int is_masked;          /* give the mask's sum as denominator */
  int is_sum;             /* the loss is a sum over the rows, and loss_kind says so */
  int64_t null_parameter; /* -1: none; reports null for this one's gradient */
  int no_deleters;        /* gradients are in the replica's own memory and their deleter is null */
  int only_caller;        /* complain when called on another thread than `caller` */
  pthread_t caller;
  void (*inside)(void* context); /* null: none; called from inside the step of the last replica */
  void* inside_context;
  stg_strategy* destroys;  /* null: none; destroyed from inside the step of the last replica, which must do nothing */
  stg_strategy* aborts;    /* null: none; aborted ... */
  int abort_in;            /* ... in MLP_IN_* */
  stg_tensor* denominator; /* null: none; what replica 0's next step gives as denominator */

  int64_t num_references;
  int64_t num_replicas;
  int64_t num_graphs;
  int64_t num_complaints; /* wrong thread, a batch that was not moved */
  int64_t num_steps;
  int64_t num_told_changed;
  int64_t dataloader_index; /* that `transfer` was last told */
} mlp;

enum { MLP_IN_REPLICATE, MLP_IN_STEP, MLP_IN_BACKWARD, MLP_IN_DESTROY };
#define MLP_FAILURE_TEXT "the model was told to fail"

void new_mlp(mlp* out, int with_bind);

/* Slots that new_mlp leaves null: a batch in shares of 1, 2, 3, ... rows, the last one with what is left; and a transfer that hands the
 * batch on and notes `dataloader_index`. */
stg_error* mlp_split(void* self, stg_replica* replica, const stg_tree* batch, uint64_t num_shares, stg_tree* shares,
                     uint64_t* num_filled);
stg_error* mlp_transfer(void* self, stg_replica* replica, stg_tree* batch, int64_t dataloader_index, stg_tree* out);

/* ---- the same arithmetic without a strategy: one device, the whole batch, double sums ---- */

typedef struct weights {
  double of[MLP_NUM_PARAMETERS][MLP_NUM_HIDDEN * MLP_NUM_FEATURES];
} weights;

extern const int64_t mlp_numel[MLP_NUM_PARAMETERS];

/* The weights that every replica starts from. */
void first_weights(weights* out);
/* One batch: the loss, the predictions (null: not wanted), and the gradient added to `gradient` (null: not wanted) times `scale`.
 * `mask` may be null; the divisor is the number of rows, or the mask's sum, or 1 with `is_sum`. */
double run_reference(const weights* at, int64_t num_rows, float (*inputs)[MLP_NUM_FEATURES], const float* targets,
                     const float* mask, int is_sum, double scale, double* predictions, weights* gradient);

#endif
