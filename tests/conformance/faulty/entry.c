/* SPDX-License-Identifier: Apache-2.0
 *
 * The way in, and its faults.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fault.h"
#include "harm.h"

int is_fault(const char* check_id) {
  const char* asked = getenv("STRATAGEM_FAULT");
  return asked != NULL && strcmp(asked, check_id) == 0;
}

int says(const stg_error* error, const char* part) {
  const uint64_t size_bytes = strlen(part);
  for (uint64_t i = 0; error != NULL && i + size_bytes <= error->message.size_bytes; ++i) {
    if (memcmp(error->message.data + i, part, size_bytes) == 0) return 1;
  }
  return 0;
}

stg_error* forgive(const char* check_id, stg_error* error, const char* part) {
  if (!is_fault(check_id) || !says(error, part)) return error;
  error->release(error);
  return NULL;
}

/* ---- tables: copies, changed ---- */

static stg_plugin plugin;
static stg_strategy_factory factory;
static const stg_strategy_factory* factories[1] = {&factory};
static stg_strategy_api api;

static const void* any_extension(stg_string id) { return id.data; }

static stg_error* swallow_storage_error(stg_strategy* self, const stg_call* call, const stg_checkpoint_args* args) {
  void* transaction = NULL;
  (void)call;
  stg_error* error = self->host->storage->begin(self->host->storage->self, args->path, &transaction);
  if (error == NULL) return NULL;
  error->release(error);
  return seq_error(STG_RESOURCE_EXHAUSTED, "save: the tape is full");
}

static stg_error* save_nothing(stg_strategy* self, const stg_call* call, const stg_checkpoint_args* args) {
  (void)self, (void)call, (void)args;
  return NULL;
}

static stg_error* load_nothing(stg_strategy* self, const stg_call* call, const stg_checkpoint_args* args, stg_tree* host_json,
                               stg_tree* report) {
  (void)self, (void)call, (void)args, (void)host_json, (void)report;
  return NULL;
}

static stg_error* announce_nothing(stg_strategy* self, const stg_call* call, const stg_transfer_args* args, uint32_t stage,
                                   uint64_t* ticket) {
  (void)self, (void)call, (void)stage;
  seq_release_tree(args->batch);
  *ticket = 7;
  return NULL;
}

static stg_error* no_gradients_at_all(stg_strategy* self, const stg_call* call, stg_tree* out) {
  (void)self, (void)call;
  return seq_new_tree(out);
}

static stg_error* reduce_nothing(stg_strategy* self, const stg_call* call, stg_tree* object, uint32_t op, stg_tree* out) {
  (void)self, (void)call, (void)op;
  return seq_copy_tree(&object->root, out);
}

/* Says nothing of what goes wrong. */
static stg_error* save_anyway(stg_strategy* self, const stg_call* call, const stg_checkpoint_args* args) {
  static const stg_string name = {"state", 5};
  const stg_storage* storage = self->host->storage;
  void* transaction = NULL;
  (void)call;
  stg_error* error = storage->begin(storage->self, args->path, &transaction);
  if (error == NULL) {
    error = storage->write(storage->self, transaction, name, 0, "state", 5);
    seq_release_error(error);
    error = storage->commit(storage->self, transaction);
  }
  seq_release_error(error);
  return NULL;
}

#define SET_TEXT(field, text)          \
  do {                                 \
    (field).data = (text);             \
    (field).size_bytes = strlen(text); \
  } while (0)

static const stg_plugin* changed(const stg_plugin* given) {
  plugin = *given;
  factory = *given->strategies[0];
  api = *factory.api;
  plugin.strategies = factories;
  factory.api = &api;
  if (is_fault("note-agrees-with-table")) SET_TEXT(plugin.version, "1.0.1");
  if (is_fault("tables-whole")) SET_TEXT(factory.summary, "two\nlines");
  if (is_fault("unknown-extension-is-null")) plugin.get_extension = any_extension;
  if (is_fault("options-schema-is-json")) SET_TEXT(factory.options_schema, "{not json");
  if (is_fault("announced-batch-alike")) api.announce_batch = announce_nothing;
  if (is_fault("gradients-reduced")) api.gradients = no_gradients_at_all;
  if (is_fault("tree-reduced-by-each-op")) api.reduce = reduce_nothing;
  if (is_fault("storage-round-trip")) {
    api.save = save_nothing;
    api.load = load_nothing;
  }
  if (is_fault("storage-fails-at-every-call")) api.save = save_anyway;
  if (is_fault("storage-error-is-last-cause")) api.save = swallow_storage_error;
  return is_fault("plugin-enters") ? NULL : &plugin;
}

/* ---- the probe ---- */

uint32_t sequential_probe(const stg_probe_request* request, stg_probe_reply* reply);
STG_EXPORT uint32_t stg_plugin_probe(const stg_probe_request* request, stg_probe_reply* reply);

static uint32_t one_at_a_time(uint32_t answer) {
  static int num_inside;
  const int num_others = __atomic_fetch_add(&num_inside, 1, __ATOMIC_ACQ_REL);
  usleep(20);
  __atomic_fetch_sub(&num_inside, 1, __ATOMIC_ACQ_REL);
  return num_others > 0 ? STG_PROBE_BAD_ARGUMENT : answer;
}

static void change_refusal(stg_probe_reply* reply) {
  if (reply->text == NULL || reply->text_capacity_bytes == 0) return;
  if (is_fault("probe-refuses-other-versions")) {
    snprintf(reply->text, reply->text_capacity_bytes, "no");
    reply->text_size_bytes = 3;
  }
  if (is_fault("probe-cuts-refusal-to-fit")) reply->text[reply->text_capacity_bytes] = 0;
}

uint32_t stg_plugin_probe(const stg_probe_request* request, stg_probe_reply* reply) {
  if (is_fault("probe-tells-bad-arguments") && request == NULL) return STG_PROBE_ACCEPTED;
  harm_at_probe();
  if (is_fault("probe-reads-name-by-size") && request != NULL && strnlen(request->host_name.data, 8192) == 8192)
    return STG_PROBE_BAD_ARGUMENT;
  if (is_fault("probe-writes-its-reply-only") && request != NULL)
    ((stg_probe_request*)(uintptr_t)request)->max_minor = request->min_minor;
  uint32_t answer = sequential_probe(request, reply);
  if (answer == STG_PROBE_BAD_ARGUMENT) return answer;
  if (is_fault("note-agrees-with-probe")) reply->max_minor = 1;
  if (answer == STG_PROBE_REFUSED) change_refusal(reply);
  if (answer == STG_PROBE_ACCEPTED) reply->plugin = changed(reply->plugin);
  if (is_fault("probe-chooses-highest-minor") && answer == STG_PROBE_ACCEPTED) reply->minor = request->max_minor;
  if (is_fault("probe-many-threads")) answer = one_at_a_time(answer);
  return answer;
}
