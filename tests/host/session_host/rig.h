/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that uses libstratagem from C alone, with a model and data of its own: what its tests share. The strategy is that of the
 * command line's arguments, the model is mlp.h's, and the data a source of a few rows that watches how it is read.
 */
#ifndef RIG_H
#define RIG_H

#include <stratagem/session.h>

#include "conformance/fixture/mlp.h"
#include "run.h"

#define NUM_ROWS 10
#define LR 0.125

/* How a source behaves. */
enum { READ_RIGHT, READ_FEW_ROWS, READ_NO_ROWS, READ_NOTHING, READ_BORROWED, READ_ODD_DTYPE, READ_ERROR };

typedef struct rig {
  mlp model;
  stg_data_source source;
  const stg_data_source* sources[2];
  stg_session_events events;
  stg_session_args args;
  stg_session session;
  char config[1024];
  char folder[64]; /* for checkpoints; made by with_checkpoints */

  /* of the source */
  int misbehaves;  /* READ_* ... */
  int64_t at_read; /* ... in this read, counted from 0 */
  int64_t num_reads, num_releases, num_rows_read, num_foreign_reads;
  int64_t rows[256];
  pthread_t opener;
  void (*inside_read)(struct rig*); /* null: none */

  /* of the events */
  int64_t num_starts, num_ends, num_progress, num_metrics;
  int64_t start_error_at, end_error_at, progress_error_at, metrics_error_at; /* -1: none; which call gives an error */
  double losses[64];
  stg_progress last;
  void (*inside)(struct rig*); /* null: none; called from batch_start */
} rig;

/* A rig whose config has this under "data" ({"train": {"source": "rows"}} if null) and this in the place of more keys. Not opened. */
void new_rig(rig* out, const char* data, const char* more);
/* A folder for checkpoints, in the config of a rig that is not opened. */
void with_checkpoints(rig* of, const char* more);
void open_rig(rig* of);
/* Closes it, and checks that the model, the source and every tensor were given back. */
void close_rig(rig* of);

/* How far its session says that it is. */
stg_progress progress_of(const rig* of);
/* Runs it to its end, releases the result, and says whether the result has this in it. */
void run_rig(rig* of, const char* part);
/* The losses that the rows give by plain SGD, in this order, `batch_size` at a time. */
void expect_losses(const int64_t* order, int64_t num_rows, int64_t batch_size, int64_t num_updates, double* losses);
void check_losses(const rig* of, const double* expected, int64_t num_updates);

stg_string text(const char* of);
stg_error* new_error(uint32_t code, const char* text);
/* Whether a string in a tree has this in it; releases the tree. */
int result_has(stg_tree* tree, const char* part);
/* Whether a folder is there. */
int has_checkpoint(const rig* of, const char* name);

/* A gate between two threads. */
typedef struct gate {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int is_reached, is_open;
} gate;
#define NEW_GATE \
  { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0 }
void reach_gate(gate* at);     /* tells that it is reached, and waits until it is open */
void wait_for_reach(gate* at); /* until somebody has reached it */
void open_gate(gate* at);

/* The run of a rig in a thread of its own. */
typedef struct runner {
  rig* of;
  pthread_t thread;
  stg_error* error;
  stg_tree result;
  int is_done; /* atomic */
} runner;
void start_run(runner* out, rig* of);
void join_run(runner* of);

int strategy_is(const char* name);
/* The command line's strategy on one device, as a config has it. */
const char* own_strategy(void);

extern const test handle_tests[], event_tests[], source_tests[], own_tests[], cancel_tests[];
extern const uint64_t num_handle_tests, num_event_tests, num_source_tests, num_own_tests, num_cancel_tests;

#endif
