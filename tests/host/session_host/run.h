/* SPDX-License-Identifier: Apache-2.0
 *
 * Tests of a program in C: sentences and functions.
 */
#ifndef RUN_H
#define RUN_H

#include <stdint.h>

typedef struct test {
  const char* sentence; /* what is true when it passes */
  void (*run)(void);
} test;

/* Runs them in order, prints one line each, and gives the exit code. */
int run_tests(const test* tests, uint64_t num_tests);
/* Arguments: PLUGIN STRATEGY DEVICES. Ends the program with a message where the plugin can't be entered. */
void load_plugin(int num_arguments, char** arguments);

#endif
