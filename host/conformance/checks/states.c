/* SPDX-License-Identifier: Apache-2.0
 *
 * Every function in every state, from the table in states.h: illegal calls are failed_precondition, legal ones anything else. The same
 * while a call runs, from inside its callbacks and from another thread.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conformance/checks/check.h"

#define NUMBER(function, who, states) CALL_##function,
enum { STG_STRATEGY_FUNCTIONS(NUMBER) NUM_FUNCTIONS };

typedef struct function {
  const char* name;
  uint32_t who;
  uint32_t states;
} function;

#define ROW(function, who, states) {#function, who, states},
static const function functions[] = {STG_STRATEGY_FUNCTIONS(ROW)};

static stg_error* call_step(int which, const session* s) {
  batch b;
  stg_step_result result;
  make_batch(&b, 4, 1);
  stg_tree tree = batch_tree(&b, 0);
  stg_step_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.batch = &tree;
  memset(&result, 0, sizeof result);
  result.struct_size = sizeof result;
  stg_error* error = which == CALL_training_step     ? the_host.api->training_step(s->strategy, NULL, &args, &result)
                     : which == CALL_train_batch     ? the_host.api->train_batch(s->strategy, NULL, &args, &result, NULL)
                     : which == CALL_validation_step ? the_host.api->validation_step(s->strategy, NULL, &args, &result)
                     : which == CALL_test_step       ? the_host.api->test_step(s->strategy, NULL, &args, &result)
                                                     : the_host.api->predict_step(s->strategy, NULL, &args, &result);
  CHECK_THAT(tree.release == NULL, "%s consumes a moved batch on every return", functions[which].name);
  if (error == NULL) release_tree(&result.outputs);
  return error;
}

static stg_error* call_with_tree(int which, const session* s) {
  batch b;
  stg_tree out;
  uint64_t ticket = 0;
  make_batch(&b, 4, 1);
  stg_tree tree = batch_tree(&b, 0);
  stg_transfer_args args;
  memset(&out, 0, sizeof out);
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.batch = &tree;
  args.device.index = -1;
  stg_error* error = NULL;
  if (which == CALL_batch_to_device) error = the_host.api->batch_to_device(s->strategy, NULL, &args, &out);
  if (which == CALL_broadcast) error = the_host.api->broadcast(s->strategy, NULL, &tree, 0, &out);
  if (which == CALL_all_gather) error = the_host.api->all_gather(s->strategy, NULL, &tree, &out);
  if (which == CALL_reduce) error = the_host.api->reduce(s->strategy, NULL, &tree, STG_REDUCE_SUM, &out);
  if (which == CALL_to_host) error = the_host.api->to_host(s->strategy, NULL, &tree, &out);
  if (which == CALL_announce_batch) error = the_host.api->announce_batch(s->strategy, NULL, &args, STG_STAGE_FIT, &ticket);
  CHECK_THAT(tree.release == NULL, "%s consumes a moved tree on every return", functions[which].name);
  release_tree(&out);
  return error;
}

static stg_error* call_import(const session* s) {
  stg_tree state, report;
  memset(&state, 0, sizeof state);
  memset(&report, 0, sizeof report);
  state.root.type = STG_NONE;
  stg_error* error = the_host.api->import_state(s->strategy, NULL, &state, 0, &report);
  release_tree(&report);
  return error;
}

static stg_error* call_checkpoint(int which, const session* s) {
  stg_checkpoint_args args;
  stg_tree host_json, report;
  memset(&args, 0, sizeof args);
  memset(&host_json, 0, sizeof host_json);
  memset(&report, 0, sizeof report);
  args.struct_size = sizeof args;
  args.path.data = "/nonexistent/stratagem/checkpoint"; /* the state is asked about, not the disk */
  args.path.size_bytes = strlen(args.path.data);
  if (which == CALL_save) return the_host.api->save(s->strategy, NULL, &args);
  stg_error* error = the_host.api->load(s->strategy, NULL, &args, &host_json, &report);
  release_tree(&host_json);
  release_tree(&report);
  return error;
}

static stg_error* call_reduce_gradients(const session* s) {
  stg_gradient_set given[64], *pointers[64];
  stg_reduce_gradients_args args;
  const stg_device* devices = NULL;
  memset(&args, 0, sizeof args);
  memset(given, 0, sizeof given);
  args.struct_size = sizeof args;
  args.sets = pointers;
  SUCCEEDS(the_host.api->devices(s->strategy, &devices, &args.num_sets));
  for (uint64_t i = 0; i < args.num_sets && i < 64; ++i) {
    given[i].struct_size = sizeof given[i];
    given[i].device = devices[i];
    given[i].weight = 1;
    pointers[i] = &given[i];
  }
  return the_host.api->reduce_gradients(s->strategy, NULL, &args);
}

static stg_error* call_rest(int which, session* s) {
  const stg_strategy_api* api = the_host.api;
  const stg_string name = {"states", 6};
  const stg_device* devices = NULL;
  uint64_t num_devices = 0;
  uint32_t decision = 0;
  stg_tree out;
  stg_status status;
  stg_ranks ranks;
  stg_model_description description;
  stg_update_args update;
  memset(&out, 0, sizeof out);
  memset(&status, 0, sizeof status);
  memset(&ranks, 0, sizeof ranks);
  memset(&description, 0, sizeof description);
  memset(&update, 0, sizeof update);
  status.struct_size = sizeof status;
  ranks.struct_size = sizeof ranks;
  description.struct_size = sizeof description;
  update.struct_size = sizeof update;
  stg_error* error = NULL;
  switch (which) {
    case CALL_status:
      return api->status(s->strategy, &status);
    case CALL_devices:
      return api->devices(s->strategy, &devices, &num_devices);
    case CALL_ranks:
      return api->ranks(s->strategy, &ranks);
    case CALL_setup:
      return set_up(s, STG_STAGE_FIT, NULL);
    case CALL_teardown:
      return api->teardown(s->strategy, NULL);
    case CALL_describe_parameters:
      return api->describe_parameters(s->strategy, &description);
    case CALL_model_to_device:
      return api->model_to_device(s->strategy, NULL);
    case CALL_reduce_boolean_decision:
      return api->reduce_boolean_decision(s->strategy, NULL, 1, STG_DECIDE_ALL, &decision);
    case CALL_barrier:
      return api->barrier(s->strategy, NULL, name);
    case CALL_backward:
      return api->backward(s->strategy, NULL, 0);
    case CALL_optimizer_step:
      return api->optimizer_step(s->strategy, NULL, &update, NULL);
    case CALL_zero_grad:
      return api->zero_grad(s->strategy, NULL);
    case CALL_gradients:
      error = api->gradients(s->strategy, NULL, &out);
      break;
    case CALL_parameters_changed:
      return api->parameters_changed(s->strategy, NULL);
    case CALL_reduce_gradients:
      return call_reduce_gradients(s);
    case CALL_export_state:
      error = api->export_state(s->strategy, NULL, STG_EXPORT_COPY, &out);
      break;
    case CALL_import_state:
      return call_import(s);
    case CALL_save:
    case CALL_load:
      return call_checkpoint(which, s);
    default:
      check_at(__FILE__, __LINE__, 0, "%s is called by this test", functions[which].name);
      break;
  }
  release_tree(&out);
  return error;
}

static stg_error* call(int which, session* s) {
  switch (which) {
    case CALL_training_step:
    case CALL_train_batch:
    case CALL_validation_step:
    case CALL_test_step:
    case CALL_predict_step:
      return call_step(which, s);
    case CALL_batch_to_device:
    case CALL_broadcast:
    case CALL_all_gather:
    case CALL_reduce:
    case CALL_to_host:
    case CALL_announce_batch:
      return call_with_tree(which, s);
    default:
      return call_rest(which, s);
  }
}

/* backward and optimizer_step need a forward before them too: that is order, not state. */
static int needs_a_forward(int which) {
  return which == CALL_backward || which == CALL_optimizer_step || which == CALL_gradients;
}

static int enter_state(session* s, uint32_t state) {
  new_mlp(&s->model, 1);
  s->strategy = make_strategy(1, 0, NULL);
  if (s->strategy == NULL) return 0;
  if (state == STG_STATE_FIT) return SUCCEEDS(set_up(s, STG_STAGE_FIT, NULL));
  if (state == STG_STATE_EVALUATE) return SUCCEEDS(set_up(s, STG_STAGE_VALIDATE, NULL));
  if (state == STG_STATE_MODELLESS) {
    stg_setup_args args;
    memset(&args, 0, sizeof args);
    args.struct_size = sizeof args;
    return SUCCEEDS(the_host.api->setup(s->strategy, NULL, &args));
  }
  if (state == STG_STATE_DRAINING) the_host.api->abort(s->strategy);
  return 1;
}

/* A state's name in an error, and what its way out has in it. */
static const struct {
  uint32_t state;
  const char *name, *way_out;
} state_texts[] = {
    {STG_STATE_CREATED, "created", "setup"},
    {STG_STATE_FIT, "set up for fit", "teardown"},
    {STG_STATE_EVALUATE, "set up for evaluation", "teardown"},
    {STG_STATE_MODELLESS, "set up without a model", "teardown"},
    {STG_STATE_DRAINING, "draining", "destroy"},
};
#define NUM_STATES (sizeof state_texts / sizeof *state_texts)

static int has_answer(int which) { return which != CALL_destroy && which != CALL_abort; }

/* A function that a strategy may lack; the error is released. */
static int succeeds_or_lacks(stg_error* error, const char* name) {
  if (error == NULL) return 1;
  FAILS(error, STG_UNIMPLEMENTED, name);
  return 0;
}

/* What can be seen of an instance: its status, and the weights where there is a model. */
typedef struct picture {
  stg_status status;
  weights weights;
} picture;

static void take_picture(const session* s, picture* out) {
  stg_model_description description;
  memset(&description, 0, sizeof description);
  description.struct_size = sizeof description;
  memset(out, 0, sizeof *out);
  out->status.struct_size = sizeof out->status;
  SUCCEEDS(the_host.api->status(s->strategy, &out->status));
  if ((out->status.state & STG_STATES_MODEL_) == 0) return;
  if (succeeds_or_lacks(the_host.api->describe_parameters(s->strategy, &description), "describe_parameters"))
    read_weights_of(s, &out->weights);
}

/* A call that the table forbids: an error of this code that has `name` and `way_out` in it, after which nothing is different. */
static void check_refused(int which, session* s, const char* name, const char* way_out, uint32_t flags) {
  stg_error* error = call(which, s);
  if (!CHECK_THAT(error != NULL, "%s is refused: %s", functions[which].name, name)) return;
  /* A function that a strategy lacks may say so in any state. */
  if (error->code != STG_UNIMPLEMENTED) {
    CHECK_THAT(error->code == STG_FAILED_PRECONDITION, "%s, %s: code %u", functions[which].name, name, error->code);
    CHECK_THAT(
        text_has(error->message, functions[which].name) && text_has(error->message, name) && text_has(error->message, way_out),
        "%s names itself, \"%s\" and \"%s\": %.*s", functions[which].name, name, way_out, (int)error->message.size_bytes,
        error->message.data);
    CHECK_THAT((error->flags & flags) == flags, "%s, %s: flags %u", functions[which].name, name, error->flags);
  }
  error->release(error);
}

static void check_all_refused(session* s, uint32_t state) {
  picture before, after;
  uint64_t t = 0;
  while (state_texts[t].state != state) ++t;
  take_picture(s, &before);
  CHECK_THAT(before.status.state == state, "the state is %u, not %u", state, before.status.state);
  for (int which = 0; which < NUM_FUNCTIONS; ++which) {
    if (!has_answer(which) || (functions[which].states & state) != 0) continue;
    check_refused(which, s, state_texts[t].name, state_texts[t].way_out,
                  state == STG_STATE_DRAINING ? STG_ERROR_INSTANCE_DRAINING : 0);
    take_picture(s, &after);
    CHECK_THAT(memcmp(&before, &after, sizeof before) == 0, "%s changed something: it is %s", functions[which].name,
               state_texts[t].name);
  }
}

static void illegal_calls_change_nothing(void) {
  for (uint64_t t = 0; t < NUM_STATES; ++t) {
    session s;
    batch b;
    stg_step_result result;
    if (!enter_state(&s, state_texts[t].state)) continue;
    if (state_texts[t].state == STG_STATE_FIT) { /* an update, a micro-batch and a graph, which are not to be lost */
      make_batch(&b, 6, 1);
      SUCCEEDS(train_on(&s, &b, 0.1));
      for (int i = 0; i < 2; ++i) {
        stg_tree tree = batch_tree(&b, 0);
        if (SUCCEEDS(training_step(&s, &tree, &result))) release_tree(&result.outputs);
        if (i == 0) SUCCEEDS(the_host.api->backward(s.strategy, NULL, 0));
      }
    }
    check_all_refused(&s, state_texts[t].state);
    close_session(&s);
  }
}

static void legal_calls_are_taken(void) {
  for (uint64_t t = 0; t < NUM_STATES; ++t) {
    for (int which = 0; which < NUM_FUNCTIONS; ++which) {
      session s;
      if (!has_answer(which) || (functions[which].states & state_texts[t].state) == 0) continue;
      if (!enter_state(&s, state_texts[t].state)) continue;
      stg_error* error = call(which, &s);
      CHECK_THAT(error == NULL || error->code != STG_FAILED_PRECONDITION || needs_a_forward(which), "%s is legal: %s, %.*s",
                 functions[which].name, state_texts[t].name, error == NULL ? 0 : (int)error->message.size_bytes,
                 error == NULL ? "" : error->message.data);
      if (error != NULL) error->release(error);
      close_session(&s);
    }
  }
}

/* abort answers nothing; what it does is seen. The same of destroy, which ends each session here. */
static void abort_drains_from_every_state(void) {
  for (uint64_t t = 0; t < NUM_STATES; ++t) {
    session s;
    if (!enter_state(&s, state_texts[t].state)) continue;
    for (int times = 0; times < 2; ++times) {
      the_host.api->abort(s.strategy);
      check_all_refused(&s, STG_STATE_DRAINING);
    }
    close_session(&s);
  }
}

/* The other way into it. A strategy that runs all on the calling thread has nobody to give up. */
static void a_deadline_drains(void) {
  session s;
  batch b;
  stg_step_result result;
  stg_call until;
  picture now;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, 1);
  memset(&until, 0, sizeof until);
  until.struct_size = sizeof until;
  until.deadline_ns = clock_ns() + 20000000u;
  s.model.slow_replica = (int32_t)the_host.num_devices - 1;
  stg_tree tree = batch_tree(&b, 0);
  stg_error* error = train_batch(&s, &until, &tree, 0.1, STG_BATCH_LAST_MICRO_BATCH, &result, NULL);
  if (error == NULL) release_tree(&result.outputs);
  if (error != NULL) error->release(error);
  take_picture(&s, &now);
  if (now.status.state == STG_STATE_DRAINING) check_all_refused(&s, STG_STATE_DRAINING);
  close_session(&s);
}

/* ---- who calls ---- */

static void call_all(session* s, const char* part) {
  for (int which = 0; which < NUM_FUNCTIONS; ++which) {
    if (!has_answer(which)) continue;
    if (functions[which].who == STG_THREAD_ANY) {
      SUCCEEDS(call(which, s));
    } else {
      check_refused(which, s, part, "one c", 0); /* one call, or one caller, at a time */
    }
  }
}

static void call_all_from_inside(void* s) { call_all(s, "callback"); }

static void* run_other_thread(void* s) {
  call_all(s, "another");
  return NULL;
}

static void call_all_from_another_thread(void* s) {
  pthread_t thread;
  if (CHECK(pthread_create(&thread, NULL, run_other_thread, s) == 0)) pthread_join(thread, NULL);
}

static void only_queries_while_a_call_runs(void (*inside)(void*)) {
  for (int evaluates = 0; evaluates < 2; ++evaluates) {
    session s, same;
    batch b;
    stg_step_result result;
    picture one, other;
    if (!open_session(&s, 0, 0, STG_STAGE_FIT) || !open_session(&same, 0, 0, STG_STAGE_FIT)) return;
    make_batch(&b, 6, 1);
    s.model.inside = inside;
    s.model.inside_context = &s;
    stg_tree tree = batch_tree(&b, 0);
    if (evaluates) {
      if (succeeds_or_lacks(validation_step(&s, &tree, &result), "validation_step")) release_tree(&result.outputs);
    } else if (SUCCEEDS(train_batch(&s, NULL, &tree, 0.1, STG_BATCH_LAST_MICRO_BATCH, &result, NULL))) {
      release_tree(&result.outputs);
      SUCCEEDS(train_on(&same, &b, 0.1));
    }
    take_picture(&s, &one);
    take_picture(&same, &other);
    CHECK_THAT(memcmp(&one, &other, sizeof one) == 0, "a step that was called into ends as any other: evaluates %d", evaluates);
    close_session(&s);
    close_session(&same);
  }
}

static void a_callback_must_not_call_in(void) { only_queries_while_a_call_runs(call_all_from_inside); }
static void another_thread_must_not_call_in(void) { only_queries_while_a_call_runs(call_all_from_another_thread); }

DEFINE_CHECKS(
    state_checks,
    {"state-legal-calls-taken", "Each function is taken in each state in which states.h allows it", "F1",
     NEEDS_STRATEGY | IS_ONCE, legal_calls_are_taken},
    {"state-illegal-calls-refused",
     "A function that states.h forbids in a state is failed_precondition that names itself, the state and the way out, and "
     "changes nothing",
     "F1", NEEDS_STRATEGY | IS_ONCE, illegal_calls_change_nothing},
    {"abort-drains", "abort leaves an instance draining, whatever its state, twice as well as once", "F4",
     NEEDS_STRATEGY | IS_ONCE, abort_drains_from_every_state},
    {"deadline-drains-alike", "An instance that a deadline has left draining refuses the same as an aborted one", "D4",
     NEEDS_STRATEGY | IS_TIMED, a_deadline_drains},
    {"thread-callback-refused", "From inside a callback an instance takes only queries, and the call goes on as any other", "F1",
     NEEDS_STRATEGY, a_callback_must_not_call_in},
    {"thread-second-caller-refused",
     "While a call runs, another thread's gets only queries answered, and the first goes on as any other", "F1", NEEDS_STRATEGY,
     another_thread_must_not_call_in});
