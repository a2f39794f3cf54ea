/* SPDX-License-Identifier: Apache-2.0
 *
 * Gradient sets, one per device of an instance that was set up without a model.
 */
#ifndef SETS_H
#define SETS_H

#include "../support/host.h"

typedef struct sets {
  stg_gradient_set* of; /* one per device */
  stg_gradient_set** pointers;
  uint64_t num_sets;
} sets;

stg_strategy* ready_to_reduce(uint64_t flags);                  /* null after a failure, which is counted */
sets* new_sets(stg_strategy* strategy, uint64_t num_gradients); /* borrowed, weight 1, all slots null */
void free_sets(sets* all);                                      /* and the tensors in the slots */
stg_error* reduce(stg_strategy* strategy, const sets* all, uint64_t op);

/* reductions.c */
int run_reduction_tests(void);

#endif
