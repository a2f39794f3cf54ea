/* SPDX-License-Identifier: Apache-2.0
 *
 * Strategies: how training is spread over devices. One table of functions, used on an instance that `create` made. The members carry
 * the names of PyTorch Lightning's strategy interface; what each means is in docs/semantics.md, when each is legal in states.h.
 *
 * Every function but abort, status, devices and ranks is for one caller at a time. A function that a plugin doesn't have is a null
 * slot, or answers STG_UNIMPLEMENTED; both are normal.
 */
#ifndef STRATAGEM_STRATEGY_H
#define STRATAGEM_STRATEGY_H

#include <stratagem/call.h>
#include <stratagem/model.h>
#include <stratagem/states.h>

STG_EXTERN_C_BEGIN

typedef struct stg_strategy stg_strategy; /* an instance; the plugin's own */

/* ---- life ---- */

/* Flags of create. */
#define STG_CREATE_CALLER_THREAD_ONLY \
  1u /* replicas run one after the other on the calling thread, and every host function is called
                                            only there, inside a call; same results */

/* Growing. */
typedef struct stg_create_args {
  uint64_t struct_size;
  /* Borrowed; one JSON object with "accelerator" ("cpu", "cuda", "auto"), "devices" (a count, "auto", or a list of indices whose first
   * is the root), "precision", "optimizer" ({"name", "lr", ...} or absent: the host's own), "seed", "deterministic", "threads"
   * (intra-op threads of all replicas together; absent: the process's), "options" (by the factory's schema). All optional. */
  stg_string config_json;
  const stg_host *host; /* borrowed, retained by the instance; null: no services */
  uint64_t flags;
} stg_create_args;
#define STG_CREATE_ARGS_MIN_SIZE 40u
STG_ASSERT_SIZE(stg_create_args, 40);

/* What an instance is doing. Growing. */
typedef struct stg_status {
  uint64_t struct_size;
  uint32_t state;             /* one of STG_STATE_* */
  uint32_t stage;             /* the stage of setup; STG_STAGE_FIT before it */
  uint64_t num_micro_batches; /* backward calls since the last update */
  uint64_t num_updates;       /* optimizer steps done; part of the state */
  uint64_t has_graph;         /* 1: a training_step waits for its backward */
} stg_status;
#define STG_STATUS_MIN_SIZE 40u
STG_ASSERT_SIZE(stg_status, 40);

/* Where this process stands among several. Growing. */
typedef struct stg_ranks {
  uint64_t struct_size;
  int32_t global_rank;
  int32_t local_rank;
  int32_t node_rank;
  int32_t world_size; /* processes, not devices */
} stg_ranks;
#define STG_RANKS_MIN_SIZE 24u
STG_ASSERT_SIZE(stg_ranks, 24);

/* Growing. */
typedef struct stg_setup_args {
  uint64_t struct_size;
  const stg_model *model; /* borrowed, retained by the instance; null: reduce_gradients only */
  stg_tree *state;        /* a state to begin from, moved; null: the model's own weights */
  uint64_t stage;         /* STG_STAGE_*; the optimizer exists only for STG_STAGE_FIT */
} stg_setup_args;
#define STG_SETUP_ARGS_MIN_SIZE 32u
STG_ASSERT_SIZE(stg_setup_args, 32);

/* ---- data ---- */

/* Growing. */
typedef struct stg_transfer_args {
  uint64_t struct_size;
  stg_tree *batch;   /* moved or borrowed */
  stg_device device; /* {STG_DEVICE_NONE, -1}: as the strategy chooses */
  int64_t dataloader_index;
} stg_transfer_args;
#define STG_TRANSFER_ARGS_MIN_SIZE 32u
STG_ASSERT_SIZE(stg_transfer_args, 32);

/* Reductions. */
#define STG_REDUCE_MEAN 0u
#define STG_REDUCE_SUM 1u
#define STG_REDUCE_MIN 2u
#define STG_REDUCE_MAX 3u

/* How ranks' decisions become one. */
#define STG_DECIDE_ALL 0u
#define STG_DECIDE_ANY 1u

/* ---- steps ---- */

/* Gradient clipping. */
#define STG_CLIP_NONE 0u
#define STG_CLIP_NORM 1u  /* scale the whole gradient so that its 2-norm is at most the limit */
#define STG_CLIP_VALUE 2u /* cut each element to [-limit, limit] */

/* What an update is to use. Growing. */
typedef struct stg_update_args {
  uint64_t struct_size;
  double lr;         /* learning rate of this update */
  double clip_limit; /* > 0 with clipping */
  uint64_t clip;     /* STG_CLIP_* */
} stg_update_args;
#define STG_UPDATE_ARGS_MIN_SIZE 32u
STG_ASSERT_SIZE(stg_update_args, 32);

/* What became of an update. */
#define STG_UPDATE_NONE 0u /* no update was due (more micro-batches follow) */
#define STG_UPDATE_DONE 1u
#define STG_UPDATE_SKIPPED_OVERFLOW 2u  /* 16-mixed: a gradient overflowed; the scale was lowered */
#define STG_UPDATE_SKIPPED_NO_WEIGHT 3u /* all denominators were 0 */

/* Growing. */
typedef struct stg_update_result {
  uint64_t struct_size;
  uint64_t outcome;     /* STG_UPDATE_* */
  double gradient_norm; /* 2-norm before clipping; NaN where it was not needed (no clipping by norm) */
  double total_weight;  /* sum of denominators over replicas and micro-batches */
  double loss_scale;    /* in force after the update; 1 without scaling */
} stg_update_result;
#define STG_UPDATE_RESULT_MIN_SIZE 40u
STG_ASSERT_SIZE(stg_update_result, 40);

/* Flags of training_step, backward and train_batch. */
#define STG_BATCH_LAST_MICRO_BATCH 1u /* the update follows this micro-batch: the reduction may start */
#define STG_BATCH_DETECT_ANOMALY 2u /* a NaN in loss or gradients is an error that names it; with loss scaling in the loss only */

/* Growing. */
typedef struct stg_step_args {
  uint64_t struct_size;
  stg_tree *batch;    /* moved or borrowed; null with `announced` */
  uint64_t announced; /* a ticket of announce_batch, used up by this; 0: none */
  int64_t batch_index;
  int64_t dataloader_index;
  int64_t global_step;
  const stg_update_args *update; /* borrowed; train_batch with STG_BATCH_LAST_MICRO_BATCH only, else null */
  uint64_t flags;
} stg_step_args;
#define STG_STEP_ARGS_MIN_SIZE 64u
STG_ASSERT_SIZE(stg_step_args, 64);

/* The caller sets struct_size and zeroes the rest. Growing. */
typedef struct stg_step_result {
  uint64_t struct_size;
  stg_tree outputs; /* gathered on the root device; owned by the caller */
  const double
      *weights; /* one per replica that ran: its rows or its denominator; lifetime: until the next step of the instance */
  uint64_t num_weights;
} stg_step_result;
#define STG_STEP_RESULT_MIN_SIZE 56u
STG_ASSERT_SIZE(stg_step_result, 56);

/* ---- gradients of a host's own ---- */

/* One device's gradients. Growing. */
typedef struct stg_gradient_set {
  uint64_t struct_size;
  stg_device device; /* a logical CPU device has its own index here; the tensors say cpu 0 */
  stg_stream stream; /* on which the gradients are ready, and the results will be; zeros on a CPU */
  double weight;     /* >= 0; a set of weight 0 is not read under STG_REDUCE_MEAN */
  /* `num_gradients` tensors, null: none. Written in place; a slot that is null here but not in every set gets a new tensor, which the
   * caller releases. Lifetime: the call, or until release. */
  stg_tensor **gradients;
  uint64_t num_gradients;
  void *owner; /* the maker's own; lifetime: until release */
  /* Null: borrowed. Else the set is moved, and this is called when its last reader is done. [any] */
  void (*release)(struct stg_gradient_set *self);
} stg_gradient_set;
#define STG_GRADIENT_SET_MIN_SIZE 80u
STG_ASSERT_SIZE(stg_gradient_set, 80);

/* Growing. */
typedef struct stg_reduce_gradients_args {
  uint64_t struct_size;
  stg_gradient_set *const *sets; /* one per device of the instance, in their order; lifetime: the call */
  uint64_t num_sets;
  uint64_t op; /* STG_REDUCE_MEAN: sum of w_i g_i over sum of w_i, which must not be 0; STG_REDUCE_SUM: sum of g_i; others are
                  refused */
} stg_reduce_gradients_args;
#define STG_REDUCE_GRADIENTS_ARGS_MIN_SIZE 32u
STG_ASSERT_SIZE(stg_reduce_gradients_args, 32);

/* ---- state ----
 *
 * A state is a dict whose layout is part of the ABI, so that a swap works between authors:
 *   format      int64, 1
 *   model       dict: main name -> tensor (parameters and persistent buffers)
 *   aliases     dict: other name -> main name
 *   optimizer   dict: name (string), step (int64), per_parameter (dict: main name -> dict: slot -> tensor); none without an optimizer
 *   scaler      dict: scale (double), good_steps (int64); none without loss scaling
 *   generators  list of bytes, one per replica; more than there are replicas are kept and handed on
 * Unknown keys are kept out and reported. */
#define STG_STATE_FORMAT 1

/* Flags of export_state, and of import_state and load. */
#define STG_EXPORT_COPY \
  1u /* export_state: copies; else views, valid until the next call that changes weights (copies too with
                                STG_CREATE_CALLER_THREAD_ONLY). Views keep the model's replicas alive: see model.h */
#define STG_IMPORT_STRICT \
  1u /* import_state, load: a missing, unexpected or differently shaped tensor is an error that lists them all */

/* Growing. */
typedef struct stg_checkpoint_args {
  uint64_t struct_size;
  stg_string path;      /* the folder; borrowed */
  stg_string host_json; /* save: kept beside the state, given back by load (loop, loader, schedule); borrowed */
  uint64_t flags;       /* load: STG_IMPORT_STRICT */
} stg_checkpoint_args;
#define STG_CHECKPOINT_ARGS_MIN_SIZE 48u
STG_ASSERT_SIZE(stg_checkpoint_args, 48);

/* The functions of a strategy. Growing; a function table. `self` is the instance. `call` is borrowed, null: no deadline.
 * `batch`, `object` and `state` are moved or borrowed. */
typedef struct stg_strategy_api {
  uint64_t struct_size;

  /* Makes an instance, `out`, owned by the caller until destroy: reads its config and finds its devices; starts nothing. [any] */
  stg_error *(*create)(const stg_create_args *args, stg_strategy **out);
  /* Ends an instance, `self`, in any state: consumes it and joins its threads; tensors that it returned stay valid. From inside one of
   * the instance's callbacks, on whatever thread, it does nothing. Null is allowed. [owner, all] */
  void (*destroy)(stg_strategy *self);
  /* Makes the call in progress return STG_ABORTED as soon as it can; the instance is then draining. A setup or teardown that it comes
   * into ends so too. [any, all] */
  void (*abort)(stg_strategy *self);
  /* Fills `out`. [any, all] */
  stg_error *(*status)(stg_strategy *self, stg_status *out);

  /* The devices, the first is the root. `out` lives until destroy. [any, all] */
  stg_error *(*devices)(stg_strategy *self, const stg_device **out, uint64_t *num_devices);
  /* Fills `out`. [any, all] */
  stg_error *(*ranks)(stg_strategy *self, stg_ranks *out);

  /* Puts the model on the devices, makes the optimizer, starts the threads. On an error the instance is as before. [owner, created] */
  stg_error *(*setup)(stg_strategy *self, const stg_call *call, const stg_setup_args *args);
  /* Model and optimizer go, threads end; setup may follow. Does nothing before setup. [owner, created fit evaluate modelless] */
  stg_error *(*teardown)(stg_strategy *self, const stg_call *call);
  /* The root's parameters and buffers; what `out` points to lives until teardown, of a model with memory that isn't
   * STG_PARAMETER_PINNED until the instance's next call. [owner, fit evaluate] */
  stg_error *(*describe_parameters)(stg_strategy *self, stg_model_description *out);

  /* The whole model to the root, replicas refreshed from it. [owner, fit evaluate] */
  stg_error *(*model_to_device)(stg_strategy *self, const stg_call *call);
  /* Moves a batch (structure and other leaves kept) as the strategy needs it, or to the device named. [owner, live] */
  stg_error *(*batch_to_device)(stg_strategy *self, const stg_call *call, const stg_transfer_args *args, stg_tree *out);
  /* The object of rank `src` on every rank. `object` is moved or borrowed. [owner, live] */
  stg_error *(*broadcast)(stg_strategy *self, const stg_call *call, stg_tree *object, int32_t src, stg_tree *out);
  /* Every rank's tree, tensors joined in a new first dimension when there are several ranks; one process: unchanged. [owner, live] */
  stg_error *(*all_gather)(stg_strategy *self, const stg_call *call, stg_tree *object, stg_tree *out);
  /* Every tensor leaf becomes one number over all its elements (STG_REDUCE_*), 0-dim; other leaves pass. [owner, live] */
  stg_error *(*reduce)(stg_strategy *self, const stg_call *call, stg_tree *object, uint32_t op, stg_tree *out);
  /* One decision (0 or 1) of all ranks (STG_DECIDE_*). [owner, live] */
  stg_error *(*reduce_boolean_decision)(stg_strategy *self, const stg_call *call, uint32_t decision, uint32_t mode,
                                        uint32_t *out);
  /* Returns when every device's work is done and every rank has entered the barrier of this name. [owner, live] */
  stg_error *(*barrier)(stg_strategy *self, const stg_call *call, stg_string name);
  /* Every tensor leaf in host memory, finished: how a host without CUDA reads a loss. [owner, live] */
  stg_error *(*to_host)(stg_strategy *self, const stg_call *call, stg_tree *object, stg_tree *out);
  /* Takes the next batch early (must be moved, with no device), so that its split and copies overlap the running step. `ticket` (never
   * 0) goes into the args of one step of this stage and dataloader_index, on which what is wrong with the batch is told, and which uses
   * it up, on an error too. Two batches may wait, the next step's and the one after: a third takes the older one's place, and teardown
   * drops them. [owner, fit evaluate] */
  stg_error *(*announce_batch)(stg_strategy *self, const stg_call *call, const stg_transfer_args *args, uint32_t stage,
                               uint64_t *ticket);

  /* Splits the batch, runs every replica's forward, gathers; keeps the graphs. A second one drops the graphs of the first. [owner, fit] */
  stg_error *(*training_step)(stg_strategy *self, const stg_call *call, const stg_step_args *args, stg_step_result *out);
  /* Consumes the latest graphs. `flags`: STG_BATCH_LAST_MICRO_BATCH starts the reduction. [owner, fit] */
  stg_error *(*backward)(stg_strategy *self, const stg_call *call, uint64_t flags);
  /* Reduces if backward did not, unscales, clips, updates, and clears gradients. `out` may be null. [owner, fit] */
  stg_error *(*optimizer_step)(stg_strategy *self, const stg_call *call, const stg_update_args *args, stg_update_result *out);
  /* training_step, backward and, with STG_BATCH_LAST_MICRO_BATCH, optimizer_step in one hand-off; bitwise equal to them. `update`: the
   * caller's memory, may be null. [owner, fit] */
  stg_error *(*train_batch)(stg_strategy *self, const stg_call *call, const stg_step_args *args, stg_step_result *out,
                            stg_update_result *update);
  /* Drops gradients, weights and graphs gathered since the last update. [owner, fit] */
  stg_error *(*zero_grad)(stg_strategy *self, const stg_call *call);
  /* The reduced gradients, for a host's own optimizer: `out` is a dict from main name to tensor, or none where there is no
   * gradient; views, valid until the next call of the instance that is not a query (copies with STG_CREATE_CALLER_THREAD_ONLY). [owner, fit] */
  stg_error *(*gradients)(stg_strategy *self, const stg_call *call, stg_tree *out);
  /* The host has written parameters in place on the root: replicas are refreshed, gradients dropped. [owner, fit evaluate] */
  stg_error *(*parameters_changed)(stg_strategy *self, const stg_call *call);
  /* One step without gradients, outputs gathered and not reduced. [owner, fit evaluate] */
  stg_error *(*validation_step)(stg_strategy *self, const stg_call *call, const stg_step_args *args, stg_step_result *out);
  /* As validation_step, in the test stage. [owner, fit evaluate] */
  stg_error *(*test_step)(stg_strategy *self, const stg_call *call, const stg_step_args *args, stg_step_result *out);
  /* As validation_step, in the predict stage. [owner, fit evaluate] */
  stg_error *(*predict_step)(stg_strategy *self, const stg_call *call, const stg_step_args *args, stg_step_result *out);
  /* Reduces one set of gradients per device in place, nothing else asked of the instance. A read-only, overlapping or stride-0
   * gradient is refused before anything is written. [owner, modelless] */
  stg_error *(*reduce_gradients)(stg_strategy *self, const stg_call *call, const stg_reduce_gradients_args *args);

  /* The state as a tree (see above). `flags`: STG_EXPORT_COPY. [owner, fit evaluate] */
  stg_error *(*export_state)(stg_strategy *self, const stg_call *call, uint64_t flags, stg_tree *out);
  /* Takes a state (moved or borrowed); parts that the stage has no use for are left out. `flags`: STG_IMPORT_STRICT. `report`: a dict of
   * lists of names (missing, unexpected, unknown_keys), owned by the caller; may be null. [owner, fit evaluate] */
  stg_error *(*import_state)(stg_strategy *self, const stg_call *call, stg_tree *state, uint64_t flags, stg_tree *report);
  /* Writes a checkpoint folder as a whole or not at all. [owner, fit evaluate] */
  stg_error *(*save)(stg_strategy *self, const stg_call *call, const stg_checkpoint_args *args);
  /* Reads one. `host_json`: the string value given to save, owned by the caller; may be null. `report` as in import_state, owned by the
   * caller.
   * [owner, fit evaluate] */
  stg_error *(*load)(stg_strategy *self, const stg_call *call, const stg_checkpoint_args *args, stg_tree *host_json,
                     stg_tree *report);
} stg_strategy_api;
#define STG_STRATEGY_API_MIN_SIZE 272u
STG_ASSERT_SIZE(stg_strategy_api, 272);

/* What a strategy can do, beyond its functions. */
#define STG_CAPABILITY_MULTIPLE_DEVICES 1u
#define STG_CAPABILITY_MULTIPLE_PROCESSES 2u
#define STG_CAPABILITY_CALLER_THREAD_ONLY 4u
#define STG_CAPABILITY_STREAMS 8u /* honours stg_call.streams */

/* A factory of strategies, offered by a plugin. Growing. All pointers live as long as the process. */
typedef struct stg_strategy_factory {
  uint64_t struct_size;
  stg_string name;              /* lifetime: the process */
  stg_string summary;           /* lifetime: the process; one line */
  stg_string options_schema;    /* lifetime: the process; the JSON Schema of "options" */
  const uint32_t *device_kinds; /* lifetime: the process; STG_DEVICE_* that it can use */
  uint64_t num_device_kinds;
  uint64_t capabilities;       /* STG_CAPABILITY_*; unknown bits are to be passed over */
  const stg_strategy_api *api; /* lifetime: the process */
} stg_strategy_factory;
#define STG_STRATEGY_FACTORY_MIN_SIZE 88u
STG_ASSERT_SIZE(stg_strategy_factory, 88);

STG_EXTERN_C_END
#endif
