/* SPDX-License-Identifier: Apache-2.0
 *
 * A host that is hard to please: the rules of the ABI that hold for every plugin and every strategy, tried from outside.
 *
 *   rules_host PLUGIN.so STRATEGY DEVICES
 */
#include "rules.h"

/* Neither destroyed nor torn down: a program may end with its threads parked and its model alive. A crash on the way out is this
 * program's exit status. */
static session left_alive;

static void training_goes_on_at_exit(void) {
  batch b;
  make_batch(&b, 6, 1);
  if (open_session(&left_alive, 0, 0, STG_STAGE_FIT)) SUCCEEDS(train_on(&left_alive, &b, 0.1));
}

int main(int argc, char** argv) {
  load_plugin(argc, argv);
  int failed = run_tests(probe_tests, num_probe_tests);
  failed += run_tests(struct_tests, num_struct_tests);
  failed += run_tests(state_tests, num_state_tests);
  failed += run_tests(object_tests, num_object_tests);
  failed += run_tests(value_tests, num_value_tests);
  static const test last[] = {{"the program ends well with a live instance (see the exit status)", training_goes_on_at_exit}};
  failed += run_tests(last, 1);
  return failed > 0;
}
