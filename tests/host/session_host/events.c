/* SPDX-License-Identifier: Apache-2.0
 *
 * Events: called back, and polled.
 */
#include <stdlib.h>
#include <string.h>

#include "rig.h"

static const char* with_validation =
    "{\"train\": {\"source\": \"rows\", \"batch_size\": 4}, \"validation\": {\"source\": \"rows\", \"batch_size\": 5}}";

static void around_each_batch(void) {
  rig of;
  new_rig(&of, with_validation, ", \"trainer\": {\"max_epochs\": 2, \"log_every_n_steps\": 1}");
  open_rig(&of);
  run_rig(&of, "\"steps\":6");
  /* two to try validation, then in each epoch three and two */
  CHECK(of.num_starts == 12 && of.num_ends == 12 && of.num_progress == 12);
  CHECK(of.num_metrics == 6 + 2 + 2);
  CHECK(of.last.stage == STG_STAGE_VALIDATE && of.last.step == 6 && of.last.batch == 2 && of.last.num_batches == 2);
  close_rig(&of);
}

/* The error of an event, through the error of the run to its cause. */
static void check_event_error(stg_error* error, const char* event) {
  CHECK(error != NULL);
  if (error == NULL) return;
  CHECK(error->code == STG_OUT_OF_RANGE && text_has(error->message, event) && text_has(error->message, "enough of it"));
  const stg_error* cause = error->cause;
  while (cause != NULL && cause->cause != NULL) cause = cause->cause;
  CHECK(cause != NULL && cause->code == STG_OUT_OF_RANGE && cause->message.size_bytes == strlen("enough of it"));
  error->release(error);
}

static void error_of_start(void) {
  rig of;
  stg_tree tree;
  new_rig(&of, NULL, "");
  if (!strategy_is("sequential")) with_checkpoints(&of, ""); /* which saves nothing */
  of.start_error_at = 2;
  open_rig(&of);
  check_event_error(stg_session_run(of.session, &tree), "the event batch_start");
  CHECK(of.num_starts == 3 && of.num_ends == 2);
  if (of.folder[0] != 0) CHECK(has_checkpoint(&of, "step-00000002"));
  close_rig(&of);
}

static void error_of_end(void) {
  rig of;
  stg_tree tree;
  new_rig(&of, NULL, ", \"trainer\": {\"max_epochs\": 2, \"accumulate_grad_batches\": 2}");
  if (!strategy_is("sequential")) with_checkpoints(&of, "");
  of.end_error_at = 4; /* the second window of two, in the second epoch: the third update is done */
  open_rig(&of);
  check_event_error(stg_session_run(of.session, &tree), "the event batch_end");
  CHECK(of.num_starts == 5 && of.num_ends == 5 && of.last.step == 3);
  if (of.folder[0] != 0) CHECK(has_checkpoint(&of, "step-00000003"));
  close_rig(&of);
}

static void error_of_others(void) {
  rig of;
  stg_tree tree;
  new_rig(&of, NULL, ", \"trainer\": {\"max_epochs\": 2}");
  if (!strategy_is("sequential")) with_checkpoints(&of, "");
  of.progress_error_at = 3; /* of the fourth update */
  open_rig(&of);
  check_event_error(stg_session_run(of.session, &tree), "the event progress");
  CHECK(of.num_ends == 4 && of.num_progress == 4);
  if (of.folder[0] != 0) CHECK(has_checkpoint(&of, "step-00000004"));
  close_rig(&of);
  new_rig(&of, NULL, ", \"trainer\": {\"max_epochs\": 2, \"log_every_n_steps\": 1}");
  if (!strategy_is("sequential")) with_checkpoints(&of, "");
  of.metrics_error_at = 1; /* the line of the second update */
  open_rig(&of);
  check_event_error(stg_session_run(of.session, &tree), "the event metrics");
  CHECK(of.num_ends == 2 && of.num_metrics == 2);
  if (of.folder[0] != 0) CHECK(has_checkpoint(&of, "step-00000002"));
  close_rig(&of);
}

static stg_error* refuse_swap(void* self, int64_t step, stg_string strategy, const stg_error* error) {
  (void)self;
  CHECK(step == 2 && text_has(strategy, "\"name\"") && error == NULL);
  return new_error(STG_OUT_OF_RANGE, "enough of it");
}

static void error_of_swap(void) {
  rig of;
  stg_tree tree;
  new_rig(&of, NULL, "");
  if (!strategy_is("sequential")) with_checkpoints(&of, "");
  of.events.swap = refuse_swap;
  open_rig(&of);
  SUCCEEDS(stg_session_step(of.session, 2, NULL));
  SUCCEEDS(stg_session_request_swap(of.session, text(own_strategy())));
  check_event_error(stg_session_run(of.session, &tree), "the event swap");
  CHECK(of.num_ends == 2);
  if (of.folder[0] != 0) CHECK(has_checkpoint(&of, "step-00000002"));
  close_rig(&of);
}

static void error_within_a_window(void) {
  rig of;
  stg_tree tree;
  new_rig(&of, NULL, ", \"trainer\": {\"max_epochs\": 2, \"accumulate_grad_batches\": 2}");
  if (!strategy_is("sequential")) with_checkpoints(&of, "");
  of.end_error_at = 3; /* the first of the second epoch's first window */
  open_rig(&of);
  check_event_error(stg_session_run(of.session, &tree), "the event batch_end");
  if (of.folder[0] != 0) CHECK(has_checkpoint(&of, "step-00000002") && !has_checkpoint(&of, "step-00000003"));
  close_rig(&of);
}

static void error_in_validation(void) {
  rig of;
  stg_tree tree;
  new_rig(&of, with_validation, "");
  if (!strategy_is("sequential")) with_checkpoints(&of, "");
  of.start_error_at = 6; /* two to try it, three updates, then the second batch of validation */
  open_rig(&of);
  check_event_error(stg_session_run(of.session, &tree), "the event batch_start");
  if (of.folder[0] != 0) CHECK(has_checkpoint(&of, "step-00000003"));
  close_rig(&of);
}

static stg_tree next_event(stg_session session, uint64_t timeout_ns) {
  stg_tree event;
  memset(&event, 0, sizeof event);
  SUCCEEDS(stg_session_poll(session, timeout_ns, &event));
  return event;
}

static void polled(void) {
  rig of;
  stg_tree event;
  new_rig(&of, NULL, ", \"trainer\": {\"log_every_n_steps\": 1}");
  open_rig(&of);
  FAILS(stg_session_poll(of.session, 0, &event), STG_FAILED_PRECONDITION, "STG_SESSION_QUEUE_EVENTS");
  close_rig(&of);
  new_rig(&of, NULL, ", \"trainer\": {\"log_every_n_steps\": 1}");
  of.args.flags = STG_SESSION_QUEUE_EVENTS;
  of.args.events = NULL;
  open_rig(&of);
  event = next_event(of.session, 1000);
  CHECK(event.root.type == STG_NONE);
  run_rig(&of, "\"steps\":3");
  for (int step = 1; step <= 3; ++step) {
    event = next_event(of.session, 0);
    CHECK(result_has(&event, "{\"event\":\"metrics\",\"line\":{"));
    event = next_event(of.session, 0);
    CHECK(result_has(&event, step == 1 ? "\"step\":1" : step == 2 ? "\"step\":2" : "\"event\":\"progress\""));
  }
  event = next_event(of.session, 0);
  CHECK(result_has(&event, "\"stage\":\"epoch\""));
  event = next_event(of.session, UINT64_MAX >> 40);
  CHECK(event.root.type == STG_NONE);
  close_rig(&of);
}

static void dropped(void) {
  rig of;
  int num_progress = 0, num_metrics = 0;
  new_rig(&of, NULL, ", \"trainer\": {\"max_epochs\": 2000, \"log_every_n_steps\": 10}");
  of.args.flags = STG_SESSION_QUEUE_EVENTS;
  of.args.events = NULL;
  open_rig(&of);
  run_rig(&of, "\"steps\":6000");
  /* 6000 progress, 600 lines of updates, 2000 of epochs: 8600, of which 4096 are kept. */
  stg_tree event = next_event(of.session, 0);
  CHECK(result_has(&event, "{\"count\":4504,\"event\":\"dropped\"}"));
  for (;;) {
    event = next_event(of.session, 0);
    if (event.root.type == STG_NONE) break;
    const stg_string found = {event.root.as.utf8, event.root.count};
    num_progress += text_has(found, "\"event\":\"progress\"");
    num_metrics += text_has(found, "\"event\":\"metrics\"");
    release_tree(&event);
  }
  CHECK(num_metrics == 2600 && num_progress == 4096 - 2600);
  close_rig(&of);
}

typedef struct poller {
  stg_session session;
  int num_events;
  stg_error* error;
} poller;

static void* poll_until_closed(void* self) {
  poller* at = self;
  for (;;) {
    stg_tree event;
    memset(&event, 0, sizeof event);
    at->error = stg_session_poll(at->session, UINT64_MAX, &event);
    if (at->error != NULL) return NULL;
    CHECK(event.root.type == STG_STRING);
    __atomic_fetch_add(&at->num_events, 1, __ATOMIC_ACQ_REL);
    release_tree(&event);
  }
}

static void polled_by_another(void) {
  rig of;
  pthread_t thread;
  poller at = {0, 0, NULL};
  new_rig(&of, NULL, ", \"trainer\": {\"log_every_n_steps\": 1}");
  of.args.flags = STG_SESSION_QUEUE_EVENTS;
  open_rig(&of);
  at.session = of.session;
  if (pthread_create(&thread, NULL, poll_until_closed, &at) != 0) abort();
  run_rig(&of, "\"steps\":3");
  while (__atomic_load_n(&at.num_events, __ATOMIC_ACQUIRE) < 7) {
  }
  CHECK(of.num_progress == 3 && of.num_metrics == 4); /* called back, too */
  stg_session_close(of.session);
  pthread_join(thread, NULL);
  FAILS(at.error, STG_FAILED_PRECONDITION, "closed");
  close_rig(&of);
}

const test event_tests[] = {
    {"batch_start and batch_end come around each batch of training and validation", around_each_batch},
    {"an error of batch_start is the cause of the run's, and the last update is saved", error_of_start},
    {"an error of batch_end after an update is saved with that update", error_of_end},
    {"an error of progress or metrics is saved with the update that it tells of", error_of_others},
    {"an error of the event swap ends the run, saved as of the last update", error_of_swap},
    {"an error of batch_end between two updates is saved with the one before", error_within_a_window},
    {"an error of an event in validation is saved with the last update", error_in_validation},
    {"events are kept to be polled, in order, where the session was asked to", polled},
    {"of too many events progress goes first, and how many went is told", dropped},
    {"a poll that waits is woken by an event, and by the close of its session", polled_by_another},
};
const uint64_t num_event_tests = sizeof event_tests / sizeof *event_tests;
