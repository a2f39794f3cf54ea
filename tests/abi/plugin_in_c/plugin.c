/* SPDX-License-Identifier: Apache-2.0
 *
 * The way in: the note that is read without loading, the probe, and the tables.
 *
 * The probe is the one function that a host of any major calls, so it must be right with any request: it checks, compares numbers
 * and writes text into the host's buffer. It allocates nothing and starts nothing.
 */
#include <stdio.h>
#include <string.h>

#include "sequential.h"

/* The probe and the note must agree; both are made of these. */
#define PLUGIN_NAME "sequential_in_c"
#define PLUGIN_VERSION "1.0.0"
#ifndef MIN_MINOR /* a test builds this plugin as one of a later minor */
#define MIN_MINOR 0
#define MAX_MINOR 0
#endif
#define TEXT_OF_(number) #number
#define TEXT_OF(number) TEXT_OF_(number)

STG_PLUGIN_NOTE("{\"name\": \"" PLUGIN_NAME "\", \"version\": \"" PLUGIN_VERSION
                "\", \"abi\": {\"major\": 1, \"min_minor\": " TEXT_OF(MIN_MINOR) ", \"max_minor\": " TEXT_OF(
                    MAX_MINOR) "}, \"strategies\": [\"sequential\"], \"models\": []}");

#if STG_ABI_MAJOR != 1
#error "the note says major 1"
#endif

/* ---- slots that this strategy doesn't have ----
 *
 * A null slot would do as well. A function can say what to use instead, and must still consume what is moved in. */

static stg_error* release_and_refuse(stg_tree* moved, const char* text) {
  if (moved != NULL) seq_release_tree(moved);
  return seq_error(STG_UNIMPLEMENTED, "%s", text);
}

static stg_error* no_model_to_device(stg_strategy* self, const stg_call* call) {
  (void)self, (void)call;
  return seq_error(STG_UNIMPLEMENTED, "model_to_device: replicas are on the CPU from setup on");
}

static stg_error* no_reduce(stg_strategy* self, const stg_call* call, stg_tree* object, uint32_t op, stg_tree* out) {
  (void)self, (void)call, (void)op, (void)out;
  return release_and_refuse(object, "reduce: this strategy does not reduce tensors of a host's; it weights the loss itself");
}

static stg_error* no_announce_batch(stg_strategy* self, const stg_call* call, const stg_transfer_args* args, uint32_t stage,
                                    uint64_t* ticket) {
  (void)self, (void)call, (void)stage, (void)ticket;
  stg_error* error = seq_check_size(args, STG_TRANSFER_ARGS_MIN_SIZE, "transfer_args");
  if (error != NULL) return error;
  return release_and_refuse(args->batch, "announce_batch: there is nothing to overlap with; give the batch to the step");
}

static stg_error* no_gradients(stg_strategy* self, const stg_call* call, stg_tree* out) {
  (void)self, (void)call, (void)out;
  return seq_error(STG_UNIMPLEMENTED, "gradients: this strategy updates by itself; reduce_gradients serves a host's optimizer");
}

static stg_error* no_parameters_changed(stg_strategy* self, const stg_call* call) {
  (void)self, (void)call;
  return seq_error(STG_UNIMPLEMENTED, "parameters_changed: use import_state to write weights");
}

static stg_error* no_load(stg_strategy* self, const stg_call* call, const stg_checkpoint_args* args, stg_tree* host_json,
                          stg_tree* report) {
  (void)self, (void)call, (void)args, (void)host_json, (void)report;
  return seq_error(STG_UNIMPLEMENTED, "load: this strategy reads no files; use import_state");
}

/* ---- tables ---- */

static const stg_strategy_api api = {
    .struct_size = sizeof api,
    .create = seq_create,
    .destroy = seq_destroy,
    .abort = seq_abort,
    .status = seq_status,
    .devices = seq_devices,
    .ranks = seq_ranks,
    .setup = seq_setup,
    .teardown = seq_teardown,
    .describe_parameters = seq_describe_parameters,
    .model_to_device = no_model_to_device,
    .batch_to_device = seq_batch_to_device,
    .broadcast = seq_broadcast,
    .all_gather = seq_all_gather,
    .reduce = no_reduce,
    .reduce_boolean_decision = seq_reduce_boolean_decision,
    .barrier = seq_barrier,
    .to_host = seq_to_host,
    .announce_batch = no_announce_batch,
    .training_step = seq_training_step,
    .backward = seq_backward,
    .optimizer_step = seq_optimizer_step,
    .train_batch = seq_train_batch,
    .zero_grad = seq_zero_grad,
    .gradients = no_gradients,
    .parameters_changed = no_parameters_changed,
    .validation_step = seq_validation_step,
    .test_step = seq_test_step,
    .predict_step = seq_predict_step,
    .reduce_gradients = seq_reduce_gradients,
    .export_state = seq_export_state,
    .import_state = seq_import_state,
    .save = NULL, /* it writes no files; with a null slot a host knows before it trains */
    .load = no_load,
};

#define TEXT(literal) \
  { literal, sizeof(literal) - 1 }

static const uint32_t device_kinds[] = {STG_DEVICE_CPU};

static const stg_strategy_factory sequential = {
    .struct_size = sizeof sequential,
    .name = TEXT("sequential"),
    .summary = TEXT("Logical CPU devices one after the other on the calling thread, plain SGD"),
    .options_schema = TEXT("{\"type\": \"object\", \"additionalProperties\": false}"),
    .device_kinds = device_kinds,
    .num_device_kinds = 1,
    .capabilities = STG_CAPABILITY_MULTIPLE_DEVICES | STG_CAPABILITY_CALLER_THREAD_ONLY,
    .api = &api,
};

static const stg_strategy_factory* const strategies[] = {&sequential};

static const void* get_extension(stg_string id) {
  (void)id;
  return NULL;
}

static const stg_plugin plugin = {
    .struct_size = sizeof plugin,
    .name = TEXT(PLUGIN_NAME),
    .version = TEXT(PLUGIN_VERSION),
    .strategies = strategies,
    .num_strategies = 1,
    .get_extension = get_extension,
};

/* ---- the probe ---- */

static void explain(const stg_probe_request* request, stg_probe_reply* reply) {
  char nothing[1];
  const int has_buffer = reply->text != NULL && reply->text_capacity_bytes > 0;
  const int host_bytes = request->host_name.data == NULL      ? 0
                         : request->host_name.size_bytes > 64 ? 64
                                                              : (int)request->host_name.size_bytes;
  const int size_bytes =
      snprintf(has_buffer ? reply->text : nothing, has_buffer ? reply->text_capacity_bytes : 0,
               "%s %s is built for ABI %u.%u to %u.%u; the host %.*s speaks %u.%u to %u.%u: use a plugin and a "
               "host of one major whose minors meet",
               PLUGIN_NAME, PLUGIN_VERSION, STG_ABI_MAJOR, (unsigned)MIN_MINOR, STG_ABI_MAJOR, (unsigned)MAX_MINOR, host_bytes,
               request->host_name.data == NULL ? "" : request->host_name.data, request->abi_major, request->min_minor,
               request->abi_major, request->max_minor);
  reply->text_size_bytes = size_bytes < 0 ? 0 : (uint64_t)size_bytes + 1;
}

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

STG_EXPORT uint32_t stg_plugin_probe(const stg_probe_request* request, stg_probe_reply* reply);

uint32_t stg_plugin_probe(const stg_probe_request* request, stg_probe_reply* reply) {
  if (request == NULL || reply == NULL) return STG_PROBE_BAD_ARGUMENT;
  if (request->reserved != 0 || request->min_minor > request->max_minor) return STG_PROBE_BAD_ARGUMENT;
  if (request->host_name.data == NULL && request->host_name.size_bytes > 0) return STG_PROBE_BAD_ARGUMENT;
  reply->abi_major = STG_ABI_MAJOR;
  reply->min_minor = MIN_MINOR;
  reply->max_minor = MAX_MINOR;
  reply->minor = 0;
  reply->plugin = NULL;
  reply->text_size_bytes = 0;
  const uint32_t lowest = larger(request->min_minor, MIN_MINOR), highest = smaller(request->max_minor, MAX_MINOR);
  if (request->abi_major != STG_ABI_MAJOR || lowest > highest) {
    explain(request, reply);
    return STG_PROBE_REFUSED;
  }
  if (reply->text != NULL && reply->text_capacity_bytes > 0) reply->text[0] = 0;
  reply->minor = highest;
  reply->plugin = &plugin;
  return STG_PROBE_ACCEPTED;
}
