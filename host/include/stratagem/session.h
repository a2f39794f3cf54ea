/* SPDX-License-Identifier: Apache-2.0
 *
 * libstratagem: loading, checking, config and the training loop behind a C API, with the rules of the ABI (common.h, error.h): growing
 * structs, errors as stg_error, thread tags. The command line `stratagem` is built on this and nothing else.
 *
 * Results are JSON texts in a stg_tree: a string value, owned by the caller.
 */
#ifndef STRATAGEM_SESSION_H
#define STRATAGEM_SESSION_H

#include <stratagem/error.h>
#include <stratagem/host.h>
#include <stratagem/model.h>
#include <stratagem/value.h>

STG_EXTERN_C_BEGIN

#if defined(__GNUC__)
#define STG_API __attribute__((visibility("default")))
#else
#define STG_API
#endif

/* One run: a checked config with its strategy, model and data. */
typedef struct stg_session stg_session;

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

/* What a run tells. Every function may be null; all are called on the thread that is inside stg_session_run or stg_session_open, but
 * `log`, which a plugin may call from its own threads. Growing; a function table. */
typedef struct stg_session_events {
  uint64_t struct_size;
  void *self; /* lifetime: the session */
  /* A message of a level (STG_LOG_*). `message` is borrowed. [any] */
  void (*log)(void *self, uint32_t level, stg_string message);
  /* After each update, and each batch of an evaluation. `progress` is borrowed. [any] */
  void (*progress)(void *self, const stg_progress *progress);
  /* A line of the metrics file, without its newline: JSON. `line` is borrowed. [any] */
  void (*metrics)(void *self, stg_string line);
} stg_session_events;
#define STG_SESSION_EVENTS_MIN_SIZE 40u
STG_ASSERT_SIZE(stg_session_events, 40);

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
} stg_session_args;
#define STG_SESSION_ARGS_MIN_SIZE 104u
STG_ASSERT_SIZE(stg_session_args, 120);

/* Checks the config, loads plugins and data, sets up strategy and model, reads the checkpoint. What the code of an error says here:
 *   STG_INVALID_ARGUMENT, STG_NOT_FOUND, STG_OUT_OF_RANGE, STG_DATA_LOSS, STG_UNIMPLEMENTED
 *       the config or an input file is wrong; the message lists all that is
 *   STG_FAILED_PRECONDITION, STG_PERMISSION_DENIED, STG_UNAVAILABLE
 *       a plugin that was found can't be loaded or is refused, or a device is missing
 * `out` is owned by the caller until stg_session_close. [any] */
STG_API stg_error *stg_session_open(const stg_session_args *args, stg_session **out);

/* Trains, validates, tests or predicts, once. `result`: one JSON object. An interrupted run (see stg_session_request_stop) is no error: its
 * result says "interrupted": true. [owner] */
STG_API stg_error *stg_session_run(stg_session *session, stg_tree *result);

/* Asks a run to end soon: it finishes its update and writes a checkpoint. Safe in a signal handler. Null is allowed. [any] */
STG_API void stg_session_request_stop(stg_session *session);

/* Ends a session. Null is allowed. [owner] */
STG_API void stg_session_close(stg_session *session);

/* What there is in the search folders, without loading it: {"folders": [...], "plugins": [...]}. `config_path`: a config whose
 * plugin_path is searched too; may be empty. [any] */
STG_API stg_error *stg_list_plugins(stg_string config_path, stg_tree *result);

/* The note of one plugin file, without loading it. [any] */
STG_API stg_error *stg_inspect_plugin(stg_string path, stg_tree *result);

/* The config's JSON Schema. [any] */
STG_API stg_error *stg_config_schema(stg_tree *result);

/* The JSON Schema of the options of a strategy (`is_model` 0) or a model (1), by name. Loads its plugin. [any] */
STG_API stg_error *stg_options_schema(stg_string name, uint32_t is_model, stg_tree *result);

/* libstratagem's version; lives as long as the process. [any] */
STG_API stg_string stg_version(void);

STG_EXTERN_C_END
#endif
