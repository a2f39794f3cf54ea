/* SPDX-License-Identifier: Apache-2.0
 *
 * The lists of tests, one per file.
 */
#ifndef RULES_H
#define RULES_H

#include "../model_host/session.h"

extern const test probe_tests[];
extern const uint64_t num_probe_tests;
extern const test struct_tests[];
extern const uint64_t num_struct_tests;
extern const test state_tests[];
extern const uint64_t num_state_tests;
extern const test value_tests[];
extern const uint64_t num_value_tests;
extern const test object_tests[];
extern const uint64_t num_object_tests;

#endif
