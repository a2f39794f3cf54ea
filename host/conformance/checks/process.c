/* SPDX-License-Identifier: Apache-2.0
 *
 * What a plugin leaves alone (rule F6): all that belongs to the process. A whole life of an instance, from create to destroy, lies
 * between the two looks.
 */
#include "conformance/fixture/process.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "conformance/checks/check.h"

#define LR 0.1

/* create, setup, two batches, an evaluation, a state, teardown, destroy. */
static void live(void) {
  session s;
  batch b;
  stg_step_result result;
  stg_tree state;
  memset(&state, 0, sizeof state);
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 7, 1);
  for (int i = 0; i < 2; ++i) SUCCEEDS(train_on(&s, &b, LR));
  stg_tree tree = batch_tree(&b, 0);
  stg_error* error = validation_step(&s, &tree, &result);
  if (error == NULL) {
    release_tree(&result.outputs);
  } else {
    error->release(error);
  }
  error = the_host.api->export_state(s.strategy, NULL, STG_EXPORT_COPY, &state);
  if (error == NULL) {
    release_tree(&state);
  } else {
    error->release(error);
  }
  SUCCEEDS(the_host.api->teardown(s.strategy, NULL));
  close_session(&s);
}

static void check_unchanged(const char* (*changed)(void), const char* what) {
  const char* how = changed();
  CHECK_THAT(how == NULL, "%s: after opening the plugin, %s", what, how == NULL ? "" : how);
  live();
  how = changed();
  CHECK_THAT(how == NULL, "%s: after an instance has lived, %s", what, how == NULL ? "" : how);
}

static void keeps_signals(void) { check_unchanged(changed_signals, "signals"); }
static void keeps_environment(void) { check_unchanged(changed_environment, "environment"); }
static void keeps_locale(void) { check_unchanged(changed_locale, "locale"); }
static void keeps_arithmetic(void) { check_unchanged(changed_arithmetic, "arithmetic"); }
static void keeps_umask(void) { check_unchanged(changed_umask, "umask"); }
static void keeps_folder(void) { check_unchanged(changed_folder, "working directory"); }
static void keeps_limits(void) { check_unchanged(changed_limits, "limits"); }

static void writes_nothing(void) {
  live();
  const char* written = written_output();
  CHECK_THAT(written[0] == 0, "it wrote to stdout or stderr: %s", written);
}

/* ---- threads ---- */

static void loading_starts_no_thread(void) {
  CHECK_THAT(count_threads() == threads_before(), "opening and probing starts no thread: there were %d, there are %d",
             (int)threads_before(), (int)count_threads());
}

static void create_starts_no_thread(void) {
  const int64_t before = count_threads();
  stg_strategy* made = make_strategy(1, 0, NULL);
  if (made == NULL) return;
  CHECK_THAT(count_threads() == before, "create starts no thread: there were %d, there are %d", (int)before,
             (int)count_threads());
  destroy_strategy(made);
}

static void threads_end_with_teardown(void) {
  session s;
  batch b;
  int64_t after_first = 0;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 7, 1);
  for (int i = 0; i < 4; ++i) {
    SUCCEEDS(train_on(&s, &b, LR));
    if (!SUCCEEDS(the_host.api->teardown(s.strategy, NULL))) break;
    if (i == 0) after_first = count_threads(); /* a library's own pool may have come */
    CHECK_THAT(count_threads() <= after_first, "after teardown number %d there are %d threads, after the first there were %d",
               i + 1, (int)count_threads(), (int)after_first);
    if (!SUCCEEDS(set_up(&s, STG_STAGE_FIT, NULL))) break;
  }
  close_session(&s);
}

static void host_threads_keep_their_share(void) {
  session s;
  batch b;
  const thread_share before = share_of_new_thread();
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 7, 1);
  SUCCEEDS(train_on(&s, &b, LR));
  const thread_share after = share_of_new_thread();
  CHECK_THAT(after.num_cpus == before.num_cpus, "a new thread may run on %d CPUs, before setup on %d", after.num_cpus,
             before.num_cpus);
  CHECK_THAT(after.num_openmp_threads == before.num_openmp_threads, "OpenMP gives a new thread %d threads, before setup %d",
             after.num_openmp_threads, before.num_openmp_threads);
  CHECK_THAT(after.num_torch_threads == before.num_torch_threads, "LibTorch gives a new thread %d threads, before setup %d",
             after.num_torch_threads, before.num_torch_threads);
  close_session(&s);
}

/* ---- 100 times ---- */

static void cycle(session* s, const batch* b) {
  if (SUCCEEDS(set_up(s, STG_STAGE_FIT, NULL))) SUCCEEDS(train_on(s, b, LR));
  SUCCEEDS(the_host.api->teardown(s->strategy, NULL));
}

/* What `count` gives after 20 cycles and after 100 more differs by at most `slack`. */
static void check_growth(int64_t (*count)(void), int64_t slack, const char* what) {
  session s;
  batch b;
  keep_nothing();
  new_mlp(&s.model, 1);
  s.strategy = make_strategy(1, 0, NULL);
  if (s.strategy == NULL) return;
  make_batch(&b, 7, 1);
  for (int i = 0; i < 20; ++i) cycle(&s, &b);
  const int64_t before = count();
  for (int i = 0; i < 100; ++i) cycle(&s, &b);
  const int64_t grown = count() - before;
  CHECK_THAT(grown <= slack, "100 times setup, a batch and teardown leave %d %s behind; %d are let pass", (int)grown, what,
             (int)slack);
  close_session(&s);
}

static void memory_does_not_grow(void) { check_growth(allocated_bytes, 16384, "bytes"); }
static void threads_do_not_grow(void) { check_growth(count_threads, 0, "threads"); }
static void descriptors_do_not_grow(void) { check_growth(count_descriptors, 0, "file descriptors"); }

static void instances_do_not_leak(void) {
  keep_nothing();
  int64_t before = 0;
  for (int i = 0; i < 220; ++i) {
    if (i == 20) before = allocated_bytes();
    stg_strategy* made = make_strategy(1, 0, NULL);
    if (made == NULL) return;
    destroy_strategy(made);
  }
  const int64_t grown = allocated_bytes() - before;
  CHECK_THAT(grown <= 4096, "200 times create and destroy leave %d bytes behind; 4096 are let pass", (int)grown);
}

/* ---- fork ---- */

/* The child answers by its exit code; alarm ends it where a call hangs. */
static void run_child(session* s) {
  stg_status status;
  batch b;
  alarm(20);
  memset(&status, 0, sizeof status);
  status.struct_size = sizeof status;
  stg_error* error = the_host.api->status(s->strategy, &status);
  if (error == NULL || error->code != STG_FAILED_PRECONDITION) _exit(10);
  const stg_create_args args = {sizeof args, plain_config(), NULL, 0};
  stg_strategy* made = NULL;
  error = the_host.api->create(&args, &made);
  if (error == NULL || error->code != STG_FAILED_PRECONDITION || made != NULL) _exit(12);
  make_batch(&b, 4, 1);
  stg_tree tree = batch_tree(&b, 0);
  stg_step_result result;
  error = train_batch(s, NULL, &tree, 0.1, STG_BATCH_LAST_MICRO_BATCH, &result, NULL);
  if (error == NULL || error->code != STG_FAILED_PRECONDITION) _exit(11);
  _exit(0);
}

static void a_fork_is_refused(void) {
  session s;
  batch b;
  int status = 0;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 4, 1);
  SUCCEEDS(train_on(&s, &b, 0.1));
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) run_child(&s);
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK_THAT(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child got failed_precondition: status %x", (unsigned)status);
  SUCCEEDS(train_on(&s, &b, 0.1)); /* the parent goes on */
  close_session(&s);
}

/* ---- the end ---- */

/* Neither destroyed nor torn down: a program may end with its threads parked and its model alive. How the process ends is the result. */
static session left_alive;

static void exit_with_a_live_instance(void) {
  batch b;
  make_batch(&b, 6, 1);
  if (open_session(&left_alive, 0, 0, STG_STAGE_FIT)) SUCCEEDS(train_on(&left_alive, &b, LR));
}

DEFINE_CHECKS(
    process_checks,
    {"process-signals-kept", "Signal handlers and the signal mask stay as they were before the plugin was opened", "F6",
     NEEDS_STRATEGY | IS_ONCE, keeps_signals},
    {"process-environment-kept", "No environment variable is set, changed or removed", "F6", NEEDS_STRATEGY | IS_ONCE,
     keeps_environment},
    {"process-locale-kept", "The locale stays as it was", "F6", NEEDS_STRATEGY | IS_ONCE, keeps_locale},
    {"process-arithmetic-kept", "The rounding mode stays, and denormal numbers are not made 0", "F6", NEEDS_STRATEGY | IS_ONCE,
     keeps_arithmetic},
    {"process-umask-kept", "The umask stays as it was", "F6", NEEDS_STRATEGY | IS_ONCE, keeps_umask},
    {"process-folder-kept", "The working directory stays as it was", "F6", NEEDS_STRATEGY | IS_ONCE, keeps_folder},
    {"process-limits-kept", "No limit of the process (setrlimit) is changed", "F6", NEEDS_STRATEGY | IS_ONCE, keeps_limits},
    {"process-output-silent", "Nothing is written to stdout or stderr, from opening on", "C4",
     NEEDS_STRATEGY | IS_ONCE | WATCHES_OUTPUT, writes_nothing},
    {"load-starts-no-thread", "Opening the plugin and probing it starts no thread", "A1", NEEDS_PLUGIN, loading_starts_no_thread},
    {"create-starts-no-thread", "create starts no thread", "F6", NEEDS_STRATEGY | IS_ONCE, create_starts_no_thread},
    {"teardown-ends-threads", "After each of 4 teardowns there are no more threads than after the first", "F6", NEEDS_STRATEGY,
     threads_end_with_teardown},
    {"host-threads-keep-their-share",
     "A thread that the host starts after setup may run on as many CPUs, and gets as many OpenMP and LibTorch threads, as before "
     "it",
     "F6", NEEDS_STRATEGY | IS_ONCE, host_threads_keep_their_share},
    {"cycles-keep-memory", "100 times setup, a batch and teardown leave at most 16384 bytes allocated, after 20 that don't count",
     "D1", NEEDS_STRATEGY | IS_ONCE, memory_does_not_grow},
    {"cycles-keep-threads", "100 times setup, a batch and teardown leave no thread behind, after 20 that don't count", "F6",
     NEEDS_STRATEGY | IS_ONCE, threads_do_not_grow},
    {"cycles-keep-descriptors",
     "100 times setup, a batch and teardown leave no file descriptor behind, after 20 that don't count", "F6",
     NEEDS_STRATEGY | IS_ONCE, descriptors_do_not_grow},
    {"create-destroy-keeps-memory", "200 times create and destroy leave at most 4096 bytes allocated, after 20 that don't count",
     "D1", NEEDS_STRATEGY | IS_ONCE, instances_do_not_leak},
    {"exit-with-live-instance", "A program that ends by exit(0) with an instance in the middle of training ends with 0", "F6",
     NEEDS_STRATEGY | IS_ONCE | ENDS_BY_EXIT, exit_with_a_live_instance},
    {"fork-child-refused",
     "The child of a fork gets failed_precondition within 20 s from status, create and train_batch, and the parent goes on", "F5",
     NEEDS_STRATEGY, a_fork_is_refused});
