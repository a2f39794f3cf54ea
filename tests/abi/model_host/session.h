/* SPDX-License-Identifier: Apache-2.0
 *
 * One instance of the strategy with one model, its batches, and the check at the end that everything was given back.
 */
#ifndef SESSION_H
#define SESSION_H

#include "mlp.h"

#define MAX_ROWS 16

typedef struct batch {
  int64_t num_rows;
  float inputs[MAX_ROWS][MLP_NUM_FEATURES];
  float targets[MAX_ROWS];
  float mask[MAX_ROWS];
} batch;

typedef struct session {
  mlp model;
  stg_strategy* strategy; /* null after a failure, which is counted */
} session;

/* Created and set up for `stage`. The model has bind unless `is_plain`. */
int open_session(session* out, int is_plain, uint64_t create_flags, uint64_t stage);
stg_error* set_up(session* of, uint64_t stage, stg_tree* state);
/* Destroys the instance and checks that no replica, graph, reference, tensor or tree is left, and that the model saw no wrong call. */
void close_session(session* of);

void make_batch(batch* out, int64_t num_rows, uint32_t seed);
stg_tree batch_tree(const batch* from, int with_mask); /* owned: it is moved when given to a function */
stg_tree borrowed(const stg_tree* of);

/* Steps. `tree` is moved or borrowed. The result is zeroed first; its outputs are the caller's. */
stg_error* train_batch(const session* of, const stg_call* call, stg_tree* tree, double lr, uint64_t flags, stg_step_result* out,
                       stg_update_result* update);
stg_error* training_step(const session* of, stg_tree* tree, stg_step_result* out);
stg_error* optimizer_step(const session* of, double lr, stg_update_result* update);
stg_error* validation_step(const session* of, stg_tree* tree, stg_step_result* out);
/* train_batch with one micro-batch, moved, the outputs released. */
stg_error* train_on(const session* of, const batch* from, double lr);

/* The root's weights, through describe_parameters. */
void read_weights_of(const session* of, weights* out);
void check_weights(const session* of, const weights* expected, double tolerance, const char* where);
void check_equal_weights(const session* a, const session* b, const char* where); /* bitwise */
/* One step of plain SGD on the reference. */
void update_reference(weights* at, batch* from, double lr);
double loss_of(const stg_step_result* result);

#endif
