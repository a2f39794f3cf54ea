/* SPDX-License-Identifier: Apache-2.0
 *
 * A host with a model of its own: a C program that implements stg_model and trains through a strategy, by the three calls and by
 * train_batch.
 *
 *   model_host PLUGIN.so STRATEGY DEVICES
 */
#include "tests.h"

static void nothing_is_left(void) {
  CHECK_THAT(num_live_tensors == 0, "every tensor was released: %d left", (int)num_live_tensors);
  CHECK_THAT(num_live_trees == 0, "every tree was released: %d left", (int)num_live_trees);
}

int main(int argc, char** argv) {
  static const test last[] = {{"each tensor and each tree of all those tests was released exactly once", nothing_is_left}};
  load_plugin(argc, argv);
  const int training = run_tests(training_tests, num_training_tests);
  const int failures = run_tests(failure_tests, num_failure_tests);
  const int callbacks = run_tests(callback_tests, num_callback_tests);
  return run_tests(last, 1) + training + failures + callbacks > 0;
}
