/* SPDX-License-Identifier: Apache-2.0
 *
 * Growing structs: a host that is older or newer than the plugin, and one that forgot to set a size.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conformance/checks/check.h"

/* An argument struct in a buffer with room behind it, given to a function that takes a pointer to it. */
typedef stg_error* (*giver)(session* s, void* args);

typedef struct room {
  uint64_t words[64];
} room;

/* `args` fills the front of a room; `size_bytes` is the size that this host was compiled with. */
static void check_argument(session* s, const char* name, const void* args, uint64_t size_bytes, uint64_t min_bytes, giver give) {
  static const uint64_t sizes[] = {0, 8, UINT64_MAX, STG_MAX_STRUCT_SIZE_BYTES + 8};
  room given;
  char text[64];
  memset(&given, 0, sizeof given);
  memcpy(&given, args, size_bytes);
  given.words[0] = size_bytes;
  stg_error* absent = give(s, &given);
  if (absent != NULL) { /* nothing is odd in it: a function that a strategy may lack */
    FAILS(absent, STG_UNIMPLEMENTED, NULL);
    return;
  }
  for (int i = 0; i < 5; ++i) {
    memset(&given, 0, sizeof given);
    memcpy(&given, args, size_bytes);
    given.words[0] = i == 4 ? min_bytes - 8 : sizes[i];
    stg_error* error = give(s, &given);
    CHECK_THAT(error != NULL && error->code == STG_INVALID_ARGUMENT, "%s of %llu bytes is refused", name,
               (unsigned long long)given.words[0]);
    if (error != NULL) error->release(error);
  }
  for (uint64_t offset = size_bytes; offset < size_bytes + 24; offset += 8) {
    memset(&given, 0, sizeof given);
    memcpy(&given, args, size_bytes);
    given.words[0] = size_bytes + 24;
    given.words[offset / 8] = 1;
    snprintf(text, sizeof text, "%llu", (unsigned long long)offset);
    stg_error* error = give(s, &given);
    CHECK_THAT(error != NULL && error->code == STG_UNIMPLEMENTED, "%s with a value at %s, unknown here, is unimplemented", name,
               text);
    if (error == NULL) continue;
    CHECK_THAT(text_has(error->message, text), "the offset %s is named: %.*s", text, (int)error->message.size_bytes,
               error->message.data);
    error->release(error);
  }
  memset(&given, 0, sizeof given);
  memcpy(&given, args, size_bytes);
  given.words[0] = size_bytes + 24; /* newer, with nothing set */
  stg_error* error = give(s, &given);
  CHECK_THAT(error == NULL, "%s with zeros behind it is taken", name);
  if (error != NULL) error->release(error);
}

static stg_error* give_create(session* s, void* args) {
  const stg_string config = plain_config();
  stg_strategy* made = NULL;
  (void)s;
  memcpy((char*)args + offsetof(stg_create_args, config_json), &config, sizeof config);
  stg_error* error = the_host.api->create(args, &made);
  CHECK_THAT((error == NULL) == (made != NULL), "on failure outputs are untouched");
  if (made != NULL) destroy_strategy(made);
  return error;
}

static stg_error* give_setup(session* s, void* args) {
  stg_error* error = the_host.api->setup(s->strategy, NULL, args);
  if (error == NULL) SUCCEEDS(the_host.api->teardown(s->strategy, NULL));
  return error;
}

static stg_error* give_call(session* s, void* args) {
  const stg_string name = {"sizes", 5};
  return the_host.api->barrier(s->strategy, args, name);
}

static stg_error* give_step(session* s, void* args) {
  batch b;
  stg_step_result result;
  make_batch(&b, 4, 1);
  stg_tree whole = batch_tree(&b, 0), view = borrowed(&whole);
  const stg_tree* given = &view;
  memcpy((char*)args + offsetof(stg_step_args, batch), &given, sizeof given);
  memset(&result, 0, sizeof result);
  result.struct_size = sizeof result;
  stg_error* error = the_host.api->training_step(s->strategy, NULL, args, &result);
  CHECK_THAT(error == NULL || (result.weights == NULL && result.outputs.release == NULL), "on failure outputs are untouched");
  if (error == NULL) release_tree(&result.outputs);
  release_tree(&whole);
  return error;
}

static stg_error* give_update(session* s, void* args) {
  batch b;
  stg_step_result result;
  make_batch(&b, 4, 1);
  stg_tree whole = batch_tree(&b, 0);
  if (SUCCEEDS(training_step(s, &whole, &result))) release_tree(&result.outputs);
  SUCCEEDS(the_host.api->backward(s->strategy, NULL, 0));
  return the_host.api->optimizer_step(s->strategy, NULL, args, NULL);
}

static stg_error* give_transfer(session* s, void* args) {
  batch b;
  stg_tree out;
  make_batch(&b, 4, 1);
  stg_tree whole = batch_tree(&b, 0), view = borrowed(&whole);
  const stg_tree* given = &view;
  memcpy((char*)args + offsetof(stg_transfer_args, batch), &given, sizeof given);
  memset(&out, 0, sizeof out);
  stg_error* error = the_host.api->batch_to_device(s->strategy, NULL, args, &out);
  release_tree(&out);
  release_tree(&whole);
  return error;
}

static stg_error* give_save(session* s, void* args) {
  const stg_string path = {"/nonexistent/stratagem/checkpoint", 33};
  memcpy((char*)args + offsetof(stg_checkpoint_args, path), &path, sizeof path);
  stg_error* error = the_host.api->save(s->strategy, NULL, args);
  if (error == NULL || (error->code != STG_NOT_FOUND && error->code != STG_PERMISSION_DENIED)) return error;
  error->release(error); /* the struct was taken; the folder is none that can be made */
  return NULL;
}

static stg_error* give_gradients(session* s, void* args) {
  stg_gradient_set given[64];
  stg_gradient_set* pointers[64];
  stg_gradient_set* const* list = pointers;
  const stg_device* devices = NULL;
  uint64_t num_devices = 0;
  memset(given, 0, sizeof given);
  SUCCEEDS(the_host.api->devices(s->strategy, &devices, &num_devices));
  for (uint64_t i = 0; i < num_devices && i < 64; ++i) {
    given[i].struct_size = sizeof given[i];
    given[i].device = devices[i];
    given[i].weight = 1;
    pointers[i] = &given[i];
  }
  memcpy((char*)args + offsetof(stg_reduce_gradients_args, sets), &list, sizeof list);
  memcpy((char*)args + offsetof(stg_reduce_gradients_args, num_sets), &num_devices, sizeof num_devices);
  return the_host.api->reduce_gradients(s->strategy, NULL, args);
}

static void arguments_of_other_sizes(void) {
  session s;
  stg_create_args create;
  stg_setup_args setup;
  stg_call call;
  stg_step_args step;
  stg_update_args update;
  stg_transfer_args transfer;
  stg_checkpoint_args checkpoint;
  stg_reduce_gradients_args gradients;
  memset(&create, 0, sizeof create);
  memset(&transfer, 0, sizeof transfer);
  memset(&checkpoint, 0, sizeof checkpoint);
  memset(&gradients, 0, sizeof gradients);
  transfer.device.index = -1;
  memset(&setup, 0, sizeof setup);
  memset(&call, 0, sizeof call);
  memset(&step, 0, sizeof step);
  memset(&update, 0, sizeof update);
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  check_argument(&s, "create_args", &create, sizeof create, STG_CREATE_ARGS_MIN_SIZE, give_create);
  check_argument(&s, "call", &call, sizeof call, STG_CALL_MIN_SIZE, give_call);
  check_argument(&s, "step_args", &step, sizeof step, STG_STEP_ARGS_MIN_SIZE, give_step);
  check_argument(&s, "update_args", &update, sizeof update, STG_UPDATE_ARGS_MIN_SIZE, give_update);
  check_argument(&s, "transfer_args", &transfer, sizeof transfer, STG_TRANSFER_ARGS_MIN_SIZE, give_transfer);
  check_argument(&s, "checkpoint_args", &checkpoint, sizeof checkpoint, STG_CHECKPOINT_ARGS_MIN_SIZE, give_save);
  SUCCEEDS(the_host.api->teardown(s.strategy, NULL));
  check_argument(&s, "setup_args", &setup, sizeof setup, STG_SETUP_ARGS_MIN_SIZE, give_setup);
  memset(&setup, 0, sizeof setup);
  setup.struct_size = sizeof setup;
  if (SUCCEEDS(the_host.api->setup(s.strategy, NULL, &setup))) { /* without a model */
    check_argument(&s, "reduce_gradients_args", &gradients, sizeof gradients, STG_REDUCE_GRADIENTS_ARGS_MIN_SIZE, give_gradients);
  }
  close_session(&s);
}

/* ---- results ---- */

static stg_error* ask_status(const session* s, void* out) { return the_host.api->status(s->strategy, out); }
static stg_error* ask_ranks(const session* s, void* out) { return the_host.api->ranks(s->strategy, out); }
static stg_error* ask_parameters(const session* s, void* out) { return the_host.api->describe_parameters(s->strategy, out); }

static stg_error* ask_step(const session* s, void* out) {
  batch b;
  make_batch(&b, 4, 1);
  stg_tree tree = batch_tree(&b, 0);
  stg_step_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.batch = &tree;
  stg_error* error = the_host.api->validation_step(s->strategy, NULL, &args, out);
  if (error == NULL) release_tree(&((stg_step_result*)out)->outputs);
  return error;
}

static stg_error* ask_update(const session* s, void* out) {
  batch b;
  make_batch(&b, 4, 1);
  stg_tree tree = batch_tree(&b, 0);
  stg_step_result result;
  stg_update_args args;
  if (SUCCEEDS(training_step(s, &tree, &result))) release_tree(&result.outputs);
  SUCCEEDS(the_host.api->backward(s->strategy, NULL, 0));
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  return the_host.api->optimizer_step(s->strategy, NULL, &args, out);
}

static void results_of_other_sizes(void) {
  static const struct {
    stg_error* (*ask)(const session* s, void* out);
    uint64_t size_bytes, min_bytes;
  } results[] = {
      {ask_status, sizeof(stg_status), STG_STATUS_MIN_SIZE},
      {ask_ranks, sizeof(stg_ranks), STG_RANKS_MIN_SIZE},
      {ask_parameters, sizeof(stg_model_description), STG_MODEL_DESCRIPTION_MIN_SIZE},
      {ask_step, sizeof(stg_step_result), STG_STEP_RESULT_MIN_SIZE},
      {ask_update, sizeof(stg_update_result), STG_UPDATE_RESULT_MIN_SIZE},
  };
  session s;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  for (uint64_t i = 0; i < sizeof results / sizeof *results; ++i) {
    room out;
    memset(&out, 0x33, sizeof out);
    out.words[0] = results[i].size_bytes;
    stg_error* absent = results[i].ask(&s, &out);
    if (absent != NULL) { /* a function that a strategy may lack */
      FAILS(absent, STG_UNIMPLEMENTED, NULL);
      continue;
    }
    const uint64_t wrong[] = {0, results[i].min_bytes - 8, UINT64_MAX, STG_MAX_STRUCT_SIZE_BYTES + 8};
    for (int k = 0; k < 4; ++k) {
      memset(&out, 0x33, sizeof out);
      out.words[0] = wrong[k];
      FAILS(results[i].ask(&s, &out), STG_INVALID_ARGUMENT, NULL);
      CHECK_THAT(out.words[0] == wrong[k] && out.words[1] == UINT64_C(0x3333333333333333), "on failure outputs are untouched");
    }
    memset(&out, 0x33, sizeof out);
    out.words[0] = results[i].size_bytes + 16; /* a newer host */
    SUCCEEDS(results[i].ask(&s, &out));
    CHECK_THAT(out.words[0] == results[i].size_bytes, "struct_size is %llu, what the plugin of this minor knows: %llu",
               (unsigned long long)results[i].size_bytes, (unsigned long long)out.words[0]);
    CHECK_THAT(out.words[results[i].size_bytes / 8] == UINT64_C(0x3333333333333333), "bytes past it are untouched");
    CHECK(out.words[1] != UINT64_C(0x3333333333333333));
  }
  close_session(&s);
}

/* ---- unknown values ---- */

static void unknown_values_are_errors(void) {
  session s;
  uint32_t decision = 5;
  stg_error* error = NULL;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  FAILS(the_host.api->reduce_boolean_decision(s.strategy, NULL, 1, 77, &decision), STG_INVALID_ARGUMENT, NULL);
  FAILS(the_host.api->reduce_boolean_decision(s.strategy, NULL, 2, STG_DECIDE_ALL, &decision), STG_INVALID_ARGUMENT, NULL);
  CHECK_THAT(decision == 5, "on failure outputs are untouched");
  error = the_host.api->backward(s.strategy, NULL, UINT64_C(1) << 40);
  CHECK_THAT(error != NULL && error->code != STG_INTERNAL, "an unknown flag is an error");
  if (error != NULL) error->release(error);
  SUCCEEDS(the_host.api->teardown(s.strategy, NULL));
  FAILS(set_up(&s, 44, NULL), STG_INVALID_ARGUMENT, NULL);
  close_session(&s);
}

static void configs_that_can_not_be(void) {
  static const char* const bad[] = {
      "nonsense",
      "[]",
      "{",
      "{\"devices\": 0}",
      "{\"devices\": -1}",
      "{\"devices\": 1.5}",
      "{\"devices\": []}",
      "{\"devices\": \"many\"}",
      "{\"accelerator\": \"abacus\"}",
      "{\"precision\": \"3-true\"}",
      "{\"optimizer\": {\"name\": \"nobody\"}}",
      "{\"optimizer\": 3}",
      "{\"devices\": 1} more",
      "{\"devices\": 1,}",
      "{\"devices\": 99999999999999999999}",
      "{\"nonsense\": 1}",
      "{\"options\": {\"nonsense\": 1}}",
      "{\"devices\": 1, \"devices\": 1}",
      "{\"optimizer\": {\"name\": \"sgd\", \"name\": \"sgd\"}}",
  };
  for (uint64_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
    stg_error* error = NULL;
    stg_strategy* made = make_strategy_from(bad[i], 0, NULL, &error);
    CHECK_THAT(error != NULL && made == NULL, "the config %s is refused", bad[i]);
    if (error != NULL) {
      CHECK_THAT(error->code != STG_INTERNAL && error->code != STG_UNKNOWN && error->message.size_bytes > 0, "%s: code %u",
                 bad[i], error->code);
      error->release(error);
    }
    if (made != NULL) destroy_strategy(made);
  }
}

/* ---- as large as can be ---- */

static union {
  uint64_t words[STG_MAX_STRUCT_SIZE_BYTES / 8];
  stg_call call;
  stg_create_args create;
} largest;

static void the_largest_sizes_are_taken(void) {
  static const stg_string name = {"sizes", 5};
  session s;
  stg_strategy* made = NULL;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  memset(&largest, 0, sizeof largest);
  largest.call.struct_size = STG_MAX_STRUCT_SIZE_BYTES;
  SUCCEEDS(the_host.api->barrier(s.strategy, &largest.call, name));
  memset(&largest, 0, sizeof largest);
  largest.create.struct_size = STG_MAX_STRUCT_SIZE_BYTES;
  largest.create.config_json = plain_config();
  if (SUCCEEDS(the_host.api->create(&largest.create, &made))) destroy_strategy(made);
  largest.words[STG_MAX_STRUCT_SIZE_BYTES / 8 - 1] = 1; /* the last one is looked at, too */
  made = NULL;
  FAILS(the_host.api->create(&largest.create, &made), STG_UNIMPLEMENTED, NULL);
  close_session(&s);
}

DEFINE_CHECKS(struct_checks,
              {"arguments-of-other-sizes",
               "Of each argument struct less than the smallest size and more than 65536 bytes are refused; zeros behind what is "
               "known are taken; another value there is unimplemented, with its offset",
               "B1", NEEDS_STRATEGY | IS_ONCE, arguments_of_other_sizes},
              {"results-of-other-sizes",
               "Of each result struct sizes too small or absurd are refused; of a newer host's the size is lowered and nothing "
               "written past it",
               "B1", NEEDS_STRATEGY | IS_ONCE, results_of_other_sizes},
              {"unknown-values-refused", "Decision 2, mode 77, stage 44 and unknown flags are errors", "B2",
               NEEDS_STRATEGY | IS_ONCE, unknown_values_are_errors},
              {"bad-configs-refused", "19 configs that can't be are refused in words, without an internal error", "G1",
               NEEDS_STRATEGY | IS_ONCE, configs_that_can_not_be},
              {"largest-sizes-taken",
               "Argument structs of exactly 65536 bytes are taken if all behind what is known is 0, to the last byte", "B1",
               NEEDS_STRATEGY | IS_ONCE, the_largest_sizes_are_taken});
