/* SPDX-License-Identifier: Apache-2.0
 *
 * A check of a plugin: one promise of the ABI, tried from outside. Each runs in a process of its own, so it may leave behind what it
 * likes. To add one: a function, and an entry in its file's list; a list that is new goes into table.c. tests/conformance wants a fault
 * that it finds.
 */
#ifndef STRATAGEM_CONFORMANCE_CHECKS_CHECK_H
#define STRATAGEM_CONFORMANCE_CHECKS_CHECK_H

#include "conformance/fixture/session.h"
#include "conformance/fixture/sets.h"

STG_EXTERN_C_BEGIN

/* What it needs. Each includes those before it. */
#define NEEDS_FILE 0u    /* the file, which is not loaded: the_host.path */
#define NEEDS_LIBRARY 1u /* it is loaded, and has the probe: the_host.probe */
#define NEEDS_PLUGIN 2u  /* the probe has accepted: the_host.plugin */
#define NEEDS_STRATEGY \
  3u /* that has CPU devices: the_host.api and all after it. Run for each one, on 1, 2 and 3 devices if it can */
#define NEEDS_MASK 7u
#define NEEDS_DEVICES 8u        /* a strategy of several devices */
#define NEEDS_CALLER_THREAD 16u /* one that knows STG_CREATE_CALLER_THREAD_ONLY */
#define IS_TIMED 32u            /* measures time: a machine that is busy may make it fail */
#define IS_ONCE 64u             /* on 2 devices (1 where the strategy can't) and not on every number of them */
#define WATCHES_OUTPUT 256u     /* stdout and stderr go to written_output from before the plugin is opened */
#define ENDS_BY_EXIT 128u       /* the process then ends by exit(0), and how it ends counts, too */

typedef struct check_entry {
  const char* id;       /* kebab-case, for ever */
  const char* sentence; /* what is true when it passes, with its constants */
  const char* rule;     /* of docs/abi.md: A1 to H */
  uint32_t needs;
  void (*run)(void);
} check_entry;

typedef struct check_list {
  const check_entry* checks;
  uint64_t num_checks;
} check_list;

/* table.c: all of them, in the order of the report. */
extern const check_list* const check_lists[];
extern const uint64_t num_check_lists;

#define DEFINE_CHECKS(name, ...)                          \
  static const check_entry name##_list[] = {__VA_ARGS__}; \
  const check_list name = {name##_list, sizeof name##_list / sizeof *name##_list}

STG_EXTERN_C_END
#endif
