/* SPDX-License-Identifier: Apache-2.0
 *
 * Models: the second interface. A model makes replicas of itself on devices, names its parameters and buffers, runs a step on its
 * share of a batch, and runs backward, telling the strategy as each gradient is ready. A host implements this table itself (a
 * framework with its own autograd), or a library does.
 *
 * All that belongs to autograd (graphs, hooks, autocast, gradient mode, generators, thread-local state) lives on the model's side.
 * A strategy only moves, splits, joins, reduces and updates tensors.
 *
 * A replica is called by one thread at a time, different replicas at the same time.
 */
#ifndef STRATAGEM_MODEL_H
#define STRATAGEM_MODEL_H

#include <stratagem/error.h>
#include <stratagem/host.h>
#include <stratagem/value.h>

STG_EXTERN_C_BEGIN

/* Both are the model's own and opaque to everyone else. */
typedef struct stg_replica stg_replica;
typedef struct stg_graph stg_graph;

/* Stages. */
#define STG_STAGE_FIT 0u
#define STG_STAGE_VALIDATE 1u
#define STG_STAGE_TEST 2u
#define STG_STAGE_PREDICT 3u

/* What the loss of a step is over its share. It decides the share's weight when the step reports no denominator. */
#define STG_LOSS_MEAN 0u
#define STG_LOSS_SUM 1u

/* Flags of replicate. */
#define STG_REPLICATE_SKIP_INIT \
  1u /* every pinned parameter and persistent buffer is written before the first step: the model need not give them initial values */

/* How a replica is made. Growing. */
typedef struct stg_replicate_args {
  uint64_t struct_size;
  stg_device device; /* where it lives; a logical CPU device is given with its own index */
  int32_t replica;   /* 0 is the root */
  int32_t num_replicas;
  stg_dtype floating_dtype; /* of its floating parameters and buffers; {0,0,0}: the model's own */
  uint32_t num_threads;     /* intra-op threads for its thread; 0: as they are */
  uint64_t seed;            /* initial weights depend on it alone; its generator on (seed, replica) */
  uint64_t flags;           /* STG_REPLICATE_*; a model may pass over those that it doesn't know */
} stg_replicate_args;
#define STG_REPLICATE_ARGS_MIN_SIZE 48u
STG_ASSERT_SIZE(stg_replicate_args, 48);

/* Flags of a parameter or buffer. */
#define STG_PARAMETER_REQUIRES_GRAD 1u /* not frozen */
#define STG_PARAMETER_PERSISTENT 2u    /* belongs in a checkpoint */
#define STG_PARAMETER_PINNED 4u /* may be written in place, and is valid for the replica's life; else: until the next call */

/* One parameter or buffer. Each storage stands once, with all its names (tied parameters have several; the first is the main one).
 * Growing. */
typedef struct stg_parameter {
  uint64_t struct_size;
  const stg_string *names; /* lifetime: the replica; at least one */
  uint64_t num_names;
  stg_tensor *tensor; /* borrowed, not to be released; lifetime: see STG_PARAMETER_PINNED */
  uint64_t flags;
} stg_parameter;
#define STG_PARAMETER_MIN_SIZE 40u
STG_ASSERT_SIZE(stg_parameter, 40);

/* What a replica is made of. Growing. */
typedef struct stg_model_description {
  uint64_t struct_size;
  const stg_parameter *const *parameters; /* lifetime: until the replica's next describe; the order is that of gradient indices */
  uint64_t num_parameters;
  const stg_parameter *const *buffers; /* lifetime: as parameters */
  uint64_t num_buffers;
  uint64_t loss_kind; /* STG_LOSS_MEAN or STG_LOSS_SUM */
} stg_model_description;
#define STG_MODEL_DESCRIPTION_MIN_SIZE 48u
STG_ASSERT_SIZE(stg_model_description, 48);

/* Flags of a step. */
#define STG_STEP_GRADIENT 1u       /* keep a graph for backward */
#define STG_STEP_INFERENCE 2u      /* outputs will not be differentiated: inference mode */
#define STG_STEP_DETECT_ANOMALY 4u /* a NaN in outputs or gradients is an error that names it; not set under loss scaling */
#define STG_STEP_DETERMINISTIC 8u  /* the same numbers at each run, in the step and its backward; what can't be so is an error */

/* What a step is told. Growing. */
typedef struct stg_step_context {
  uint64_t struct_size;
  stg_device device;
  int32_t replica;
  int32_t num_replicas;
  uint32_t stage;
  uint32_t flags;
  int64_t batch_index;
  int64_t dataloader_index;
  int64_t global_step;      /* optimizer steps done */
  stg_dtype autocast_dtype; /* {0,0,0}: autocast is off */
  uint32_t reserved;        /* 0 */
  stg_stream
      stream; /* the replica's, on an accelerator: the batch is ready on it, and the step and its backward queue their work on it;
                        on a CPU zeros */
} stg_step_context;
#define STG_STEP_CONTEXT_MIN_SIZE 88u
STG_ASSERT_SIZE(stg_step_context, 88);

/* What a step gives back. The caller zeroes it, sets struct_size, and owns what is in it afterwards. Growing. */
typedef struct stg_model_step_result {
  uint64_t struct_size;
  stg_tree outputs; /* in training: the loss, a 0-dim tensor, or a dict with one under "loss" */
  /* How much the share counts: none: its rows; 0: not at all; a number, or a 0-dim tensor on the device (then the caller releases it).
   * A number overrides the loss kind: the loss is then a mean over this denominator. */
  stg_value denominator;
  stg_graph *graph; /* null without STG_STEP_GRADIENT; owned by the caller until backward or release_graph consumes it */
} stg_model_step_result;
#define STG_MODEL_STEP_RESULT_MIN_SIZE 64u
STG_ASSERT_SIZE(stg_model_step_result, 64);

/* Where a model reports gradients: the strategy's functions. Growing; a function table. */
typedef struct stg_gradient_sink {
  uint64_t struct_size;
  void *self; /* lifetime: the backward call */
  /* Parameter `index` has its gradient, in the parameter's shape and on its device. Each index exactly once per backward, in any
   * order; null: the parameter got none. Frozen parameters may be left out, those frozen since setup too; one that was frozen at setup
   * must not come with a gradient. `gradient` is moved, on error too; what is left of backward may still read its memory. `stream` orders
   * it, null: that of the step. On a CPU called on the replica's thread, on an accelerator by autograd's thread of that device. [replica] */
  stg_error *(*ready)(void *self, uint64_t index, stg_tensor *gradient, const stg_stream *stream);
  /* The same for a sparse gradient: int64 `indices` (sparse_dims, n), `values` (n, ...), both moved, and the dense shape. Entries come in
   * any order; those of one place are added. Null: make it dense and call ready. [replica] */
  stg_error *(*ready_sparse)(void *self, uint64_t index, stg_tensor *indices, stg_tensor *values, const int64_t *shape,
                             uint64_t num_dims, const stg_stream *stream);
} stg_gradient_sink;
#define STG_GRADIENT_SINK_MIN_SIZE 32u
STG_ASSERT_SIZE(stg_gradient_sink, 32);

/* A model. Growing; a function table. Functions after `release_graph` may be absent. */
typedef struct stg_model {
  uint64_t struct_size;
  void *self; /* lifetime: until release */
  /* Adds a reference: a strategy does at setup. Null with a null release: the model outlives every strategy and every tensor that one
   * lends (views of export_state and gradients). [any] */
  void (*retain)(void *self);
  /* Drops a reference: at teardown or destroy, or later, with the last tensor that the strategy has lent. [any] */
  void (*release)(void *self);
  /* Makes a replica: `out` is owned by the caller until destroy_replica. Replicas of one seed start from equal weights. [replica] */
  stg_error *(*replicate)(void *self, const stg_replicate_args *args, stg_replica **out);
  /* Destroys `replica`, consumed; no graph of it is left. Of a replica whose memory the strategy has lent, when the last such tensor is
   * released, on the thread that does it, even after the strategy's destroy. [replica] */
  void (*destroy_replica)(void *self, stg_replica *replica);
  /* Lists parameters and buffers; what `out` points to stays the model's. An error for a parameter that has no shape yet, naming
   * it. [replica] */
  stg_error *(*describe)(void *self, stg_replica *replica, stg_model_description *out);
  /* Training (1) or evaluation (0) mode. [replica] */
  stg_error *(*set_mode)(void *self, stg_replica *replica, uint32_t train);
  /* Runs one step on the replica's share of the batch. `batch` is moved in; a graph that reads it keeps it. `result` is the
   * caller's memory. [replica] */
  stg_error *(*step)(void *self, stg_replica *replica, const stg_step_context *context, stg_tree *batch,
                     stg_model_step_result *result);
  /* Runs backward from the loss times `scale` and reports to the sink. Consumes `graph` on every return. An error from the sink
   * ends it and comes back as the cause. `flags`: 0. [replica] */
  stg_error *(*backward)(void *self, stg_replica *replica, stg_graph *graph, double scale, uint32_t flags,
                         const stg_gradient_sink *sink);
  /* Drops `graph` unused, and consumes it. [replica] */
  void (*release_graph)(void *self, stg_replica *replica, stg_graph *graph);

  /* From here on optional. */

  /* Makes parameter `index` (or buffer num_parameters + i) live in `storage`: same shape, dtype and device, writable, kept by the
   * strategy until destroy_replica. The values in `storage` are the parameter's from then on (the strategy has put them there), and
   * describe tells the new memory. `gradient`, null or such a tensor, is where its gradient shall be written (not added); `ready` then
   * gets a handle over it. How replicas on one CPU share their weights. `storage` and `gradient` are borrowed handles
   * over memory that outlives the replica. [replica] */
  stg_error *(*bind)(void *self, stg_replica *replica, uint64_t index, const stg_tensor *storage, const stg_tensor *gradient);
  /* The strategy has written parameters or buffers in place. [replica] */
  stg_error *(*parameters_changed)(void *self, stg_replica *replica);
  /* Splits a batch (borrowed) into at most `num_shares` shares, for packed or ragged batches. Fills `shares` from the front, owned by the
   * caller, and sets `num_filled`. Called on the calling thread, on the root's replica. [replica] */
  stg_error *(*split)(void *self, stg_replica *replica, const stg_tree *batch, uint64_t num_shares, stg_tree *shares,
                      uint64_t *num_filled);
  /* Moves a share to the replica's device: `batch` is moved in, `out` is owned by the caller. Null: the strategy
   * moves every tensor leaf. [replica] */
  stg_error *(*transfer)(void *self, stg_replica *replica, stg_tree *batch, int64_t dataloader_index, stg_tree *out);
  /* Returns when the replica's device has finished what was queued. Null: there is nothing to wait for. [replica] */
  stg_error *(*synchronize)(void *self, stg_replica *replica);
  /* The state of the replica's generator of random numbers: a bytes value, owned by the caller. [replica] */
  stg_error *(*get_generator_state)(void *self, stg_replica *replica, stg_tree *out);
  /* Restores it from the `size_bytes` at `state`, borrowed. [replica] */
  stg_error *(*set_generator_state)(void *self, stg_replica *replica, const uint8_t *state, uint64_t size_bytes);
} stg_model;
#define STG_MODEL_MIN_SIZE 88u /* through release_graph */
STG_ASSERT_SIZE(stg_model, 144);

/* A factory of models, offered by a plugin. Growing. All pointers live as long as the process. */
typedef struct stg_model_factory {
  uint64_t struct_size;
  stg_string name;           /* lifetime: the process */
  stg_string summary;        /* lifetime: the process; one line */
  stg_string options_schema; /* lifetime: the process; the JSON Schema of `options` */
  /* Makes a model from its options (a JSON object, borrowed), checked against the schema by the host. `out` is owned by the
   * caller: one reference, dropped by its `release`. `host` is borrowed, retained if kept; it may be null. [any] */
  stg_error *(*create)(stg_string options_json, const stg_host *host, const stg_model **out);
} stg_model_factory;
#define STG_MODEL_FACTORY_MIN_SIZE 64u
STG_ASSERT_SIZE(stg_model_factory, 64);

STG_EXTERN_C_END
#endif
