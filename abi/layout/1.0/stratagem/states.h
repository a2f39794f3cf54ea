/* SPDX-License-Identifier: Apache-2.0
 *
 * The life of a strategy instance, and which function is legal when, as data. The table below is what the SDK checks at run time
 * and what the tests walk through: every function in every state.
 *
 *   create -> CREATED --setup(model, fit)---------------> FIT -------.
 *                ^   \--setup(model, other stage)-------> EVALUATE --+-- teardown --> CREATED
 *                |    \-setup(no model)-----------------> MODELLESS -'
 *                any of them --a deadline passed inside a callback or kernel, or abort()--> DRAINING (abort, destroy, queries)
 */
#ifndef STRATAGEM_STATES_H
#define STRATAGEM_STATES_H

#include <stratagem/common.h>

/* States of an instance, as bits, so that a set of them is a number. */
#define STG_STATE_CREATED 1u
#define STG_STATE_FIT 2u
#define STG_STATE_EVALUATE 4u
#define STG_STATE_MODELLESS 8u
#define STG_STATE_DRAINING 16u

/* Who may call (see common.h). */
#define STG_THREAD_ANY 1u
#define STG_THREAD_OWNER 2u
#define STG_THREAD_REPLICA 3u

#define STG_STATES_ALL_ 31u
#define STG_STATES_LIVE_ 15u /* all but draining */
#define STG_STATES_MODEL_ 6u /* fit, evaluate */

/* X(function of stg_strategy_api, who may call, states in which it is legal). In the order of the table; `create` is no member. */
#define STG_STRATEGY_FUNCTIONS(X)                                \
  X(destroy, STG_THREAD_OWNER, STG_STATES_ALL_)                  \
  X(abort, STG_THREAD_ANY, STG_STATES_ALL_)                      \
  X(status, STG_THREAD_ANY, STG_STATES_ALL_)                     \
  X(devices, STG_THREAD_ANY, STG_STATES_ALL_)                    \
  X(ranks, STG_THREAD_ANY, STG_STATES_ALL_)                      \
  X(setup, STG_THREAD_OWNER, STG_STATE_CREATED)                  \
  X(teardown, STG_THREAD_OWNER, STG_STATES_LIVE_)                \
  X(describe_parameters, STG_THREAD_OWNER, STG_STATES_MODEL_)    \
  X(model_to_device, STG_THREAD_OWNER, STG_STATES_MODEL_)        \
  X(batch_to_device, STG_THREAD_OWNER, STG_STATES_LIVE_)         \
  X(broadcast, STG_THREAD_OWNER, STG_STATES_LIVE_)               \
  X(all_gather, STG_THREAD_OWNER, STG_STATES_LIVE_)              \
  X(reduce, STG_THREAD_OWNER, STG_STATES_LIVE_)                  \
  X(reduce_boolean_decision, STG_THREAD_OWNER, STG_STATES_LIVE_) \
  X(barrier, STG_THREAD_OWNER, STG_STATES_LIVE_)                 \
  X(to_host, STG_THREAD_OWNER, STG_STATES_LIVE_)                 \
  X(announce_batch, STG_THREAD_OWNER, STG_STATES_MODEL_)         \
  X(training_step, STG_THREAD_OWNER, STG_STATE_FIT)              \
  X(backward, STG_THREAD_OWNER, STG_STATE_FIT)                   \
  X(optimizer_step, STG_THREAD_OWNER, STG_STATE_FIT)             \
  X(train_batch, STG_THREAD_OWNER, STG_STATE_FIT)                \
  X(zero_grad, STG_THREAD_OWNER, STG_STATE_FIT)                  \
  X(gradients, STG_THREAD_OWNER, STG_STATE_FIT)                  \
  X(parameters_changed, STG_THREAD_OWNER, STG_STATES_MODEL_)     \
  X(validation_step, STG_THREAD_OWNER, STG_STATES_MODEL_)        \
  X(test_step, STG_THREAD_OWNER, STG_STATES_MODEL_)              \
  X(predict_step, STG_THREAD_OWNER, STG_STATES_MODEL_)           \
  X(reduce_gradients, STG_THREAD_OWNER, STG_STATE_MODELLESS)     \
  X(export_state, STG_THREAD_OWNER, STG_STATES_MODEL_)           \
  X(import_state, STG_THREAD_OWNER, STG_STATES_MODEL_)           \
  X(save, STG_THREAD_OWNER, STG_STATES_MODEL_)                   \
  X(load, STG_THREAD_OWNER, STG_STATES_MODEL_)

#endif
