/* SPDX-License-Identifier: Apache-2.0
 *
 * See run.h.
 */
#include "run.h"

#include <stdio.h>
#include <stdlib.h>

#include "conformance/fixture/host.h"

int run_tests(const test* tests, uint64_t num_tests) {
  int num_failed_tests = 0;
  for (uint64_t i = 0; i < num_tests; ++i) {
    const int failures_before = count_failures(), checks_before = count_checks();
    tests[i].run();
    CHECK_THAT(count_checks() > checks_before, "'%s' checked nothing", tests[i].sentence);
    printf("%s  %s\n", count_failures() != failures_before ? "FAILED" : "ok    ", tests[i].sentence);
    fflush(stdout);
    num_failed_tests += count_failures() != failures_before;
  }
  printf("%d of %d tests failed\n", num_failed_tests, (int)num_tests);
  return num_failed_tests == 0 ? 0 : 1;
}

static void refuse_if(const char* wrong) {
  if (wrong == NULL) return;
  fprintf(stderr, "%s\n", wrong);
  exit(3);
}

void load_plugin(int num_arguments, char** arguments) {
  refuse_if(num_arguments == 4 ? NULL : "usage: PLUGIN.so STRATEGY DEVICES");
  refuse_if(open_library(arguments[1]));
  refuse_if(enter_plugin());
  refuse_if(choose_strategy(arguments[2]) != NULL ? NULL : "the plugin has no strategy of this name");
  the_host.num_devices = strtoull(arguments[3], NULL, 10);
}
