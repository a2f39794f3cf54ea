#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a next minor would be: copies of today's headers, and of the plugin in C, with a few things appended.

usage: next_minor.py ROOT OUT

OUT/include has the headers of ABI 1.1, OUT/plugin the plugin that serves them. Each change is what B1 and B3 of docs/abi.md allow: a field
at the end of an argument struct and of a result struct, a slot at the end of the strategy's and the model's table, an extension.
"""
import pathlib
import shutil
import sys

HEADERS = {
    "common.h": [("#define STG_ABI_MINOR 0u", "#define STG_ABI_MINOR 1u")],
    "strategy.h": [
        # an argument: what an older plugin doesn't know must be zero
        ("} stg_update_args;",
         "  double weight_decay; /* since 1.1; parameters shrink by lr times this part of themselves before the update; 0: they don't */\n"
         "} stg_update_args;"),
        ("STG_ASSERT_SIZE(stg_update_args, 32);", "STG_ASSERT_SIZE(stg_update_args, 40);"),
        # a result: an older plugin lowers struct_size
        ("} stg_update_result;", "  double parameter_norm; /* since 1.1; 2-norm of the parameters after the update */\n} stg_update_result;"),
        ("STG_ASSERT_SIZE(stg_update_result, 40);", "STG_ASSERT_SIZE(stg_update_result, 48);"),
        # a slot: an older plugin's table ends before it
        ("} stg_strategy_api;",
         "  /* Since 1.1. How many numbers the parameters are. [owner, fit evaluate] */\n"
         "  stg_error *(*count_elements)(stg_strategy *self, uint64_t *out);\n} stg_strategy_api;"),
        ("STG_ASSERT_SIZE(stg_strategy_api, 272);", "STG_ASSERT_SIZE(stg_strategy_api, 280);"),
    ],
    "states.h": [("  X(load, STG_THREAD_OWNER, STG_STATES_MODEL_)",
                  "  X(load, STG_THREAD_OWNER, STG_STATES_MODEL_) \\\n  X(count_elements, STG_THREAD_OWNER, STG_STATES_MODEL_)")],
    # a slot of the host's: an older plugin never calls it
    "model.h": [("} stg_model;", "  /* Since 1.1. The replica's first step is near. [replica] */\n"
                                 "  stg_error *(*warm_up)(void *self, stg_replica *replica);\n} stg_model;"),
                ("STG_ASSERT_SIZE(stg_model, 144);", "STG_ASSERT_SIZE(stg_model, 152);")],
    # an extension: an older plugin answers null
    "extension.h": [("#include <stratagem/plugin.h>\n",
                     "#include <stratagem/plugin.h>\n\nSTG_EXTERN_C_BEGIN\n\n/* Since 1.1: what an instance has been through. */\n"
                     "#define STG_EXTENSION_HISTORY \"stratagem.history/1\"\n\n/* Growing; a function table. */\ntypedef struct stg_history_api {\n"
                     "  uint64_t struct_size;\n  /* How often setup has succeeded. [any, all] */\n"
                     "  stg_error *(*count_setups)(stg_strategy *self, uint64_t *out);\n} stg_history_api;\n"
                     "#define STG_HISTORY_API_MIN_SIZE 16u\nSTG_ASSERT_SIZE(stg_history_api, 16);\n\nSTG_EXTERN_C_END\n")],
}

PLUGIN = {
    "sequential.h": [
        ("stg_error* seq_zero_grad(", "stg_error* seq_count_elements(stg_strategy* self, uint64_t* out);\n"
                                      "stg_error* seq_count_setups(stg_strategy* self, uint64_t* out);\nstg_error* seq_zero_grad("),
        ("  uint64_t num_updates;\n};", "  uint64_t num_updates;\n  uint64_t num_setups;\n};"),
    ],
    "plugin.c": [
        ("    .load = no_load,\n", "    .load = no_load,\n#ifndef NULL_SLOT\n    .count_elements = seq_count_elements,\n#endif\n"),
        ("static const void* get_extension(stg_string id) {\n  (void)id;\n  return NULL;\n}",
         "static const stg_history_api history = {.struct_size = sizeof history, .count_setups = seq_count_setups};\n\n"
         "static const void* get_extension(stg_string id) {\n  const stg_string known = {STG_EXTENSION_HISTORY, sizeof(STG_EXTENSION_HISTORY) - 1};\n"
         "  return seq_same_text(id, known) ? &history : NULL;\n}"),
    ],
    "train.c": [
        ("  return NULL;\n}\n\nstatic void update_parameters(stg_strategy* self, double lr) {",
         "  if (!isfinite(read->weight_decay)) return seq_error(STG_INVALID_ARGUMENT, \"update_args.weight_decay is not a finite number\");\n"
         "  return NULL;\n}\n\nstatic double update_parameters(stg_strategy* self, double lr, double weight_decay) {\n  double sum = 0;"),
        ("for (int64_t k = 0; k < numel; ++k) parameter[k] = (float)(parameter[k] - factor * self->sums[i][k]);",
         "for (int64_t k = 0; k < numel; ++k) {\n"
         "        if (replica == 0) sum += pow(parameter[k] * (1 - lr * weight_decay) - factor * self->sums[i][k], 2);\n"
         "        parameter[k] = (float)(parameter[k] * (1 - lr * weight_decay) - factor * self->sums[i][k]);\n      }"),
        ("    }\n  }\n}\n\nstatic stg_error* run_update", "    }\n  }\n  return sqrt(sum);\n}\n\nstatic stg_error* run_update"),
        ("  update_parameters(self, args->lr);", "  result->parameter_norm = update_parameters(self, args->lr, args->weight_decay);"),
    ],
    "life.c": [
        ("  if (error == NULL) error = make_sums(self);",
         "  for (uint64_t i = 0; error == NULL && STG_HAS(stg_model, model, warm_up) && i < self->num_devices; ++i) {\n"
         "    error = model->warm_up(model->self, self->replicas[i].handle);\n  }\n  if (error == NULL) error = make_sums(self);"),
        ("    if (error == NULL) {\n      self->stage", "    if (error == NULL) {\n      ++self->num_setups;\n      self->stage"),
        ("stg_error* seq_teardown(",
         "stg_error* seq_count_elements(stg_strategy* self, uint64_t* out) {\n"
         "  if (out == NULL) return seq_error(STG_INVALID_ARGUMENT, \"count_elements: out is null\");\n"
         "  stg_error* error = seq_enter(self, SEQ_count_elements, NULL, NULL);\n  if (error != NULL) return error;\n  *out = 0;\n"
         "  const stg_model_description* root = &self->replicas[0].description;\n"
         "  for (uint64_t i = 0; i < root->num_parameters; ++i) *out += (uint64_t)seq_numel(&root->parameters[i]->tensor->view);\n"
         "  return seq_leave(self, NULL);\n}\n\n"
         "stg_error* seq_count_setups(stg_strategy* self, uint64_t* out) {\n  *out = self->num_setups;\n  return NULL;\n}\n\nstg_error* seq_teardown("),
    ],
}


def write_changed(sources, changes, folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    left = set(changes)
    for source in sources:
        text = source.read_text(encoding="utf-8")
        for old, new in changes.get(source.name, []):
            if text.count(old) != 1:
                sys.exit(f"{source}: {text.count(old)} times, not once, there is what is to be changed:\n{old}")
            text = text.replace(old, new)
        left.discard(source.name)
        (folder / source.name).write_text(text, encoding="utf-8")
    if left:
        sys.exit(f"there is no {', '.join(left)} any more")


def main(root, out):
    write_changed(sorted((root / "abi/stratagem").glob("*.h")), HEADERS, out / "include/stratagem")
    plugin = root / "tests/abi/plugin_in_c"
    write_changed(sorted([*plugin.glob("*.c"), *plugin.glob("*.h")]), PLUGIN, out / "plugin")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
