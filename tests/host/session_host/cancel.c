/* SPDX-License-Identifier: Apache-2.0
 *
 * Cancelling: from inside, from another thread, and from a signal handler, while a model is slow.
 */
#include <signal.h>
#include <string.h>

#include "rig.h"

static void cancel_at_two(rig* of) {
  if (of->num_starts == 2) stg_session_cancel(of->session);
}

static void from_inside(void) {
  rig of;
  stg_tree tree;
  new_rig(&of, NULL, ", \"trainer\": {\"max_epochs\": 2}");
  if (!strategy_is("sequential")) with_checkpoints(&of, ""); /* which saves nothing */
  of.inside = cancel_at_two;
  open_rig(&of);
  FAILS(stg_session_run(of.session, &tree), STG_CANCELLED, "cancelled");
  CHECK(of.num_starts == 3 && of.num_ends == 2);
  if (of.folder[0] != 0) CHECK(has_checkpoint(&of, "step-00000002"));
  close_rig(&of);
}

static gate in_step;
static void wait_in_step(void* unused) {
  (void)unused;
  reach_gate(&in_step);
}

static rig* handled;
static void on_signal(int number) {
  (void)number;
  stg_session_cancel(handled->session);
}

/* The last replica's step waits. What runs replicas on threads of its own gives up at once; else it is when the step ends. */
static void while_slow(void (*cancel)(rig*)) {
  rig of;
  runner run;
  const gate fresh = NEW_GATE;
  const int has_threads = strategy_is("data_parallel") && the_host.num_devices > 1;
  in_step = fresh;
  new_rig(&of, NULL, "");
  of.model.inside = wait_in_step;
  open_rig(&of);
  start_run(&run, &of);
  wait_for_reach(&in_step);
  cancel(&of);
  if (!has_threads) open_gate(&in_step);
  join_run(&run); /* for ever, if it waited for the step */
  FAILS(run.error, STG_CANCELLED, "cancelled");
  open_gate(&in_step);
  close_rig(&of);
}

static void by_call(rig* of) { stg_session_cancel(of->session); }
static void by_another_thread(void) { while_slow(by_call); }

static void by_raise(rig* of) {
  handled = of;
  signal(SIGUSR2, on_signal);
  raise(SIGUSR2);
  signal(SIGUSR2, SIG_DFL);
}
static void by_signal(void) { while_slow(by_raise); }

const test cancel_tests[] = {
    {"a cancelled run ends before its next call of the strategy, and the last update is saved", from_inside},
    {"a run is cancelled by another thread while a step is slow", by_another_thread},
    {"a run is cancelled by a signal handler while a step is slow", by_signal},
};
const uint64_t num_cancel_tests = sizeof cancel_tests / sizeof *cancel_tests;
