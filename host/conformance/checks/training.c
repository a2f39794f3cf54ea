/* SPDX-License-Identifier: Apache-2.0
 *
 * Training through the strategy gives what a loop without it gives.
 */
#include <math.h>
#include <string.h>

#include "conformance/checks/check.h"

#define LR 0.3

/* ---- equality with one device ---- */

static void train_and_compare(int is_plain, uint64_t create_flags) {
  session s;
  weights expected;
  if (!open_session(&s, is_plain, create_flags, STG_STAGE_FIT)) return;
  s.model.only_caller = (create_flags & STG_CREATE_CALLER_THREAD_ONLY) != 0;
  if (s.model.only_caller) only_releaser = &s.model.caller;
  first_weights(&expected);
  check_weights(&s, &expected, 0, "before training");
  for (int step = 0; step < 20; ++step) {
    batch b;
    make_batch(&b, 1 + (step * 5) % 13, (uint32_t)step); /* smaller than the device count, and uneven */
    update_reference(&expected, &b, LR);
    if (!SUCCEEDS(train_on(&s, &b, LR))) break;
    check_weights(&s, &expected, 1e-6, "after a step");
    read_weights_of(&s, &expected); /* each step from equal weights: float32 drifts by itself */
  }
  close_session(&s);
  CHECK_THAT(num_foreign_releases == 0, "%d deleters and releases ran on another thread", (int)num_foreign_releases);
  only_releaser = NULL;
}

static void trains_like_one_device(void) { train_and_compare(0, 0); }
static void trains_without_optional_slots(void) { train_and_compare(1, 0); }
static void trains_on_the_calling_thread(void) { train_and_compare(0, STG_CREATE_CALLER_THREAD_ONLY); }

static void train_batch_equals_three_calls(void) {
  session one, three;
  if (!open_session(&one, 0, 0, STG_STAGE_FIT) || !open_session(&three, 0, 0, STG_STAGE_FIT)) return;
  for (int step = 0; step < 5; ++step) {
    batch b;
    stg_step_result result;
    stg_update_result update;
    make_batch(&b, 7 + step, (uint32_t)step);
    if (!SUCCEEDS(train_on(&one, &b, LR))) break;
    stg_tree tree = batch_tree(&b, 0);
    if (!SUCCEEDS(training_step(&three, &tree, &result))) break;
    release_tree(&result.outputs);
    if (!SUCCEEDS(the_host.api->backward(three.strategy, NULL, step % 2 == 0 ? STG_BATCH_LAST_MICRO_BATCH : 0))) break;
    if (!SUCCEEDS(optimizer_step(&three, LR, &update))) break;
    CHECK(update.outcome == STG_UPDATE_DONE && update.total_weight == (double)b.num_rows && update.loss_scale == 1);
    check_equal_weights(&one, &three, "after a step");
  }
  close_session(&one);
  close_session(&three);
}

static void accumulation_equals_the_union(void) {
  static const int64_t parts[] = {5, 5, 2};
  session s;
  weights expected;
  batch whole;
  int64_t begin = 0;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&whole, 12, 4);
  first_weights(&expected);
  update_reference(&expected, &whole, LR);
  for (int i = 0; i < 3; ++i) {
    batch part = whole;
    stg_step_result result;
    stg_update_result update;
    part.num_rows = parts[i];
    memcpy(part.inputs, whole.inputs + begin, (size_t)parts[i] * sizeof part.inputs[0]);
    memcpy(part.targets, whole.targets + begin, (size_t)parts[i] * sizeof part.targets[0]);
    begin += parts[i];
    stg_tree tree = batch_tree(&part, 0);
    if (!SUCCEEDS(train_batch(&s, NULL, &tree, LR, i == 2 ? STG_BATCH_LAST_MICRO_BATCH : 0, &result, &update))) break;
    release_tree(&result.outputs);
    CHECK(update.outcome == (i == 2 ? STG_UPDATE_DONE : STG_UPDATE_NONE));
  }
  check_weights(&s, &expected, 1e-6, "after the last micro-batch");
  close_session(&s);
}

/* ---- outputs and weights ---- */

static void outputs_are_gathered(void) {
  session s;
  batch b;
  weights at;
  double predictions[MAX_ROWS], total = 0;
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 10, 3);
  first_weights(&at);
  const double loss = run_reference(&at, 10, b.inputs, b.targets, NULL, 0, 1, predictions, NULL);
  stg_tree tree = batch_tree(&b, 0);
  if (SUCCEEDS(training_step(&s, &tree, &result))) {
    CHECK_THAT(is_close(loss_of(&result), loss, 1e-6), "the loss %g is the whole batch's, %g", loss_of(&result), loss);
    const stg_value* gathered = find_key(&result.outputs.root, "predictions");
    if (CHECK(gathered != NULL && gathered->type == STG_TENSOR && count_elements(gathered->as.tensor) == 10)) {
      for (int i = 0; i < 10; ++i) CHECK(is_close(element(gathered->as.tensor, i), predictions[i], 1e-6));
    }
    CHECK(result.num_weights == the_host.num_devices);
    for (uint64_t i = 0; i < result.num_weights; ++i) {
      const uint64_t rows = 10 / the_host.num_devices + (i < 10 % the_host.num_devices);
      CHECK_THAT(result.weights[i] == (double)rows, "replica %d has %d rows, not %g", (int)i, (int)rows, result.weights[i]);
      total += result.weights[i];
    }
    CHECK(total == 10);
    const stg_string first_key = result.outputs.root.as.entries[0].key;
    CHECK_THAT(text_has(first_key, "predictions"), "key order stays");
    destroy_strategy(s.strategy); /* outputs outlive the instance */
    s.strategy = NULL;
    CHECK(is_close(loss_of(&result), loss, 1e-6));
    release_tree(&result.outputs);
  }
  close_session(&s);
}

static stg_value tensor_value(stg_tensor* tensor) {
  stg_value value;
  memset(&value, 0, sizeof value);
  value.type = STG_TENSOR;
  value.as.tensor = tensor;
  return value;
}

static void every_structure_is_split(void) {
  batch b;
  make_batch(&b, 6, 8);
  const uint32_t types[] = {STG_LIST, STG_TUPLE, STG_TENSOR};
  for (int i = 0; i < 3; ++i) {
    session s;
    weights expected;
    stg_step_result result;
    if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
    stg_tree dict = batch_tree(&b, 0), tree;
    const int64_t shape[] = {6, MLP_NUM_FEATURES + 1};
    stg_tensor* joined = new_float32(2, shape);
    for (int row = 0; row < 6; ++row) {
      for (int k = 0; k < MLP_NUM_FEATURES; ++k) floats(joined)[row * 4 + k] = b.inputs[row][k];
      floats(joined)[row * 4 + 3] = b.targets[row];
    }
    stg_value items[2] = {dict.root.as.entries[0].value, dict.root.as.entries[1].value};
    memset(&tree, 0, sizeof tree);
    tree.root.type = types[i];
    tree.root.count = types[i] == STG_TENSOR ? 0 : 2;
    tree.root.as.items = items;
    if (types[i] == STG_TENSOR) tree.root = tensor_value(joined);
    first_weights(&expected);
    update_reference(&expected, &b, LR);
    if (SUCCEEDS(train_batch(&s, NULL, &tree, LR, STG_BATCH_LAST_MICRO_BATCH, &result, NULL))) release_tree(&result.outputs);
    check_weights(&s, &expected, 1e-6, "after a borrowed batch");
    release_tensor(joined);
    release_tree(&dict);
    close_session(&s);
  }
}

static void borrowed_batches_stay_the_hosts(void) {
  session s;
  batch b;
  weights expected;
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 9, 5);
  first_weights(&expected);
  update_reference(&expected, &b, LR);
  stg_tree tree = batch_tree(&b, 0), view = borrowed(&tree);
  if (SUCCEEDS(training_step(&s, &view, &result))) {
    release_tree(&result.outputs);
    CHECK_THAT(num_live_trees == 1 || view.root.type == STG_DICT, "a borrowed tree is not consumed");
    /* training_step has returned, so the memory is the host's again, even though backward is still to come. */
    memset(floats(tree.root.as.entries[0].value.as.tensor), 0x7f, 9 * sizeof b.inputs[0]);
    SUCCEEDS(the_host.api->backward(s.strategy, NULL, 0));
    SUCCEEDS(optimizer_step(&s, LR, NULL));
    check_weights(&s, &expected, 1e-6, "after backward");
  }
  release_tree(&tree);
  close_session(&s);
}

/* ---- weights of the model's own ---- */

static void denominators_weight_the_replicas(void) {
  session s;
  batch b;
  weights expected, gradient;
  stg_step_result result;
  stg_update_result update;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  s.model.is_masked = 1;
  make_batch(&b, 16, 6);
  for (int i = 0; i < 16; ++i) b.mask[i] = i < 7 || i > 13; /* 7 of the first 8 and 2 of the last 8 */
  first_weights(&expected);
  memset(&gradient, 0, sizeof gradient);
  const double loss = run_reference(&expected, 16, b.inputs, b.targets, b.mask, 0, 1, NULL, &gradient);
  for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
    for (int64_t i = 0; i < mlp_numel[p]; ++i) expected.of[p][i] -= LR * gradient.of[p][i];
  }
  stg_tree tree = batch_tree(&b, 1);
  if (SUCCEEDS(train_batch(&s, NULL, &tree, LR, STG_BATCH_LAST_MICRO_BATCH, &result, &update))) {
    CHECK(is_close(loss_of(&result), loss, 1e-6));
    CHECK(update.total_weight == 9);
    release_tree(&result.outputs);
  }
  check_weights(&s, &expected, 1e-6, "after a masked batch");
  close_session(&s);
}

static void a_share_that_does_not_count_is_not_read(void) {
  session s;
  batch b;
  weights expected, gradient;
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  s.model.is_masked = 1;
  make_batch(&b, 12, 6);
  const int num_kept = 12 - 12 / (the_host.num_devices == 1 ? 2 : (int)the_host.num_devices); /* all but the last share */
  for (int i = num_kept; i < 12; ++i) b.mask[i] = 0; /* whose loss and gradients are NaN */
  first_weights(&expected);
  memset(&gradient, 0, sizeof gradient);
  const double loss = run_reference(&expected, 12, b.inputs, b.targets, b.mask, 0, 1, NULL, &gradient);
  for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
    for (int64_t i = 0; i < mlp_numel[p]; ++i) expected.of[p][i] -= LR * gradient.of[p][i];
  }
  stg_tree tree = batch_tree(&b, 1);
  if (SUCCEEDS(train_batch(&s, NULL, &tree, LR, STG_BATCH_LAST_MICRO_BATCH, &result, NULL))) {
    CHECK(is_close(loss_of(&result), loss, 1e-6));
    release_tree(&result.outputs);
  }
  check_weights(&s, &expected, 1e-6, "after a step");
  close_session(&s);
}

static void no_gradient_no_change(void) {
  session s;
  batch b;
  weights expected;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  s.model.null_parameter = 1;
  make_batch(&b, 7, 6);
  first_weights(&expected);
  const weights first = expected;
  update_reference(&expected, &b, LR);
  memcpy(expected.of[1], first.of[1], sizeof expected.of[1]);
  SUCCEEDS(train_on(&s, &b, LR));
  check_weights(&s, &expected, 1e-6, "after a step");
  close_session(&s);
}

static void null_deleters_are_not_called(void) {
  session s;
  weights expected;
  if (!open_session(&s, 1, 0, STG_STAGE_FIT)) return; /* without bind, so that the gradients stay where the model puts them */
  s.model.no_deleters = 1;
  first_weights(&expected);
  for (int step = 0; step < 3; ++step) {
    batch b;
    make_batch(&b, 7, (uint32_t)step);
    update_reference(&expected, &b, LR);
    SUCCEEDS(train_on(&s, &b, LR));
    check_weights(&s, &expected, 1e-6, "after a step");
  }
  close_session(&s);
}

static void nothing_that_counts_skips_the_update(void) {
  session s;
  batch b;
  weights expected;
  stg_step_result result;
  stg_update_result update;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  s.model.is_masked = 1;
  make_batch(&b, 6, 6);
  memset(b.mask, 0, sizeof b.mask); /* the loss is 0 / 0 then */
  first_weights(&expected);
  stg_tree tree = batch_tree(&b, 1);
  if (SUCCEEDS(train_batch(&s, NULL, &tree, LR, STG_BATCH_LAST_MICRO_BATCH, &result, &update))) {
    CHECK(update.outcome == STG_UPDATE_SKIPPED_NO_WEIGHT);
    release_tree(&result.outputs);
  }
  check_weights(&s, &expected, 0, "after a skipped update");
  close_session(&s);
}

static void a_sum_is_summed(void) {
  session s;
  batch b;
  weights expected, gradient;
  new_mlp(&s.model, 1);
  s.model.is_sum = 1;
  s.strategy = make_strategy(1, 0, NULL);
  if (s.strategy == NULL || !SUCCEEDS(set_up(&s, STG_STAGE_FIT, NULL))) return;
  make_batch(&b, 7, 2);
  first_weights(&expected);
  memset(&gradient, 0, sizeof gradient);
  run_reference(&expected, 7, b.inputs, b.targets, NULL, 1, 1, NULL, &gradient);
  for (int p = 0; p < MLP_NUM_PARAMETERS; ++p) {
    for (int64_t i = 0; i < mlp_numel[p]; ++i) expected.of[p][i] -= 0.05 * gradient.of[p][i];
  }
  SUCCEEDS(train_on(&s, &b, 0.05));
  check_weights(&s, &expected, 1e-6, "after a step");
  close_session(&s);
}

/* ---- evaluation and state ---- */

static void evaluation_changes_nothing(void) {
  session s;
  batch b;
  weights before, after;
  double predictions[MAX_ROWS];
  stg_step_result result;
  if (!open_session(&s, 0, 0, STG_STAGE_VALIDATE)) return;
  make_batch(&b, 11, 9);
  read_weights_of(&s, &before);
  run_reference(&before, 11, b.inputs, b.targets, NULL, 0, 1, predictions, NULL);
  stg_tree tree = batch_tree(&b, 0);
  if (SUCCEEDS(validation_step(&s, &tree, &result))) {
    const stg_value* gathered = find_key(&result.outputs.root, "predictions");
    const stg_value* loss = find_key(&result.outputs.root, "loss");
    if (CHECK(gathered != NULL && gathered->type == STG_TENSOR)) {
      for (int i = 0; i < 11; ++i) CHECK(is_close(element(gathered->as.tensor, i), predictions[i], 1e-6));
    }
    if (CHECK(loss != NULL && loss->type == STG_TENSOR)) { /* a strategy of one device has nothing to gather */
      const int is_gathered = loss->as.tensor->view.num_dims == 1 || the_host.num_devices == 1;
      CHECK_THAT(is_gathered && count_elements(loss->as.tensor) == (int64_t)the_host.num_devices,
                 "outputs of evaluation are gathered and not reduced: one loss per replica");
    }
    release_tree(&result.outputs);
  }
  read_weights_of(&s, &after);
  CHECK(memcmp(&before, &after, sizeof before) == 0);
  stg_tree second = batch_tree(&b, 0);
  FAILS(training_step(&s, &second, &result), STG_FAILED_PRECONDITION, NULL);
  CHECK(num_live_tensors >= 0 && second.release == NULL);
  close_session(&s);
}

static void evaluation_between_forward_and_backward(void) {
  session with, without;
  batch b, other;
  stg_step_result result;
  if (!open_session(&with, 0, 0, STG_STAGE_FIT) || !open_session(&without, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 6, 1);
  make_batch(&other, 9, 2);
  stg_tree tree = batch_tree(&b, 0), between = batch_tree(&other, 0);
  if (SUCCEEDS(training_step(&with, &tree, &result))) release_tree(&result.outputs);
  if (SUCCEEDS(validation_step(&with, &between, &result))) release_tree(&result.outputs);
  SUCCEEDS(the_host.api->backward(with.strategy, NULL, STG_BATCH_LAST_MICRO_BATCH));
  SUCCEEDS(optimizer_step(&with, LR, NULL));
  SUCCEEDS(train_on(&without, &b, LR));
  check_equal_weights(&with, &without, "after the update");
  close_session(&with);
  close_session(&without);
}

static void a_state_carries_on_in_another_instance(void) {
  session first, second;
  batch b;
  stg_tree state;
  memset(&state, 0, sizeof state);
  if (!open_session(&first, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 8, 1);
  SUCCEEDS(train_on(&first, &b, LR));
  if (!SUCCEEDS(the_host.api->export_state(first.strategy, NULL, STG_EXPORT_COPY, &state))) {
    close_session(&first);
    return;
  }
  static const char* const keys[] = {"format", "model", "aliases", "optimizer", "scaler", "generators"};
  CHECK(state.root.type == STG_DICT);
  for (int i = 0; i < 6; ++i) CHECK_THAT(find_key(&state.root, keys[i]) != NULL, "the state has %s", keys[i]);
  const stg_value* model = find_key(&state.root, "model");
  CHECK(model != NULL && model->count == MLP_NUM_PARAMETERS && find_key(model, "hidden.weight") != NULL);
  const stg_value* optimizer = find_key(&state.root, "optimizer");
  const stg_value* step = optimizer == NULL ? NULL : find_key(optimizer, "step");
  CHECK(step != NULL && step->type == STG_INT64 && step->as.i64 == 1);

  new_mlp(&second.model, 1);
  second.strategy = make_strategy(1, 0, NULL);
  if (second.strategy != NULL && SUCCEEDS(set_up(&second, STG_STAGE_FIT, &state))) {
    CHECK_THAT(state.release == NULL, "a moved state is consumed");
    check_equal_weights(&first, &second, "after setup from the state");
    SUCCEEDS(train_on(&first, &b, LR));
    SUCCEEDS(train_on(&second, &b, LR));
    check_equal_weights(&first, &second, "a step later");
  }
  close_session(&first);
  close_session(&second);
}

static void setup_follows_teardown(void) {
  session s;
  batch b;
  weights expected;
  if (!open_session(&s, 0, 0, STG_STAGE_FIT)) return;
  make_batch(&b, 8, 1);
  SUCCEEDS(train_on(&s, &b, LR));
  SUCCEEDS(the_host.api->teardown(s.strategy, NULL));
  CHECK(s.model.num_references == 0 && s.model.num_replicas == 0);
  SUCCEEDS(the_host.api->teardown(s.strategy, NULL)); /* does nothing before setup */
  if (SUCCEEDS(set_up(&s, STG_STAGE_FIT, NULL))) {
    first_weights(&expected);
    check_weights(&s, &expected, 0, "the model starts anew");
    SUCCEEDS(train_on(&s, &b, LR));
  }
  close_session(&s);
}

DEFINE_CHECKS(
    training_checks,
    {"trains-like-one-device", "20 steps of 1 to 13 rows equal a loop without a strategy, each to 1e-6", "H", NEEDS_STRATEGY,
     trains_like_one_device},
    {"model-without-optional-slots", "So they do with a model whose table ends before the optional slots", "B3", NEEDS_STRATEGY,
     trains_without_optional_slots},
    {"caller-thread-only", "With caller_thread_only the model is called, and all is released, on the calling thread only", "F2",
     NEEDS_STRATEGY | NEEDS_CALLER_THREAD, trains_on_the_calling_thread},
    {"train-batch-equals-three-calls", "train_batch equals training_step, backward and optimizer_step over 5 steps, bitwise", "H",
     NEEDS_STRATEGY, train_batch_equals_three_calls},
    {"accumulation-equals-union", "Micro-batches of 5, 5 and 2 rows equal one batch of 12 to 1e-6", "H", NEEDS_STRATEGY,
     accumulation_equals_the_union},
    {"outputs-gathered", "Outputs are gathered in order, the loss is that of all 10 rows, and weights are the replicas' rows",
     "H", NEEDS_STRATEGY, outputs_are_gathered},
    {"structures-split", "A list, a tuple and a bare tensor are split like a dict", "E3", NEEDS_STRATEGY,
     every_structure_is_split},
    {"borrowed-batch-stays-the-hosts", "A borrowed batch may be written over as soon as training_step is back", "D2",
     NEEDS_STRATEGY, borrowed_batches_stay_the_hosts},
    {"denominators-weight-replicas", "A model's denominators of 7 and 2 weight its replicas", "H", NEEDS_STRATEGY,
     denominators_weight_the_replicas},
    {"weight-zero-share-not-read", "The NaN of a share in which nothing counts goes nowhere", "H", NEEDS_STRATEGY,
     a_share_that_does_not_count_is_not_read},
    {"null-gradient-no-change", "A parameter whose gradient is null keeps its value", "H", NEEDS_STRATEGY, no_gradient_no_change},
    {"null-deleter-not-called", "A gradient's deleter may be null", "E2", NEEDS_STRATEGY, null_deleters_are_not_called},
    {"no-weight-skips-update", "A batch in which nothing counts skips the update, and says so", "H", NEEDS_STRATEGY,
     nothing_that_counts_skips_the_update},
    {"sum-loss-summed", "A loss that is a sum is summed over replicas, undivided", "H", NEEDS_STRATEGY, a_sum_is_summed},
    {"evaluation-changes-nothing",
     "Evaluation gathers one loss per replica and 11 predictions, reduces nothing and changes no weight", "H", NEEDS_STRATEGY,
     evaluation_changes_nothing},
    {"evaluation-between", "An evaluation between forward and backward disturbs nothing, bitwise", "H", NEEDS_STRATEGY,
     evaluation_between_forward_and_backward},
    {"state-hand-over", "An exported state carries on in another instance, bitwise, a step later too", "H", NEEDS_STRATEGY,
     a_state_carries_on_in_another_instance},
    {"setup-after-teardown", "teardown lets the model go, and setup may follow, with the model's first weights", "D2",
     NEEDS_STRATEGY, setup_follows_teardown});
