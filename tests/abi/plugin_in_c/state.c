/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of training as a tree, in the layout that strategy.h prescribes, so that an instance of another author's strategy can go
 * on from it. Exported tensors are always copies: that is one of the two allowed answers, and it needs no rule about lifetimes.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sequential.h"

/* ---- export ---- */

static stg_entry* add_dict(stg_tree* tree, stg_value* to, uint64_t num_entries) {
  to->as.entries = seq_tree_alloc(tree, num_entries * sizeof(stg_entry));
  if (to->as.entries == NULL) return NULL;
  to->type = STG_DICT;
  to->count = (uint32_t)num_entries;
  return to->as.entries;
}

static stg_value* name(stg_entry* entry, const char* key) {
  entry->key.data = key; /* a literal */
  entry->key.size_bytes = strlen(key);
  return &entry->value;
}

/* Names are copied: the tree may outlive the model. */
static int copy_name(stg_tree* tree, stg_entry* entry, stg_string key) {
  stg_value copy = {STG_NONE, 0, {0}};
  if (!seq_tree_text(tree, &copy, key.data, key.size_bytes)) return 0;
  entry->key.data = copy.as.utf8;
  entry->key.size_bytes = copy.count;
  return 1;
}

static int export_model(const stg_model_description* root, stg_tree* tree, stg_value* model, stg_value* aliases) {
  uint64_t num_kept = 0, num_aliases = 0;
  for (uint64_t i = 0; i < root->num_parameters; ++i) {
    if ((root->parameters[i]->flags & STG_PARAMETER_PERSISTENT) == 0) continue;
    ++num_kept;
    num_aliases += root->parameters[i]->num_names - 1;
  }
  stg_entry *kept = add_dict(tree, model, num_kept), *alias = add_dict(tree, aliases, num_aliases);
  if (kept == NULL || alias == NULL) return 0;
  for (uint64_t i = 0; i < root->num_parameters; ++i) {
    const stg_parameter* parameter = root->parameters[i];
    if ((parameter->flags & STG_PARAMETER_PERSISTENT) == 0) continue;
    kept->value.as.tensor = seq_copy_tensor(&parameter->tensor->view);
    if (kept->value.as.tensor == NULL) return 0;
    kept->value.type = STG_TENSOR;
    if (!copy_name(tree, kept++, parameter->names[0])) return 0;
    for (uint64_t other = 1; other < parameter->num_names; ++other, ++alias) {
      if (!copy_name(tree, alias, parameter->names[other])) return 0;
      if (!seq_tree_text(tree, &alias->value, parameter->names[0].data, parameter->names[0].size_bytes)) return 0;
    }
  }
  return 1;
}

static int export_optimizer(const stg_strategy* self, stg_tree* tree, stg_value* to) {
  if (!self->has_optimizer || self->stage != STG_STAGE_FIT) return 1; /* none */
  stg_entry* entries = add_dict(tree, to, 3);
  if (entries == NULL || !seq_tree_text(tree, name(&entries[0], "name"), "sgd", 3)) return 0;
  stg_value* step = name(&entries[1], "step");
  step->type = STG_INT64;
  step->as.i64 = (int64_t)self->num_updates;
  return add_dict(tree, name(&entries[2], "per_parameter"), 0) != NULL; /* plain SGD remembers nothing */
}

static stg_error* export_generators(const stg_strategy* self, stg_tree* tree, stg_value* to) {
  to->type = STG_LIST;
  if (!STG_HAS(stg_model, self->model, get_generator_state)) return NULL;
  to->as.items = seq_tree_alloc(tree, self->num_devices * sizeof(stg_value));
  if (to->as.items == NULL) return seq_out_of_memory();
  to->count = (uint32_t)self->num_devices;
  for (uint64_t i = 0; i < self->num_devices; ++i) {
    stg_tree state;
    memset(&state, 0, sizeof state);
    stg_error* error = self->model->get_generator_state(self->model->self, self->replicas[i].handle, &state);
    if (error != NULL) return seq_replica_error(error, "get_generator_state", (int32_t)i, self->replicas[i].device);
    const int is_bytes = state.root.type == STG_BYTES;
    const int is_copied = is_bytes && seq_tree_text(tree, &to->as.items[i], state.root.as.utf8, state.root.count);
    seq_release_tree(&state);
    if (!is_bytes) return seq_error(STG_INTERNAL, "the model's generator state on replica %" PRIu64 " is not a bytes value", i);
    if (!is_copied) return seq_out_of_memory();
    to->as.items[i].type = STG_BYTES;
  }
  return NULL;
}

static stg_error* export_to(const stg_strategy* self, stg_tree* tree) {
  stg_entry* entries = add_dict(tree, &tree->root, 6);
  if (entries == NULL) return seq_out_of_memory();
  stg_value* format = name(&entries[0], "format");
  format->type = STG_INT64;
  format->as.i64 = STG_STATE_FORMAT;
  name(&entries[4], "scaler"); /* none */
  if (!export_model(&self->replicas[0].description, tree, name(&entries[1], "model"), name(&entries[2], "aliases")) ||
      !export_optimizer(self, tree, name(&entries[3], "optimizer"))) {
    return seq_out_of_memory();
  }
  return export_generators(self, tree, name(&entries[5], "generators"));
}

stg_error* seq_export_state(stg_strategy* self, const stg_call* call, uint64_t flags, stg_tree* out) {
  stg_tree tree;
  stg_call time;
  if (out == NULL) return seq_error(STG_INVALID_ARGUMENT, "export_state: out is null");
  if ((flags & ~(uint64_t)STG_EXPORT_COPY) != 0)
    return seq_error(STG_UNIMPLEMENTED, "export_state: flags %" PRIu64 "; known is 1", flags);
  stg_error* error = seq_enter(self, SEQ_export_state, call, &time);
  if (error != NULL) return error;
  error = seq_new_tree(&tree);
  if (error == NULL && (error = export_to(self, &tree)) != NULL) seq_release_tree(&tree);
  if (error == NULL) *out = tree;
  return seq_leave(self, error);
}

/* ---- import ---- */

/* Names that did not fit, in three lists of the report's tree. */
enum { MISSING, UNEXPECTED, UNKNOWN_KEYS, NUM_LISTS };

typedef struct report {
  stg_tree tree;
  stg_entry* lists; /* NUM_LISTS of them */
  char text[1024];  /* all of it in one line, cut to fit */
  int has_failed;   /* no memory */
  int is_strict_error;
} report;

static void note(report* to, int list, stg_string what) {
  static const char* const words[] = {"missing", "unexpected", "unknown key"};
  stg_value* names = &to->lists[list].value;
  stg_value* grown = seq_tree_alloc(&to->tree, (names->count + 1) * sizeof *grown);
  if (grown == NULL || !seq_tree_text(&to->tree, &grown[names->count], what.data, what.size_bytes)) {
    to->has_failed = 1;
    return;
  }
  if (names->count > 0) memcpy(grown, names->as.items, names->count * sizeof *grown);
  names->as.items = grown;
  ++names->count;
  if (list != UNKNOWN_KEYS) to->is_strict_error = 1;
  const size_t used = strlen(to->text);
  snprintf(to->text + used, sizeof to->text - used, "; %s: %.*s", words[list], (int)what.size_bytes, what.data);
}

static void note_text(report* to, int list, const char* what) {
  const stg_string text = {what, strlen(what)};
  note(to, list, text);
}

static stg_error* new_report(report* out) {
  static const char* const keys[] = {"missing", "unexpected", "unknown_keys"};
  memset(out, 0, sizeof *out);
  stg_error* error = seq_new_tree(&out->tree);
  if (error != NULL) return error;
  out->lists = add_dict(&out->tree, &out->tree.root, NUM_LISTS);
  if (out->lists == NULL) {
    seq_release_tree(&out->tree);
    return seq_out_of_memory();
  }
  for (int i = 0; i < NUM_LISTS; ++i) name(&out->lists[i], keys[i])->type = STG_LIST;
  return NULL;
}

static const stg_value* find_tensor(const stg_value* model, const stg_parameter* parameter) {
  for (uint32_t i = 0; model != NULL && model->type == STG_DICT && i < model->count; ++i) {
    const stg_value* value = &model->as.entries[i].value;
    if (!seq_same_text(model->as.entries[i].key, parameter->names[0]) || value->type != STG_TENSOR) continue;
    const stg_tensor_view* view = &value->as.tensor->view;
    return seq_is_dtype(view->dtype, STG_DTYPE_FLOAT, 32) && seq_same_shape(view, &parameter->tensor->view) ? value : NULL;
  }
  return NULL;
}

/* A tensor of another shape or dtype is missing under its name, and unexpected as what it is. */
static void compare_model(const stg_model_description* root, const stg_value* model, report* to) {
  for (uint64_t i = 0; i < root->num_parameters; ++i) {
    if ((root->parameters[i]->flags & STG_PARAMETER_PERSISTENT) == 0) continue;
    if (find_tensor(model, root->parameters[i]) == NULL) note(to, MISSING, root->parameters[i]->names[0]);
  }
  for (uint32_t i = 0; model != NULL && model->type == STG_DICT && i < model->count; ++i) {
    int is_used = 0;
    for (uint64_t p = 0; p < root->num_parameters; ++p) {
      is_used |= find_tensor(model, root->parameters[p]) == &model->as.entries[i].value;
    }
    if (!is_used) note(to, UNEXPECTED, model->as.entries[i].key);
  }
}

static void compare_rest(const stg_strategy* self, const stg_value* state, report* to) {
  static const char* const known[] = {"format", "model", "aliases", "optimizer", "scaler", "generators"};
  for (uint32_t i = 0; i < state->count; ++i) {
    int is_known = 0;
    for (size_t k = 0; k < sizeof known / sizeof *known; ++k)
      is_known |= seq_find(state, known[k]) == &state->as.entries[i].value;
    if (!is_known) note(to, UNKNOWN_KEYS, state->as.entries[i].key);
  }
  const stg_value* optimizer_name = seq_find(seq_find(state, "optimizer"), "name");
  const stg_value* slots = seq_find(seq_find(state, "optimizer"), "per_parameter");
  if (optimizer_name != NULL &&
      (optimizer_name->type != STG_STRING || optimizer_name->count != 3 || memcmp(optimizer_name->as.utf8, "sgd", 3) != 0)) {
    note_text(to, UNEXPECTED, "optimizer.name");
  }
  if (slots != NULL && slots->count > 0) note_text(to, UNEXPECTED, "optimizer.per_parameter");
  const stg_value* generators = seq_find(state, "generators");
  const int takes_generators = STG_HAS(stg_model, self->model, set_generator_state);
  if (generators != NULL && generators->count > (takes_generators ? self->num_devices : 0))
    note_text(to, UNKNOWN_KEYS, "generators");
}

static stg_error* write_state(stg_strategy* self, const stg_value* state) {
  const stg_value *model = seq_find(state, "model"), *generators = seq_find(state, "generators");
  const stg_value* step = seq_find(seq_find(state, "optimizer"), "step");
  for (uint64_t i = 0; i < self->num_devices; ++i) {
    const stg_model_description* own = &self->replicas[i].description;
    for (uint64_t p = 0; p < own->num_parameters; ++p) {
      const stg_value* value = find_tensor(model, own->parameters[p]);
      if (value != NULL) seq_copy_elements(seq_data(&own->parameters[p]->tensor->view), &value->as.tensor->view);
    }
    if (generators == NULL || generators->type != STG_LIST || i >= generators->count) continue;
    const stg_value* bytes = &generators->as.items[i];
    if (bytes->type != STG_BYTES || !STG_HAS(stg_model, self->model, set_generator_state)) continue;
    stg_error* error =
        self->model->set_generator_state(self->model->self, self->replicas[i].handle, bytes->as.bytes, bytes->count);
    if (error != NULL) return seq_replica_error(error, "set_generator_state", (int32_t)i, self->replicas[i].device);
  }
  if (step != NULL && step->type == STG_INT64 && step->as.i64 >= 0) self->num_updates = (uint64_t)step->as.i64;
  return NULL;
}

stg_error* seq_apply_state(stg_strategy* self, const stg_value* state, uint64_t flags, stg_tree* report_out) {
  report found;
  const stg_value* format = seq_find(state, "format");
  if (format == NULL || format->type != STG_INT64 || format->as.i64 != STG_STATE_FORMAT) {
    return seq_error(STG_INVALID_ARGUMENT, "state: it is not a dict with format %d; export_state gives one", STG_STATE_FORMAT);
  }
  stg_error* error = new_report(&found);
  if (error != NULL) return error;
  compare_model(&self->replicas[0].description, seq_find(state, "model"), &found);
  compare_rest(self, state, &found);
  if (found.has_failed) {
    error = seq_out_of_memory();
  } else if ((flags & STG_IMPORT_STRICT) != 0 && found.is_strict_error) {
    error = seq_error(STG_INVALID_ARGUMENT, "state: it does not fit the model and optimizer%s", found.text);
  } else {
    error = write_state(self, state);
  }
  if (error != NULL || report_out == NULL) {
    seq_release_tree(&found.tree);
  } else {
    *report_out = found.tree;
  }
  return error;
}

stg_error* seq_import_state(stg_strategy* self, const stg_call* call, stg_tree* state, uint64_t flags, stg_tree* report_out) {
  seq_batch* taken = NULL;
  stg_call time;
  stg_error* error = seq_take_batch(state, "state", &taken);
  if (error != NULL) return error;
  if ((flags & ~(uint64_t)STG_IMPORT_STRICT) != 0)
    error = seq_error(STG_UNIMPLEMENTED, "import_state: flags %" PRIu64 "; known is 1", flags);
  if (error == NULL && (error = seq_enter(self, SEQ_import_state, call, &time)) == NULL) {
    error = seq_apply_state(self, &taken->tree.root, flags, report_out);
    if (error == NULL) {
      seq_clear_gradients(self);
      error = seq_tell_parameters_changed(self);
    }
    error = seq_leave(self, error);
  }
  seq_drop_batch(taken);
  return error;
}
