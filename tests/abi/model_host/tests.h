/* SPDX-License-Identifier: Apache-2.0
 *
 * The lists of tests, one per file.
 */
#ifndef TESTS_H
#define TESTS_H

#include "session.h"

extern const test training_tests[];
extern const uint64_t num_training_tests;
extern const test failure_tests[];
extern const uint64_t num_failure_tests;
extern const test callback_tests[];
extern const uint64_t num_callback_tests;

#endif
