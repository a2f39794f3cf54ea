/* SPDX-License-Identifier: Apache-2.0
 *
 * Handles: who may call what when, and what is left of a session that is closed in the middle.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "rig.h"

static void refuses(stg_session session, uint32_t code, const char* part) {
  stg_tree tree;
  stg_progress progress;
  const stg_strategy_api* api;
  stg_strategy* instance;
  progress.struct_size = sizeof progress;
  FAILS(stg_session_run(session, &tree), code, part);
  FAILS(stg_session_step(session, 1, NULL), code, part);
  FAILS(stg_session_swap(session, text("{}")), code, part);
  FAILS(stg_session_request_swap(session, text("{\"name\": \"x\"}")), code, part);
  FAILS(stg_session_progress(session, &progress), code, part);
  FAILS(stg_session_strategy(session, &api, &instance), code, part);
  FAILS(stg_session_poll(session, 0, &tree), code, part);
  stg_session_request_stop(session);
  stg_session_request_reload(session);
  stg_session_cancel(session);
  stg_session_close(session);
}

static void wrong_handles(void) {
  rig of;
  new_rig(&of, NULL, "");
  refuses(0, STG_INVALID_ARGUMENT, "the session is 0, which is none");
  refuses(1, STG_INVALID_ARGUMENT, "1 is no session");
  refuses(0xdeadbeefdeadbeefu, STG_INVALID_ARGUMENT, "is no session");
  open_rig(&of);
  const stg_session first = of.session;
  refuses(first + STG_MAX_SESSIONS, STG_INVALID_ARGUMENT, "is no session");
  close_rig(&of);
  refuses(first, STG_FAILED_PRECONDITION, "is closed");
  new_rig(&of, NULL, "");
  open_rig(&of); /* in the same place */
  CHECK(of.session != first && of.session % STG_MAX_SESSIONS == first % STG_MAX_SESSIONS);
  refuses(first, STG_FAILED_PRECONDITION, "is closed");
  run_rig(&of, "\"interrupted\":false"); /* what was asked of the old one is not asked of this one */
  close_rig(&of);
}

static void null_arguments(void) {
  rig of;
  stg_tree tree;
  stg_progress progress;
  const stg_strategy_api* api;
  stg_strategy* instance;
  new_rig(&of, NULL, "");
  FAILS(stg_session_open(&of.args, NULL), STG_INVALID_ARGUMENT, "out is null");
  CHECK(of.num_releases == 1);
  of.num_releases = 0;
  open_rig(&of);
  FAILS(stg_session_run(of.session, NULL), STG_INVALID_ARGUMENT, "result is null");
  FAILS(stg_session_progress(of.session, NULL), STG_INVALID_ARGUMENT, "out is null");
  progress.struct_size = 8;
  FAILS(stg_session_progress(of.session, &progress), STG_INVALID_ARGUMENT, "out.struct_size is 8");
  FAILS(stg_session_strategy(of.session, NULL, &instance), STG_INVALID_ARGUMENT, "api is null");
  FAILS(stg_session_strategy(of.session, &api, NULL), STG_INVALID_ARGUMENT, "instance is null");
  FAILS(stg_session_poll(of.session, 0, NULL), STG_INVALID_ARGUMENT, "event is null");
  run_rig(&of, "\"steps\":3"); /* none of that was the run */
  FAILS(stg_session_run(of.session, &tree), STG_FAILED_PRECONDITION, "this session has run");
  close_rig(&of);
}

static void as_many_as_there_are(void) {
  static stg_session sessions[STG_MAX_SESSIONS];
  stg_session one_more = 0;
  rig of;
  new_rig(&of, "{}", "");
  if (!strategy_is("sequential")) { /* the others start threads */
    CHECK(of.session == 0);
    return;
  }
  of.args.flags = STG_SESSION_OWN_LOOP;
  of.args.num_sources = 0;
  int64_t num_open = 0;
  while (num_open < STG_MAX_SESSIONS && stg_session_open(&of.args, &sessions[num_open]) == NULL) ++num_open;
  CHECK(num_open == STG_MAX_SESSIONS);
  FAILS(stg_session_open(&of.args, &one_more), STG_RESOURCE_EXHAUSTED, "1024 sessions are open");
  stg_session_close(sessions[500]);
  SUCCEEDS(stg_session_open(&of.args, &sessions[500]));
  for (int64_t i = 0; i < num_open; ++i) stg_session_close(sessions[i]);
  close_rig(&of);
}

static gate first_batch;
static void stop_at_gate(rig* of) {
  if (of->num_starts == 1) reach_gate(&first_batch);
}

static void two_threads(void) {
  rig of;
  runner run;
  stg_tree tree;
  stg_progress progress;
  const stg_strategy_api* api;
  stg_strategy* instance;
  const gate fresh = NEW_GATE;
  first_batch = fresh;
  new_rig(&of, NULL, "");
  of.inside = stop_at_gate;
  open_rig(&of);
  start_run(&run, &of);
  wait_for_reach(&first_batch);
  FAILS(stg_session_run(of.session, &tree), STG_FAILED_PRECONDITION, "is in a call of another thread");
  FAILS(stg_session_strategy(of.session, &api, &instance), STG_FAILED_PRECONDITION, "is in a call of another thread");
  progress.struct_size = sizeof progress;
  SUCCEEDS(stg_session_progress(of.session, &progress));
  CHECK(progress.step == 1 && progress.batch == 1 && progress.num_batches == 3 && progress.max_epochs == 1);
  open_gate(&first_batch);
  join_run(&run);
  if (SUCCEEDS(run.error)) CHECK(result_has(&run.result, "\"steps\":3"));
  SUCCEEDS(stg_session_strategy(of.session, &api, &instance));
  close_rig(&of);
}

static void call_from_inside(rig* of) {
  stg_tree tree;
  stg_progress progress;
  const stg_strategy_api* api;
  stg_strategy* instance;
  FAILS(stg_session_run(of->session, &tree), STG_FAILED_PRECONDITION, "from inside one of its own events");
  FAILS(stg_session_step(of->session, 1, NULL), STG_FAILED_PRECONDITION, "from inside one of its own events");
  FAILS(stg_session_swap(of->session, text("{}")), STG_FAILED_PRECONDITION, "from inside one of its own events");
  FAILS(stg_session_strategy(of->session, &api, &instance), STG_FAILED_PRECONDITION, "from inside one of its own events");
  FAILS(stg_session_request_swap(of->session, text("{}")), STG_INVALID_ARGUMENT, "/name"); /* is heard */
  progress.struct_size = sizeof progress;
  SUCCEEDS(stg_session_progress(of->session, &progress));
  if (of->num_starts == 1) stg_session_request_stop(of->session);
}

static void from_inside(void) {
  rig of;
  new_rig(&of, NULL, "");
  of.inside = call_from_inside;
  open_rig(&of);
  run_rig(&of, "\"interrupted\":true");
  CHECK(of.num_ends == 2);
  close_rig(&of);
}

static void close_inside(rig* of) {
  if (of->num_starts != 1) return;
  stg_session_close(of->session);
  refuses(of->session, STG_FAILED_PRECONDITION, "is closed");
  CHECK(of->num_releases == 0 && of->model.num_replicas > 0);
}

static void closed_from_inside(void) {
  rig of;
  new_rig(&of, NULL, "");
  of.inside = close_inside;
  open_rig(&of);
  run_rig(&of, "\"interrupted\":true");
  CHECK(of.num_ends == 2 && of.num_releases == 1);
  close_rig(&of);
}

static void closed_by_another(void) {
  rig of;
  runner run;
  const gate fresh = NEW_GATE;
  first_batch = fresh;
  new_rig(&of, NULL, "");
  of.inside = stop_at_gate;
  open_rig(&of);
  start_run(&run, &of);
  wait_for_reach(&first_batch);
  stg_session_close(of.session);
  refuses(of.session, STG_FAILED_PRECONDITION, "is closed");
  CHECK(of.num_releases == 0);
  open_gate(&first_batch);
  join_run(&run);
  if (SUCCEEDS(run.error)) CHECK(result_has(&run.result, "\"interrupted\":true"));
  CHECK(of.num_releases == 1);
  close_rig(&of);
}

static gate second_read;
static void close_in_read(rig* of) {
  if (of->num_reads != 2) return;
  CHECK(!pthread_equal(pthread_self(), of->opener));
  reach_gate(&second_read);
  stg_session_close(of->session);
  refuses(of->session, STG_FAILED_PRECONDITION, "is closed");
}

static void closed_by_its_reader(void) {
  const gate fresh = NEW_GATE;
  const struct timespec millisecond = {0, 1000000};
  rig of;
  second_read = fresh;
  new_rig(&of, NULL, "");
  of.source.flags = STG_SOURCE_ANY_THREAD;
  of.inside_read = close_in_read;
  open_rig(&of);
  SUCCEEDS(stg_session_step(of.session, 1, NULL));
  wait_for_reach(&second_read); /* no call is going on */
  open_gate(&second_read);
  for (int waited_ms = 0; waited_ms < 5000 && __atomic_load_n(&of.num_releases, __ATOMIC_ACQUIRE) == 0; ++waited_ms)
    nanosleep(&millisecond, NULL);
  CHECK(of.num_releases == 1);
  refuses(of.session, STG_FAILED_PRECONDITION, "is closed");
  of.args.num_sources = 1;
  close_rig(&of);
}

/* In a child, whatever the parent's threads held when it was made. */
static void in_a_child(void) {
  rig of;
  stg_session another = 0;
  int status = 0;
  new_rig(&of, NULL, "");
  of.source.flags = STG_SOURCE_ANY_THREAD;
  of.args.flags = STG_SESSION_QUEUE_EVENTS;
  open_rig(&of);
  SUCCEEDS(stg_session_step(of.session, 1, NULL));
  const pid_t child = fork();
  if (child == 0) {
    const int num_before = count_failures();
    alarm(5);
    refuses(of.session, STG_FAILED_PRECONDITION, "is a child of fork");
    FAILS(stg_session_open(&of.args, &another), STG_FAILED_PRECONDITION, "is a child of fork");
    stg_session_close(of.session);
    /* As another program: to ThreadSanitizer the parent's threads would look leaked by this one. */
    execlp(count_failures() == num_before ? "true" : "false", "child", (char*)NULL);
    _exit(2);
  }
  CHECK(waitpid(child, &status, 0) == child);
  CHECK_THAT(status == 0, "the child ended with status %d", status);
  run_rig(&of, "\"steps\":3");
  close_rig(&of);
}

const test handle_tests[] = {
    {"a handle that is closed, one that was never given, and none are refused, each in its words", wrong_handles},
    {"null arguments are refused by name, and use nothing up", null_arguments},
    {"so many sessions are open at once, and no more", as_many_as_there_are},
    {"a second thread is refused while the first one is in a call, and may look at the progress", two_threads},
    {"a call from inside an event is refused, but for requests and progress", from_inside},
    {"a session that one of its events closes is freed when the call returns", closed_from_inside},
    {"a session that its own source closes while it is read ahead is freed when the read returns", closed_by_its_reader},
    {"in a child of fork every call of a session is refused, and none waits for threads that aren't there", in_a_child},
    {"a session that another thread closes is asked to stop, and freed when the call returns", closed_by_another},
};
const uint64_t num_handle_tests = sizeof handle_tests / sizeof *handle_tests;
