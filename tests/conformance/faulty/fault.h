/* SPDX-License-Identifier: Apache-2.0
 *
 * The plugin in C (tests/abi/plugin_in_c) with one promise broken: its own sources, and around its functions others that the linker
 * puts in their place (--wrap). Which promise, the environment variable STRATAGEM_FAULT says, by the id of the check that must find it.
 * Without it the plugin is right.
 */
#ifndef FAULT_H
#define FAULT_H

#include "sequential.h"

/* Whether this is the fault asked for. */
int is_fault(const char* check_id);

/* WRAP(stg_error*, seq_barrier, ...): begins the function that is called in place of seq_barrier, which is __real_seq_barrier here.
 * Only calls from other files than its own go through it. */
#define WRAP(result, name, ...)      \
  result __real_##name(__VA_ARGS__); \
  result __wrap_##name(__VA_ARGS__); \
  result __wrap_##name(__VA_ARGS__)

/* Null, with the error released, if this is the fault asked for and the error says `part`. */
stg_error* forgive(const char* check_id, stg_error* error, const char* part);
int says(const stg_error* error, const char* part);

extern stg_error* last_error; /* of backward */

/* Of the latest seq_enter that succeeded: the thread that is inside a call. */
extern pthread_t inside;

#endif
