/* SPDX-License-Identifier: Apache-2.0
 *
 * All checks there are, in the order of the report.
 */
#include "conformance/checks/check.h"

extern const check_list file_checks, probe_checks, struct_checks, state_checks, value_checks, object_checks, training_checks,
    failure_checks, callback_checks, reduction_checks, raw_training_checks, process_checks, time_checks, null_checks,
    error_checks, tensor_checks, tree_checks, ownership_checks, meaning_checks, storage_checks, member_checks;

const check_list* const check_lists[] = {
    &file_checks,     &probe_checks,   &struct_checks,   &state_checks,     &value_checks,        &object_checks,
    &training_checks, &failure_checks, &callback_checks, &reduction_checks, &raw_training_checks, &process_checks,
    &time_checks,     &null_checks,    &error_checks,    &tensor_checks,    &tree_checks,         &ownership_checks,
    &meaning_checks,  &storage_checks, &member_checks,
};
const uint64_t num_check_lists = sizeof check_lists / sizeof *check_lists;
