/* SPDX-License-Identifier: Apache-2.0
 *
 * A host with its own model (logistic regression, gradients written by hand) and its own optimizer, that wants one
 * thing from a strategy: gradients reduced over devices. A thread per device computes them, on shares of uneven size.
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "conformance/checks/check.h"

#define NUM_FEATURES 5
#define NUM_SAMPLES 41
#define NUM_STEPS 60
#define LEARNING_RATE 0.5

static double inputs[NUM_SAMPLES][NUM_FEATURES], labels[NUM_SAMPLES];

static void make_data(void) {
  uint32_t random = 12345; /* the seed: the same data in every run */
  for (int i = 0; i < NUM_SAMPLES; ++i) {
    double score = 0.3;
    for (int k = 0; k < NUM_FEATURES; ++k) {
      random = random * 1664525u + 1013904223u;
      inputs[i][k] = (double)(random >> 8) / 8388608.0 - 1.0;
      score += inputs[i][k] * (k - 2);
    }
    labels[i] = score > 0 ? 1 : 0;
  }
}

/* Mean gradient of the logistic loss over samples [begin, end): weights first, then the bias. */
static void compute_gradient(const double* parameters, int begin, int end, double* gradient) {
  for (int k = 0; k <= NUM_FEATURES; ++k) gradient[k] = 0;
  for (int i = begin; i < end; ++i) {
    double score = parameters[NUM_FEATURES];
    for (int k = 0; k < NUM_FEATURES; ++k) score += parameters[k] * inputs[i][k];
    const double slope = (1 / (1 + exp(-score)) - labels[i]) / (end - begin);
    for (int k = 0; k < NUM_FEATURES; ++k) gradient[k] += slope * inputs[i][k];
    gradient[NUM_FEATURES] += slope;
  }
}

/* ---- training over the devices ---- */

typedef struct worker {
  pthread_t thread;
  double parameters[NUM_FEATURES + 1];
  int begin, end;
  stg_tensor* gradients[2]; /* weights, bias */
} worker;

static void* work(void* argument) {
  worker* self = argument;
  double gradient[NUM_FEATURES + 1];
  compute_gradient(self->parameters, self->begin, self->end, gradient);
  for (int k = 0; k < NUM_FEATURES; ++k) set_element(self->gradients[0], k, gradient[k]);
  set_element(self->gradients[1], 0, gradient[NUM_FEATURES]);
  return NULL;
}

/* Device i gets i + 1 parts of the samples, so that equal weights would be wrong. */
static void divide_samples(worker* workers, uint64_t num_workers) {
  const int parts = (int)(num_workers * (num_workers + 1) / 2);
  int begin = 0, parts_before = 0;
  for (uint64_t i = 0; i < num_workers; ++i) {
    parts_before += (int)i + 1;
    workers[i].begin = begin;
    workers[i].end = begin = NUM_SAMPLES * parts_before / parts;
  }
}

static void train(uint8_t bits, uint64_t flags, double tolerance) {
  const uint64_t num = the_host.num_devices;
  static const int64_t shape[2][1] = {{NUM_FEATURES}, {1}};
  double reference[NUM_FEATURES + 1] = {0};
  stg_strategy* strategy = ready_to_reduce(flags);
  worker* workers = calloc(num, sizeof *workers);
  sets* all = new_sets(strategy, 2);
  if (strategy == NULL || workers == NULL || all == NULL) return;
  make_data();
  divide_samples(workers, num);
  for (uint64_t i = 0; i < num; ++i) {
    all->of[i].weight = workers[i].end - workers[i].begin;
    for (int g = 0; g < 2; ++g)
      workers[i].gradients[g] = all->of[i].gradients[g] = new_tensor(STG_DTYPE_FLOAT, bits, 1, shape[g]);
  }
  for (int step = 0; step < NUM_STEPS; ++step) {
    double gradient[NUM_FEATURES + 1];
    for (uint64_t i = 0; i < num; ++i) pthread_create(&workers[i].thread, NULL, work, &workers[i]);
    for (uint64_t i = 0; i < num; ++i) pthread_join(workers[i].thread, NULL);
    if (!SUCCEEDS(reduce(strategy, all, STG_REDUCE_MEAN))) break;
    compute_gradient(reference, 0, NUM_SAMPLES, gradient);
    for (int k = 0; k <= NUM_FEATURES; ++k) {
      for (uint64_t i = 0; i < num; ++i) {
        const stg_tensor* reduced = workers[i].gradients[k == NUM_FEATURES];
        workers[i].parameters[k] -= LEARNING_RATE * element(reduced, k == NUM_FEATURES ? 0 : k);
      }
      reference[k] -= LEARNING_RATE * gradient[k];
      for (uint64_t i = 1; i < num; ++i) {
        CHECK_THAT(workers[i].parameters[k] == workers[0].parameters[k], "step %d: device %d agrees with device 0", step, (int)i);
      }
      CHECK_THAT(is_close(workers[0].parameters[k], reference[k], tolerance), "step %d, parameter %d: %.17g equals %.17g", step,
                 k, workers[0].parameters[k], reference[k]);
      if (bits == 32) reference[k] = workers[0].parameters[k]; /* over many steps float32 drifts by itself */
    }
  }
  CHECK_THAT(fabs(workers[0].parameters[0]) > 0.5, "it learned something: %g", workers[0].parameters[0]);
  free_sets(all);
  free(workers);
  destroy_strategy(strategy);
  CHECK(num_live_tensors == 0);
}

static void float64_equals_one_set(void) { train(64, 0, 1e-12); }
static void float32_equals_one_set(void) { train(32, 0, 1e-6); }
static void caller_thread_only_does_too(void) { train(64, STG_CREATE_CALLER_THREAD_ONLY, 1e-12); }

DEFINE_CHECKS(raw_training_checks,
              {"reduce-trains-in-float64",
               "60 steps of a host's own model and optimizer over uneven shares equal one set in float64, to 1e-12, and all "
               "devices agree bitwise",
               "H", NEEDS_STRATEGY, float64_equals_one_set},
              {"reduce-trains-in-float32", "They do in float32, step by step, to 1e-6", "H", NEEDS_STRATEGY,
               float32_equals_one_set},
              {"reduce-trains-on-caller-thread", "They do with caller_thread_only", "F2", NEEDS_STRATEGY | NEEDS_CALLER_THREAD,
               caller_thread_only_does_too});
