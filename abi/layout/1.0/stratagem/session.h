/* SPDX-License-Identifier: Apache-2.0
 *
 * libstratagem: loading, checking, config and the training loop behind a C API, with the rules of the ABI (common.h, error.h): growing
 * structs, errors as stg_error, thread tags. The command line `stratagem` is built on this and nothing else.
 *
 * `result` and `event` are JSON texts in a stg_tree: a string value, owned by the caller.
 */
#ifndef STRATAGEM_SESSION_H
#define STRATAGEM_SESSION_H

#include <stratagem/error.h>
#include <stratagem/host.h>
#include <stratagem/model.h>
#include <stratagem/plugin.h>
#include <stratagem/value.h>

STG_EXTERN_C_BEGIN

#if defined(__GNUC__)
#define STG_API __attribute__((visibility("default")))
#else
#define STG_API
#endif

/* One run: a checked config with its strategy, model and data. A handle (index and generation), never memory: with one that is closed
 * a function answers STG_FAILED_PRECONDITION, with one that was never given STG_INVALID_ARGUMENT. 0 is none.
 *
 * A session takes one caller at a time, on whatever thread: a second one, or a call of an [owner] function from inside one of the session's
 * events, gets STG_FAILED_PRECONDITION. */
typedef uint64_t stg_session;

/* How many sessions may be open at once. */
#define STG_MAX_SESSIONS 1024u

/* How far a run is. Growing. */
typedef struct stg_progress {
  uint64_t struct_size;
  uint64_t stage;     /* STG_STAGE_* of what is going on: validation is a part of fit */
  int64_t epoch;      /* completed */
  int64_t max_epochs; /* -1: no limit */
  int64_t batch;      /* of the epoch or the evaluation, completed */
  int64_t num_batches;
  int64_t step;      /* updates done */
  int64_t max_steps; /* -1: no limit */
  double loss;       /* the last one that was logged; NaN before the first */
} stg_progress;
#define STG_PROGRESS_MIN_SIZE 72u
STG_ASSERT_SIZE(stg_progress, 72);

/* What a run tells. Every function may be null; all are called on the thread that is inside a call of the session, but `log`, which a
 * plugin may call from its own threads (not with STG_SESSION_CALLER_THREAD_ONLY). A function that returns an error ends the run with it, as the
 * cause of the error that the run returns; what was trained is saved as after every error. Growing; a function table. */
typedef struct stg_session_events {
  uint64_t struct_size;
  void *self; /* lifetime: the session */
  /* A message of a level (STG_LOG_*). `message` is borrowed. [any] */
  void (*log)(void *self, uint32_t level, stg_string message);
  /* After each update, and each batch of an evaluation. `progress` is borrowed. [any] */
  stg_error *(*progress)(void *self, const stg_progress *progress);
  /* A line of the metrics file, without its newline: JSON. `line` is borrowed. [any] */
  stg_error *(*metrics)(void *self, stg_string line);
  /* Before a batch of any stage goes to the strategy. `progress` is borrowed. [any] */
  stg_error *(*batch_start)(void *self, const stg_progress *progress);
  /* After it. `progress` and `outputs` are borrowed; tensors of `outputs` lie on the root device (stg_strategy_api.to_host). [any] */
  stg_error *(*batch_end)(void *self, const stg_progress *progress, const stg_value *outputs);
  /* A swap of the strategy was tried before update `step` + 1. `strategy` is what was asked for, as JSON; `error` is null, or why the old one
   * goes on. Both are borrowed. [any] */
  stg_error *(*swap)(void *self, int64_t step, stg_string strategy, const stg_error *error);
} stg_session_events;
#define STG_SESSION_EVENTS_MIN_SIZE 40u
STG_ASSERT_SIZE(stg_session_events, 64);

/* The functions of a source. Flags: */
#define STG_SOURCE_ANY_THREAD \
  1u /* `read` may be called on a thread of the session's own, ahead of its use; else: on the caller's */

/* A data set of the host's own. A config's data.train, .validation, .test or .predict names it in the place of files:
 * {"source": "name", "batch_size": 64, "shuffle": true}. Shuffling, limits, batches and resuming are the session's. Growing; a function
 * table. */
typedef struct stg_data_source {
  uint64_t struct_size;
  stg_string name; /* lifetime: until release */
  void *self;      /* lifetime: until release */
  int64_t num_samples;
  uint64_t flags; /* STG_SOURCE_* */
  /* A batch of the samples `rows` (borrowed; 0 to num_samples - 1, in this order): `batch` is a tree, all of whose tensors have num_rows rows,
   * owned by the caller. An error ends the run as one of an event does. One call at a time. [any] */
  stg_error *(*read)(void *self, const int64_t *rows, uint64_t num_rows, stg_tree *batch);
  /* The session is done with it. May be null. [any] */
  void (*release)(void *self);
} stg_data_source;
#define STG_DATA_SOURCE_MIN_SIZE 64u
STG_ASSERT_SIZE(stg_data_source, 64);

/* Flags of stg_session_args. */
#define STG_SESSION_OWN_LOOP \
  1u /* the host brings batches and drives the strategy (stg_session_strategy); no data is needed, nor read; no run */
#define STG_SESSION_QUEUE_EVENTS 2u       /* events are kept for stg_session_poll, too */
#define STG_SESSION_CALLER_THREAD_ONLY 4u /* STG_CREATE_CALLER_THREAD_ONLY: everything runs on the thread that is inside a call */

/* Growing. All strings are borrowed. */
typedef struct stg_session_args {
  uint64_t struct_size;
  stg_string config_path;      /* the config's file; empty: config_text is the config, not both */
  stg_string config_text;      /* JSON with comments */
  stg_string config_folder;    /* what the paths of config_text are relative to; must be absolute */
  const stg_string *overrides; /* lifetime: the call; "a.b=value" texts, the last one wins */
  uint64_t num_overrides;
  uint64_t stage;                   /* STG_STAGE_*: what stg_session_run does */
  stg_string checkpoint;            /* a checkpoint, or the folder of a run; fit goes on from it; empty: none */
  const stg_session_events *events; /* borrowed, copied; null: no events */
  stg_string output;                /* STG_STAGE_PREDICT: the file to write, .npz or .safetensors; else unused */
  uint64_t flags;                   /* STG_SESSION_* */
  const stg_model *model;           /* borrowed, retained: what {"kind": "host"} in the config's model means; null: none */
  const stg_data_source *const
      *sources; /* borrowed, copied; consumed (their release called) on every return of open but a refused size */
  uint64_t num_sources;
} stg_session_args;
#define STG_SESSION_ARGS_MIN_SIZE 104u
STG_ASSERT_SIZE(stg_session_args, 152);

/* Checks the config, loads plugins and data, sets up strategy and model, reads the checkpoint. What the code of an error says here:
 *   STG_INVALID_ARGUMENT, STG_NOT_FOUND, STG_OUT_OF_RANGE, STG_DATA_LOSS, STG_UNIMPLEMENTED
 *       the config or an input file is wrong; the message lists all that is
 *   STG_FAILED_PRECONDITION, STG_PERMISSION_DENIED, STG_UNAVAILABLE
 *       a plugin that was found can't be loaded or is refused, or a device is missing
 * `out` is owned by the caller until stg_session_close. [any] */
STG_API stg_error *stg_session_open(const stg_session_args *args, stg_session *out);

/* Trains `num_updates` updates more, with what falls between them (validation, checkpoints, swaps), or to the end of the run, which writes
 * the last checkpoint. `is_over`, which may be null, is then 1: stg_session_run gives the result. Only of a session for fit. [owner] */
STG_API stg_error *stg_session_step(stg_session session, uint64_t num_updates, uint32_t *is_over);

/* Trains (what stg_session_step has left of it), validates, tests or predicts, once. `result`: one JSON object. An interrupted run (see
 * stg_session_request_stop) is no error: its result says "interrupted": true. [owner] */
STG_API stg_error *stg_session_run(stg_session session, stg_tree *result);

/* How far the run is: what the last `progress` event said, before the first one where it begins or goes on. Fills `out`. [any] */
STG_API stg_error *stg_session_progress(stg_session session, stg_progress *out);

/* The strategy that is set up now, for a host's own steps, predictions or state: `api` lives as long as the process, `instance` until
 * the next swap, or the end of the session. What it is asked for between updates of stg_session_step, the run doesn't know of. [owner] */
STG_API stg_error *stg_session_strategy(stg_session session, const stg_strategy_api **api, stg_strategy **instance);

/* Exchanges the strategy now, between updates. `strategy` is what the config's "strategy" is: {"name": "data_parallel", "devices": 2}. Weights,
 * optimizer, generators and the position in the run are handed over in memory. On an error the old strategy goes on, as it was. Only of a
 * session for fit; in an own loop only where no gradients wait for an optimizer_step. [owner] */
STG_API stg_error *stg_session_swap(stg_session session, stg_string strategy);

/* The same before the run's next update, wherever it is called from; a later request takes the place of one that waits. An error here is one
 * in the handle or the text; how it went is told by the event `swap`, and the log. Not in an own loop, which has no updates. [any] */
STG_API stg_error *stg_session_request_swap(stg_session session, stg_string strategy);

/* Asks the run to read its config file again before its next update, and to swap to the strategy in it. Other changes are
 * told (log) and left; a file that can't be read, or is wrong, changes nothing. Safe in a signal handler. [any] */
STG_API void stg_session_request_reload(stg_session session);

/* Asks a run to end soon: it finishes its update and writes a checkpoint. Safe in a signal handler. [any] */
STG_API void stg_session_request_stop(stg_session session);

/* Asks a run to end now: the call of the strategy that is going on is given up (stg_call.cancel; a step on the caller's own thread ends
 * first) and the run returns STG_CANCELLED, saved as of the last update where the strategy is usable. Safe in a signal handler. [any] */
STG_API void stg_session_cancel(stg_session session);

/* The next event of a session opened with STG_SESSION_QUEUE_EVENTS, waited for at most `timeout_ns` nanoseconds; none (STG_NONE) if there was
 * none. One JSON object, owned by the caller:
 *   {"event": "log", "level": 2, "message": "..."}
 *   {"event": "progress", "stage": 0, "epoch": 0, ...}   the members of stg_progress; "loss" is null before the first
 *   {"event": "metrics", "line": {...}}
 *   {"event": "swap", "step": 10, "strategy": {...}, "error": null}   or {"code": 5, "message": "..."}
 *   {"event": "dropped", "count": 7}
 * At most 4096 are kept: then progress is dropped first, the oldest of all next. [any] */
STG_API stg_error *stg_session_poll(stg_session session, uint64_t timeout_ns, stg_tree *event);

/* Ends a session: the handle is closed at once, for everyone. Where a call of the session is going on (in another thread, or around the event
 * that calls this), it is asked to stop and what the session holds is freed when it returns. A closed handle is allowed. [any] */
STG_API void stg_session_close(stg_session session);

/* What there is in the search folders, without loading it: {"folders": [...], "plugins": [...]}. `config_path`: a config whose
 * plugin_path is searched too; may be empty. [any] */
STG_API stg_error *stg_list_plugins(stg_string config_path, stg_tree *result);

/* The note of one plugin file, without loading it. [any] */
STG_API stg_error *stg_inspect_plugin(stg_string path, stg_tree *result);

/* Looks at what a run needs on this machine, and says what is wrong and what to do: {"schema_version": 1, "status": "fault", "checks":
 * [{"id", "status", "found", "problems": [{"status", "wrong", "remedy"}]}]}; a status is "ok", "warning", "fault" or "skipped", that of
 * all is its worst. Where there is an NVIDIA driver, it is initialised; no plugin and no LibTorch is loaded. `config_path`: a config whose
 * needs are looked at; may be empty. [any] */
STG_API stg_error *stg_doctor(stg_string config_path, stg_tree *result);

/* Loads a plugin file with every check, and gives its table, `out`, which lives as long as the process: for hosts that use the ABI without a
 * session. [any] */
STG_API stg_error *stg_load_plugin(stg_string path, const stg_plugin **out);

/* Loads a plugin file and tells what it offers: {"path", "name", "version", "strategies": [{"name", "summary", "devices", "capabilities",
 * "options_schema"}], "models": [{"name", "summary", "options_schema"}]}. [any] */
STG_API stg_error *stg_describe_plugin(stg_string path, stg_tree *result);

/* The config's JSON Schema. [any] */
STG_API stg_error *stg_config_schema(stg_tree *result);

/* The JSON Schema of the options of a strategy (`is_model` 0) or a model (1), by name. Loads its plugin. [any] */
STG_API stg_error *stg_options_schema(stg_string name, uint32_t is_model, stg_tree *result);

/* libstratagem's version; lives as long as the process. [any] */
STG_API stg_string stg_version(void);

STG_EXTERN_C_END
#endif
