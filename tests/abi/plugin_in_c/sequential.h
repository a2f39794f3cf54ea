/* SPDX-License-Identifier: Apache-2.0
 *
 * A strategy plugin in plain C, without the SDK: what the ABI asks of an author when nothing helps. The strategy is called
 * "sequential": N logical CPU devices whose replicas run one after the other on the calling thread, plain SGD, float32.
 *
 *   plugin.c     the probe, the ELF note, the tables                 config.c     the JSON of create
 *   life.c       create, setup, teardown, destroy, queries           enter.c      who may call now: states, threads, fork, time
 *   step.c       forward on every replica, evaluation                split.c      a batch into shares
 *   train.c      training_step, backward, optimizer_step             gather.c     outputs into one tree, the loss into one number
 *   gradients.c  reduce_gradients, for hosts with their own          state.c      export_state, import_state
 *   data.c       what is the identity in one process                 tree.c, tensor.c, errors.c, sizes.c   what all of them need
 *
 * What is small: the strategy itself (train.c) and every slot that it doesn't have (it answers STG_UNIMPLEMENTED). What is big:
 * value trees. A leaf may be taken out of any tree and outlive it, so each leaf of a share keeps the batch alive (split.c), and
 * outputs of any nesting must be joined leaf by leaf with errors that name a path (gather.c). No part of that depends on the
 * strategy: the SDK has it once.
 *
 * What this plugin leaves out, each with a message: models with buffers or other dtypes than float32, gradient clipping, strided
 * gradients, checkpoints on disk, streams.
 */
#ifndef SEQUENTIAL_H
#define SEQUENTIAL_H

#include <pthread.h>
#include <stratagem/abi.h>

/* ---- errors.c: all are flagged STG_ERROR_INSTANCE_USABLE; null means success throughout ---- */

stg_error* seq_error(uint32_t code, const char* format, ...) __attribute__((format(printf, 2, 3)));
stg_error* seq_out_of_memory(void);
/* An error of a model: same code, with `cause` owned by the new one. */
stg_error* seq_replica_error(stg_error* cause, const char* what, int32_t replica, stg_device device);
void seq_release_error(stg_error* error); /* null is allowed */

/* ---- sizes.c: rule B1 ---- */

/* Copies the argument struct `from` into `to` (`known_bytes`, the size compiled here), zeros where `from` is shorter. Refuses null,
 * sizes below the smallest released and above the limit, and bytes past what is known here that are not zero. */
stg_error* seq_read_struct(void* to, uint64_t known_bytes, const void* from, uint64_t min_bytes, const char* name);
/* For result structs and tables: null and the two limits only. */
stg_error* seq_check_size(const void* of, uint64_t min_bytes, const char* name);
/* Writes a result: what both know; lowers the caller's struct_size to it. */
void seq_write_struct(void* to, const void* from, uint64_t known_bytes);

/* ---- tensor.c ---- */

const char* seq_tensor_fault(const stg_tensor* tensor); /* why it can't be used here; null: it can */
int64_t seq_numel(const stg_tensor_view* view);
int seq_is_contiguous(const stg_tensor_view* view);
uint64_t seq_element_bytes(stg_dtype dtype);
int seq_is_dtype(stg_dtype dtype, uint8_t code, uint8_t bits);
int seq_same_shape(const stg_tensor_view* a, const stg_tensor_view* b);
char* seq_data(const stg_tensor_view* view); /* the first element */
/* A new tensor on the CPU, row-major, its data uninitialised; null without memory. */
stg_tensor* seq_new_tensor(stg_dtype dtype, int32_t num_dims, const int64_t* shape);
stg_tensor* seq_copy_tensor(const stg_tensor_view* view);
void seq_copy_elements(char* to, const stg_tensor_view* view); /* any strides in, row-major out */
void seq_release_tensor(stg_tensor* tensor);                   /* null and a null deleter are allowed */
int seq_read_number(const stg_tensor* tensor, double* out);    /* the one element of a real tensor; 0 if it isn't that */
void seq_describe(const stg_tensor_view* view, char* text, uint64_t capacity_bytes); /* "float32 (2, 3)" */

/* ---- tree.c ---- */

/* A batch that several shares read: one reference each, the last one releases the tree. */
typedef struct seq_batch {
  uint64_t references;
  stg_tree tree;
} seq_batch;

/* Where a walk stands, for messages. */
typedef struct seq_path {
  const struct seq_path* parent; /* null at the root */
  stg_string key;                /* of a dict */
  uint64_t index;                /* of a list or tuple, when the key has no data */
} seq_path;

/* Takes a tree as the ABI hands it over: a moved one is consumed on every return, a borrowed one copied. The tree is checked. */
stg_error* seq_take_batch(stg_tree* tree, const char* name, seq_batch** out);
stg_error* seq_check_tree(const stg_value* root, const char* name);
void seq_hold_batch(seq_batch* batch);
void seq_drop_batch(seq_batch* batch); /* null is allowed */

/* An empty tree that owns what seq_tree_alloc gives (zeroed, until its release). */
stg_error* seq_new_tree(stg_tree* out);
void* seq_tree_alloc(stg_tree* tree, uint64_t size_bytes);
int seq_tree_text(stg_tree* tree, stg_value* to, const char* text, uint64_t size_bytes); /* a string leaf; 0 without memory */
/* The same tree with other tensors: what `make` gives for each, null without memory. */
typedef stg_tensor* (*seq_make_tensor)(const stg_tensor* of, void* context);
stg_error* seq_map_tree(const stg_value* root, seq_make_tensor make, void* context, stg_tree* out);
stg_error* seq_copy_tree(const stg_value* root, stg_tree* out);
void seq_release_tree(stg_tree* tree);                             /* a borrowed one is left alone */
const stg_value* seq_find(const stg_value* dict, const char* key); /* null if absent, or no dict */
int seq_same_text(stg_string a, stg_string b);
const char* seq_path_text(const seq_path* path, char* text, uint64_t capacity_bytes);

/* ---- split.c, gather.c ---- */

typedef struct seq_share {
  stg_tree tree;
  int64_t num_rows; /* -1: it has no tensor with rows */
} seq_share;

/* At most `num_shares` shares along dim 0 whose sizes differ by at most one; `num_filled` at least 1. */
stg_error* seq_split(seq_batch* batch, uint64_t num_shares, seq_share* shares, uint64_t* num_filled);
stg_error* seq_count_rows(const stg_value* root, int64_t* num_rows);
/* Joins the outputs (left as they are). `weights` null: evaluation. Else training: the loss becomes one 0-dim number, the weighted
 * mean, or with `is_sum` the sum. */
stg_error* seq_gather(const stg_tree* outputs, uint64_t num_outputs, const double* weights, int is_sum, stg_tree* out);

/* ---- the instance ---- */

/* What a share's weight means for the gradients gathered since the last update. */
enum { SEQ_WINDOW_EMPTY, SEQ_WINDOW_WEIGHTED, SEQ_WINDOW_SUM };

typedef struct seq_replica {
  stg_replica* handle;
  stg_device device;
  stg_model_description description;
  stg_graph* graph; /* of the latest training_step, null once consumed or where the replica had no share */
  double weight;    /* of that step's share */
  int mode;         /* the last set_mode; -1: none yet */
} seq_replica;

struct stg_strategy {
  pthread_mutex_t lock; /* guards the four members below: abort and status come from any thread */
  uint32_t state;
  int is_busy;
  int is_aborted;
  stg_status shown; /* what status answers; refreshed when a call leaves */

  /* From create to destroy. */
  const stg_host* host;
  stg_device* devices;
  uint64_t num_devices;
  uint64_t seed;
  int has_optimizer;
  uint32_t stage;

  /* From setup to teardown. */
  const stg_model* model;
  seq_replica* replicas; /* one per device */
  float** sums;          /* per parameter: the sum of weight x gradient since the last update */
  int* has_sum;          /* per parameter: whether any gradient came */
  double* weights;       /* of the latest step, one per replica that ran */
  uint64_t num_weights;
  double total_weight;
  int window;      /* SEQ_WINDOW_* of what is summed */
  int step_window; /* SEQ_WINDOW_* of the latest training_step */
  int has_graph;
  uint64_t num_micro_batches;
  uint64_t num_updates;
};

/* ---- config.c ---- */

typedef struct seq_config {
  int32_t* devices; /* logical indices, the first is the root; malloc'ed */
  uint64_t num_devices;
  uint64_t seed;
  int has_optimizer;
} seq_config;

#define SEQ_MAX_DEVICES 256

stg_error* seq_read_config(stg_string json, seq_config* out);

/* ---- enter.c ---- */

/* One number per function of the table, so that its row of states.h can be looked up. */
#define SEQ_NUMBER(function, who, states) SEQ_##function,
typedef enum seq_function { STG_STRATEGY_FUNCTIONS(SEQ_NUMBER) SEQ_NUM_FUNCTIONS } seq_function;

/* First thing in every function of an instance: is it legal now, and from here? `call` (the caller's, null allowed) is copied to
 * `call_out` unless that is null. After success seq_leave must follow; it hands `error` back. */
stg_error* seq_enter(stg_strategy* self, seq_function function, const stg_call* call, stg_call* call_out);
stg_error* seq_leave(stg_strategy* self, stg_error* error);
stg_error* seq_check_alive(const stg_strategy* self); /* for queries: null instance, fork */
stg_error* seq_check_process(void);                   /* of the same, what create needs */
stg_error* seq_check_stream(const stg_stream* stream, const char* of, uint64_t index);
/* Between two callbacks: aborted, cancelled, or past the deadline? `before` says what would have come next. */
stg_error* seq_check_time(stg_strategy* self, const stg_call* call, const char* before, int32_t replica);
void seq_watch_forks(void);
void seq_log(const stg_strategy* self, uint32_t level, const char* text);

/* ---- the functions of the table ---- */

stg_error* seq_create(const stg_create_args* args, stg_strategy** out);
void seq_destroy(stg_strategy* self);
void seq_abort(stg_strategy* self);
stg_error* seq_status(stg_strategy* self, stg_status* out);
stg_error* seq_devices(stg_strategy* self, const stg_device** out, uint64_t* num_devices);
stg_error* seq_ranks(stg_strategy* self, stg_ranks* out);
stg_error* seq_setup(stg_strategy* self, const stg_call* call, const stg_setup_args* args);
stg_error* seq_teardown(stg_strategy* self, const stg_call* call);
stg_error* seq_describe_parameters(stg_strategy* self, stg_model_description* out);
stg_error* seq_batch_to_device(stg_strategy* self, const stg_call* call, const stg_transfer_args* args, stg_tree* out);
stg_error* seq_broadcast(stg_strategy* self, const stg_call* call, stg_tree* object, int32_t src, stg_tree* out);
stg_error* seq_all_gather(stg_strategy* self, const stg_call* call, stg_tree* object, stg_tree* out);
stg_error* seq_to_host(stg_strategy* self, const stg_call* call, stg_tree* object, stg_tree* out);
stg_error* seq_reduce_boolean_decision(stg_strategy* self, const stg_call* call, uint32_t decision, uint32_t mode, uint32_t* out);
stg_error* seq_barrier(stg_strategy* self, const stg_call* call, stg_string name);
stg_error* seq_training_step(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out);
stg_error* seq_backward(stg_strategy* self, const stg_call* call, uint64_t flags);
stg_error* seq_optimizer_step(stg_strategy* self, const stg_call* call, const stg_update_args* args, stg_update_result* out);
stg_error* seq_train_batch(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out,
                           stg_update_result* update);
stg_error* seq_zero_grad(stg_strategy* self, const stg_call* call);
stg_error* seq_validation_step(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out);
stg_error* seq_test_step(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out);
stg_error* seq_predict_step(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out);
stg_error* seq_reduce_gradients(stg_strategy* self, const stg_call* call, const stg_reduce_gradients_args* args);
stg_error* seq_export_state(stg_strategy* self, const stg_call* call, uint64_t flags, stg_tree* out);
stg_error* seq_import_state(stg_strategy* self, const stg_call* call, stg_tree* state, uint64_t flags, stg_tree* report);

/* ---- parts of those, used in several files ---- */

typedef struct seq_step {
  uint32_t stage;
  uint64_t flags; /* STG_BATCH_* */
  int64_t batch_index;
  int64_t dataloader_index;
  int64_t global_step;
} seq_step;

/* step.c: the forward of every replica; keeps graphs and weights when the stage is fit. */
stg_error* seq_forward(stg_strategy* self, const stg_call* call, const seq_step* step, seq_batch* batch, stg_tree* outputs);
/* train.c */
void seq_drop_graphs(stg_strategy* self);
void seq_clear_gradients(stg_strategy* self); /* and graphs, weights, the count of micro-batches */
/* state.c: into the replicas of an instance that is being set up or running. */
stg_error* seq_apply_state(stg_strategy* self, const stg_value* state, uint64_t flags, stg_tree* report);
/* life.c: tells each model replica that its parameters were written. */
stg_error* seq_tell_parameters_changed(stg_strategy* self);

#endif
