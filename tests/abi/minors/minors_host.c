/* SPDX-License-Identifier: Apache-2.0
 *
 * A host and a plugin of two minors. This file is compiled against today's headers, and against those of a next minor that
 * next_minor.py makes; each of the two programs is run with a plugin of each minor, and what a newer side may ask of an older one, and
 * what an older one may not notice, is checked for all four pairs.
 *
 *   minors_host PLUGIN.so STRATEGY DEVICES MINOR [null_slot]     MINOR: the plugin's highest
 *
 * Of a plugin of minor 0 nothing is asked but what every plugin has to do: ours with LibTorch are run, too.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conformance/fixture/session.h"
#include "host/session_host/run.h"

#define LR 0.1
#define NUM_STEPS 3
#define CANARY 0xa5

static uint32_t own_minor = STG_ABI_MINOR, plugin_minor;
static int has_null_slot;

static uint32_t common_minor(void) { return plugin_minor < own_minor ? plugin_minor : own_minor; }

/* ---- the probe ---- */

static uint32_t ask(uint32_t min_minor, uint32_t max_minor, stg_probe_reply* reply, char* text, uint64_t capacity_bytes) {
  const stg_probe_request request = {STG_ABI_MAJOR, min_minor, max_minor, 0, {"minors host", 11}};
  memset(reply, 0, sizeof *reply);
  reply->text = text;
  reply->text_capacity_bytes = capacity_bytes;
  return the_host.probe(&request, reply);
}

static void the_probe_chooses_what_both_know(void) {
  char text[512] = "", range[64];
  stg_probe_reply reply;
  CHECK(ask(0, STG_ABI_MINOR, &reply, text, sizeof text) == STG_PROBE_ACCEPTED);
  CHECK(reply.minor == common_minor() && reply.max_minor == plugin_minor && reply.plugin == the_host.plugin);
  for (uint32_t only = 0; only <= 2; ++only) { /* a host that gave up what is older, or has only that */
    const uint32_t answer = ask(only, only, &reply, text, sizeof text);
    CHECK_THAT(answer == (only <= plugin_minor ? STG_PROBE_ACCEPTED : STG_PROBE_REFUSED), "the answer to 1.%u alone is %u", only,
               answer);
    if (answer == STG_PROBE_ACCEPTED) {
      CHECK(reply.minor == only);
      continue;
    }
    snprintf(range, sizeof range, "1.%u", only);
    CHECK_THAT(reply.plugin == NULL && strstr(text, range) != NULL, "the refusal names %s: %s", range, text);
    snprintf(range, sizeof range, "1.%u", plugin_minor);
    CHECK_THAT(strstr(text, range) != NULL, "the refusal names %s: %s", range, text);
  }
}

/* ---- training: what both know is the same ---- */

static void training_is_the_same(void) {
  session s;
  weights expected;
  first_weights(&expected);
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  for (uint32_t i = 0; i < NUM_STEPS; ++i) {
    batch b;
    make_batch(&b, 7, i + 1);
    update_reference(&expected, &b, LR);
    SUCCEEDS(train_on(&s, &b, LR));
  }
  check_weights(&s, &expected, 1e-5, "after the updates");
  close_session(&s);
}

/* ---- an update, with arguments and results of this host's size ---- */

typedef struct room {
  stg_update_result result;
  unsigned char behind[64];
} room;

/* training_step, backward and the update under test. */
static stg_error* update_once(const session* s, batch* b, const stg_update_args* args, room* out) {
  stg_step_result step;
  stg_tree tree = batch_tree(b, 0);
  stg_error* error = training_step(s, &tree, &step);
  if (error != NULL) return error;
  release_tree(&step.outputs);
  error = the_host.api->backward(s->strategy, NULL, STG_BATCH_LAST_MICRO_BATCH);
  if (error != NULL) return error;
  memset(out, CANARY, sizeof *out);
  out->result.struct_size = sizeof out->result;
  return the_host.api->optimizer_step(s->strategy, NULL, args, &out->result);
}

static void a_result_is_filled_as_far_as_both_know(void) {
  static const uint64_t sizes[] = {40, 48}; /* of stg_update_result, by minor */
  session s;
  batch b;
  room got;
  stg_update_args args;
  weights now;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 5, 1);
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.lr = LR;
  const uint64_t honoured_bytes = sizes[common_minor()];
  if (SUCCEEDS(update_once(&s, &b, &args, &got))) {
    CHECK_THAT(got.result.struct_size == honoured_bytes, "struct_size is %llu, honoured are %llu",
               (unsigned long long)got.result.struct_size, (unsigned long long)honoured_bytes);
    CHECK(got.result.outcome == STG_UPDATE_DONE && got.result.total_weight == 5 && got.result.loss_scale == 1);
    for (const unsigned char* at = (unsigned char*)&got + honoured_bytes; at < (unsigned char*)(&got + 1); ++at) {
      if (!CHECK_THAT(*at == CANARY, "byte %d, which nobody asked for, is untouched", (int)(at - (unsigned char*)&got))) break;
    }
  }
  read_weights_of(&s, &now);
  double sum = 0;
  for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
    for (int64_t i = 0; i < mlp_numel[p]; ++i) sum += now.of[p][i] * now.of[p][i];
  }
#if STG_ABI_MINOR >= 1
  if (plugin_minor >= 1) {
    CHECK_THAT(is_close(got.result.parameter_norm, sqrt(sum), 1e-5), "the norm is %g, not %g", got.result.parameter_norm,
               sqrt(sum));
  }
#endif
  CHECK(sum > 0);
  close_session(&s);
}

#if STG_ABI_MINOR >= 1

static void a_field_that_the_plugin_does_not_know_is_refused_when_it_is_set(void) {
  session s;
  batch b;
  room got;
  weights expected;
  stg_update_args args;
  first_weights(&expected);
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, 2);
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.lr = LR;
  args.weight_decay = 0.1;
  if (plugin_minor >= 1) {
    for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
      for (int64_t i = 0; i < mlp_numel[p]; ++i) expected.of[p][i] *= 1 - LR * args.weight_decay;
    }
    weights decayed = expected, gradient_only;
    first_weights(&gradient_only);
    update_reference(&gradient_only, &b, LR); /* the gradient is that of the weights before they shrink */
    first_weights(&expected);
    for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
      for (int64_t i = 0; i < mlp_numel[p]; ++i)
        expected.of[p][i] = decayed.of[p][i] + gradient_only.of[p][i] - expected.of[p][i];
    }
    SUCCEEDS(update_once(&s, &b, &args, &got));
    check_weights(&s, &expected, 1e-5, "with a weight decay");
  } else {
    FAILS(update_once(&s, &b, &args, &got), STG_UNIMPLEMENTED, "offset 32");
    CHECK_THAT(got.behind[0] == CANARY && got.result.struct_size == sizeof got.result, "on failure outputs are untouched");
    check_weights(&s, &expected, 0, "after the refusal");
    args.weight_decay = 0; /* not set: the struct is longer than the plugin knows, and that is all */
    SUCCEEDS(the_host.api->zero_grad(s.strategy, NULL));
    SUCCEEDS(update_once(&s, &b, &args, &got));
    update_reference(&expected, &b, LR);
    check_weights(&s, &expected, 1e-5, "without it");
  }
  close_session(&s);
}

static void a_slot_past_the_table_and_a_null_slot_are_the_same(void) {
  session s;
  uint64_t num_elements = 0;
  const int is_there = STG_HAS(stg_strategy_api, the_host.factory->api, count_elements);
  CHECK(is_there == (plugin_minor >= 1 && !has_null_slot));
  CHECK((the_host.factory->api->struct_size >= sizeof(stg_strategy_api)) ==
        (plugin_minor >= 1)); /* with a null slot the size reaches so far */
  if (!is_there || !open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  SUCCEEDS(the_host.api->count_elements(s.strategy, &num_elements));
  CHECK(num_elements == 21);
  SUCCEEDS(the_host.api->teardown(s.strategy, NULL));
  FAILS(the_host.api->count_elements(s.strategy, &num_elements), STG_FAILED_PRECONDITION, "count_elements");
  close_session(&s);
}

static int num_warm_ups;

static stg_error* warm_up(void* self, stg_replica* replica) {
  (void)self;
  num_warm_ups += replica != NULL;
  return NULL;
}

static void a_slot_of_the_hosts_is_called_by_those_who_know_it(void) {
  session s;
  new_mlp(&s.model, 1);
  s.model.table.warm_up = warm_up;
  num_warm_ups = 0;
  s.strategy = make_strategy(1, 0, NULL);
  if (s.strategy == NULL || !SUCCEEDS(set_up(&s, STG_STAGE_FIT, NULL))) return;
  CHECK(num_warm_ups == (plugin_minor >= 1 ? (int)the_host.num_devices : 0));
  close_session(&s);
}

static void an_extension_is_there_or_null(void) {
  const stg_string id = {STG_EXTENSION_HISTORY, sizeof(STG_EXTENSION_HISTORY) - 1};
  session s;
  uint64_t num_setups = 0;
  const stg_history_api* history = the_host.plugin->get_extension == NULL ? NULL : the_host.plugin->get_extension(id);
  CHECK((history != NULL) == (plugin_minor >= 1));
  if (history == NULL || !open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  CHECK(history->struct_size >= STG_HISTORY_API_MIN_SIZE);
  SUCCEEDS(history->count_setups(s.strategy, &num_setups));
  CHECK(num_setups == 1);
  close_session(&s);
}

#else

static void a_longer_table_is_read_as_far_as_it_is_known(void) {
  CHECK(the_host.factory->api->struct_size == sizeof(stg_strategy_api) + (plugin_minor >= 1 ? sizeof(void*) : 0));
  CHECK(STG_HAS(stg_strategy_api, the_host.factory->api, export_state) &&
        STG_HAS(stg_strategy_api, the_host.factory->api, train_batch));
}

#endif

static void an_extension_of_another_revision_is_null(void) {
  static const char* const ids[] = {"stratagem.history/2", "stratagem.history", "stratagem.history/1 ", ""};
  for (int i = 0; i < 4; ++i) {
    const stg_string id = {ids[i], strlen(ids[i])};
    CHECK(the_host.plugin->get_extension == NULL || the_host.plugin->get_extension(id) == NULL);
  }
}

static void nothing_is_left(void) { CHECK(num_live_tensors == 0 && num_live_trees == 0); }

int main(int argc, char** argv) {
  static const test tests[] = {
    {"the probe chooses the highest minor that both know, and refuses a host that knows none of its",
     the_probe_chooses_what_both_know},
    {"training gives the same weights", training_is_the_same},
    {"a result is filled as far as both know, and its size says how far", a_result_is_filled_as_far_as_both_know},
#if STG_ABI_MINOR >= 1
    {"a field that the plugin doesn't know is refused by its offset when it is set, and harmless when it is not",
     a_field_that_the_plugin_does_not_know_is_refused_when_it_is_set},
    {"a slot past the table's end and a null slot are both absent", a_slot_past_the_table_and_a_null_slot_are_the_same},
    {"a slot of the host's is called by a plugin that knows it", a_slot_of_the_hosts_is_called_by_those_who_know_it},
    {"an extension is there or null", an_extension_is_there_or_null},
#else
    {"a longer table is read as far as it is known", a_longer_table_is_read_as_far_as_it_is_known},
#endif
    {"an extension of another revision is null", an_extension_of_another_revision_is_null},
    {"all was released", nothing_is_left},
  };
  if (argc < 5) {
    fprintf(stderr, "usage: minors_host PLUGIN.so STRATEGY DEVICES MINOR [null_slot]\n");
    return 2;
  }
  plugin_minor = (uint32_t)strtoul(argv[4], NULL, 10);
  has_null_slot = argc > 5;
  load_plugin(4, argv);
  return run_tests(tests, sizeof tests / sizeof *tests);
}
