/* SPDX-License-Identifier: Apache-2.0
 *
 * A host that is hard to please: the rules of the ABI that hold for every plugin and every strategy, tried from outside.
 *
 *   rules_host PLUGIN.so STRATEGY DEVICES
 */
#include "rules.h"

int main(int argc, char** argv) {
  load_plugin(argc, argv);
  int failed = run_tests(probe_tests, num_probe_tests);
  failed += run_tests(struct_tests, num_struct_tests);
  failed += run_tests(state_tests, num_state_tests);
  failed += run_tests(object_tests, num_object_tests);
  return failed > 0;
}
