/* SPDX-License-Identifier: Apache-2.0
 *
 * What the C hosts of these tests share: loading a plugin as any host would (dlopen, probe, table), small tensors that count their
 * releases, and checks that name the value and the place. Nothing but the C library and the headers of the ABI.
 */
#ifndef HOST_H
#define HOST_H

#include <pthread.h>
#include <stdatomic.h>
#include <stratagem/abi.h>

/* ---- checks ---- */

typedef struct test {
  const char* sentence; /* what is true when it passes */
  void (*run)(void);
} test;

/* Runs them in order, prints one line each, and gives the exit code. */
int run_tests(const test* tests, uint64_t num_tests);

/* Counts a failure and prints it with its place; the test goes on. Gives `is_true` back. */
int check_at(const char* file, int line, int is_true, const char* format, ...) __attribute__((format(printf, 4, 5)));
#define CHECK(condition) check_at(__FILE__, __LINE__, (condition) != 0, "%s", #condition)
#define CHECK_THAT(condition, ...) check_at(__FILE__, __LINE__, (condition) != 0, __VA_ARGS__)

/* Checks that failed so far, for a child process to tell its own. */
extern atomic_int num_failures; /* callbacks check things on whatever thread they come */

/* Both release the error. 1 if it was what was expected. */
int succeeds_at(const char* file, int line, stg_error* error, const char* call);
#define SUCCEEDS(call) succeeds_at(__FILE__, __LINE__, (call), #call)
/* An error of this code, well formed, whose text has `part` in it (null: any). */
int fails_at(const char* file, int line, stg_error* error, uint32_t code, const char* part, const char* call);
#define FAILS(call, code, part) fails_at(__FILE__, __LINE__, (call), (code), (part), #call)

int is_close(double a, double b, double relative);
int text_has(stg_string text, const char* part);

/* ---- the plugin ---- */

typedef struct host {
  stg_plugin_probe_fn probe;
  const stg_plugin* plugin;
  const stg_strategy_factory* factory;
  const stg_strategy_api* api;
  uint64_t num_devices;
  const char* path;
} host;

extern host the_host;

/* Arguments: PLUGIN STRATEGY DEVICES. Ends the program with a message where the plugin can't be entered. */
void load_plugin(int num_arguments, char** arguments);

/* An instance over the host's number of devices. `with_optimizer`: plain SGD. Null after a failure, which is counted. */
stg_strategy* make_strategy(int with_optimizer, uint64_t flags, const stg_host* services);
stg_strategy* make_strategy_from(const char* config_json, uint64_t flags, const stg_host* services, stg_error** error);
void destroy_strategy(stg_strategy* strategy);
/* Its save; a null slot answers as one that is unimplemented, which is what it means. */
stg_error* save_checkpoint(stg_strategy* strategy, const stg_checkpoint_args* args);

/* ---- tensors and trees ---- */

/* How many tensors and trees made here are alive. Each is released exactly once: a second time is a failure of its own. */
extern int64_t num_live_tensors;
extern int64_t num_live_trees;

/* While not null, only this thread may release what was made here; others are counted. */
extern const pthread_t* only_releaser;
extern int64_t num_foreign_releases;

stg_tensor* new_tensor(uint8_t code, uint8_t bits, int32_t num_dims, const int64_t* shape); /* zeros */
stg_tensor* new_float32(int32_t num_dims, const int64_t* shape);
float* floats(const stg_tensor* tensor);
double element(const stg_tensor* tensor, int64_t at); /* float32 or float64, row-major */
void set_element(stg_tensor* tensor, int64_t at, double value);
int64_t count_elements(const stg_tensor* tensor);
void release_tensor(stg_tensor* tensor); /* any maker's */
/* A tree {names[0]: tensors[0], ...} that owns the tensors. Names are literals. */
stg_tree new_dict(uint32_t num_entries, const char* const* names, stg_tensor* const* tensors);
const stg_value* find_key(const stg_value* dict, const char* key);
void release_tree(stg_tree* tree); /* any maker's; a borrowed one is left alone */
uint64_t clock_ns(void);           /* CLOCK_MONOTONIC */

#endif
