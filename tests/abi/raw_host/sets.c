/* SPDX-License-Identifier: Apache-2.0
 *
 * Making and freeing gradient sets; see sets.h.
 */
#include "sets.h"

#include <stdlib.h>
#include <string.h>

stg_strategy* ready_to_reduce(uint64_t flags) {
  stg_setup_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  stg_strategy* strategy = make_strategy(0, flags, NULL);
  if (strategy == NULL || SUCCEEDS(the_host.api->setup(strategy, NULL, &args))) return strategy;
  destroy_strategy(strategy);
  return NULL;
}

sets* new_sets(stg_strategy* strategy, uint64_t num_gradients) {
  const stg_device* devices = NULL;
  sets* all = calloc(1, sizeof *all);
  if (all == NULL || strategy == NULL || !SUCCEEDS(the_host.api->devices(strategy, &devices, &all->num_sets))) {
    free(all);
    return NULL;
  }
  CHECK(all->num_sets == the_host.num_devices);
  all->of = calloc(all->num_sets, sizeof *all->of);
  all->pointers = calloc(all->num_sets, sizeof *all->pointers);
  for (uint64_t i = 0; i < all->num_sets; ++i) {
    all->of[i].struct_size = sizeof *all->of;
    all->of[i].device = devices[i];
    all->of[i].weight = 1;
    all->of[i].num_gradients = num_gradients;
    all->of[i].gradients = calloc(num_gradients, sizeof(stg_tensor*));
    all->pointers[i] = &all->of[i];
  }
  return all;
}

void free_sets(sets* all) {
  for (uint64_t i = 0; i < all->num_sets; ++i) {
    for (uint64_t g = 0; g < all->of[i].num_gradients; ++g) release_tensor(all->of[i].gradients[g]);
    free(all->of[i].gradients);
  }
  free(all->of);
  free(all->pointers);
  free(all);
}

stg_error* reduce(stg_strategy* strategy, const sets* all, uint64_t op) {
  stg_reduce_gradients_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.sets = all->pointers;
  args.num_sets = all->num_sets;
  args.op = op;
  return the_host.api->reduce_gradients(strategy, NULL, &args);
}
