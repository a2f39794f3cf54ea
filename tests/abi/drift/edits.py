# SPDX-License-Identifier: Apache-2.0
"""Deliberate edits of the headers, each done as somebody would who means it (with the asserted sizes), and what must come of it."""


class Edit:
    """`breaks`: parts of the one complaint, or empty where the edit is allowed; then `news` are parts of what is told as new. `abidiff`:
    whether it must notice, too; it sees types, not constants, comments and smallest sizes, and takes an append for harmless everywhere."""

    def __init__(self, header, changes, breaks=(), news=(), abidiff=False):
        self.header, self.changes, self.breaks, self.news, self.abidiff = header, changes, breaks, news, abidiff


def assert_size(name, old, new):
    """Of a fixed struct."""
    return (f"STG_ASSERT_SIZE({name}, {old});", f"STG_ASSERT_SIZE({name}, {new});")


SYNC = "  /* Returns when the replica's device has finished what was queued. Null: there is nothing to wait for. [replica] */\n" \
       "  stg_error *(*synchronize)(void *self, stg_replica *replica);\n"
CLOSE = "  /* Closes a `file` that open gave, and consumes it. [any] */\n  void (*close)(void *self, void *file);\n"
LAST_FIELD = "  uint64_t num_streams;\n} stg_call;"
CANCEL_LINE = "  const uint32_t *cancel;    /* borrowed; read atomically; nonzero: return STG_CANCELLED as soon as possible; null: none */\n"
DEADLINE_LINE = "  uint64_t deadline_ns;      /* CLOCK_MONOTONIC, in nanoseconds; 0: none */\n"

EDITS = {
    # --- what breaks programs that are built
    "two fields of a growing struct change places": Edit(
        "call.h", [(DEADLINE_LINE + CANCEL_LINE, CANCEL_LINE + DEADLINE_LINE)],
        ["stg_call.deadline_ns", "offset 8", "there is cancel now", "B1"], abidiff=True),
    "two slots of a table change places": Edit(
        "model.h", [(SYNC, ""), ("  /* Moves a share to the replica's device:", SYNC + "  /* Moves a share to the replica's device:")],
        ["stg_model.transfer", "there is synchronize now"], abidiff=True),
    "a number changes its sign": Edit(
        "call.h", [("  uint64_t num_streams;", "  int64_t num_streams;")],
        ["stg_call.num_streams", "type is int64_t", "in 1.0 uint64_t", "append"], abidiff=True),
    "a pointer points to something else": Edit(
        "call.h", [("const uint32_t *cancel;", "const uint64_t *cancel;")], ["stg_call.cancel", "const uint64_t *"], abidiff=True),
    "a union's member changes its type": Edit(
        "value.h", [("    double f64;", "    uint64_t f64;")], ["stg_value.as", "uint64_t f64"]),
    "a slot takes another argument": Edit(
        "strategy.h", [("(*barrier)(stg_strategy *self, const stg_call *call, stg_string name)",
                        "(*barrier)(stg_strategy *self, const stg_call *call, stg_string name, uint64_t flags)")],
        ["stg_strategy_api.barrier", "stg_string, uint64_t", "B3"], abidiff=True),
    "a function of libstratagem takes another argument": Edit(
        "session.h", [("stg_config_schema(stg_tree *result)", "stg_config_schema(stg_tree *result, uint64_t flags)")],
        ["stg_config_schema", "stg_tree *, uint64_t", "new function"], abidiff=True),
    "the last field of a growing struct goes": Edit(
        "call.h", [("  uint64_t num_streams;\n", ""), ("STG_CALL_MIN_SIZE 40u", "STG_CALL_MIN_SIZE 32u"), assert_size("stg_call", 40, 32)],
        ["stg_call.num_streams", "the struct ends before it now"], abidiff=True),
    "a slot in the middle of a table goes": Edit(
        "host.h", [(CLOSE, ""), ("STG_STORAGE_MIN_SIZE 96u", "STG_STORAGE_MIN_SIZE 88u"), assert_size("stg_storage", 96, 88)],
        ["stg_storage.close", "there is list now"], abidiff=True),
    "a field is given another name": Edit(
        "call.h", [("  uint64_t num_streams;", "  uint64_t count_streams;")], ["stg_call.num_streams", "there is count_streams now"]),
    "a field is inserted": Edit(
        "call.h", [(CANCEL_LINE, "  uint64_t priority;\n" + CANCEL_LINE), assert_size("stg_call", 40, 48)],
        ["stg_call.cancel", "offset 16", "there is priority now", "new ones go to the end"], abidiff=True),
    "a slot is inserted into a table": Edit(
        "model.h", [(SYNC, SYNC.replace("synchronize", "wait") + SYNC), assert_size("stg_model", 144, 152)],
        ["stg_model.synchronize", "there is wait now"], abidiff=True),
    "a fixed struct grows": Edit(
        "plugin.h", [("  stg_string host_name; /* lifetime: the call; for messages */\n", "  stg_string host_name; /* lifetime: the call; for messages */\n  uint64_t flags;\n"),
                     assert_size("stg_probe_request", 32, 40)],
        ["stg_probe_request: has flags at its end", "fixed struct never changes", "struct of its own"]),
    "a smallest size grows": Edit(
        "model.h", [("STG_MODEL_MIN_SIZE 88u", "STG_MODEL_MIN_SIZE 96u")], ["stg_model: its _MIN_SIZE is 96", "released 88"]),
    "a constant is renumbered": Edit(
        "model.h", [("#define STG_STAGE_TEST 2u", "#define STG_STAGE_TEST 5u")], ["STG_STAGE_TEST", "5", "1.0 uint32_t 2", "keeps its number"]),
    "a constant goes": Edit("strategy.h", [("#define STG_REDUCE_MAX 3u\n", "")], ["STG_REDUCE_MAX: is gone"]),
    "the one exported symbol is called otherwise": Edit(
        "plugin.h", [('"stg_plugin_probe"', '"stg_probe_plugin"')], ["STG_PLUGIN_PROBE_SYMBOL", "text stg_probe_plugin"]),
    "a function of libstratagem goes": Edit(
        "session.h", [("/* The config's JSON Schema. [any] */\nSTG_API stg_error *stg_config_schema(stg_tree *result);\n", "")],
        ["stg_config_schema: is gone"], abidiff=True),
    "a function is for one caller that was for any": Edit(
        "strategy.h", [("/* Fills `out`. [any, all] */\n  stg_error *(*status)", "/* Fills `out`. [owner, all] */\n  stg_error *(*status)")],
        ["stg_strategy_api.status", "[owner, all]", "in 1.0", "[any, all]"]),
    "a function is legal in fewer states": Edit(
        "strategy.h", [("starts the threads. On an error the instance is as before. [owner, created]", "[owner, fit]")],
        ["stg_strategy_api.setup", "[owner, fit]"]),
    "a macro takes another argument": Edit(
        "common.h", [("#define STG_HAS(type, table, slot) (", "#define STG_HAS(type, table, slot, size) (")], ["STG_HAS", "(type, table, slot, size)"]),
    # --- what doesn't
    "a growing struct grows at its end": Edit(
        "call.h", [(LAST_FIELD, LAST_FIELD.replace("\n}", "\n  uint64_t priority; /* since 1.1 */\n}")), assert_size("stg_call", 40, 48)],
        news=["stg_call: grows by priority, from 40 to 48 bytes"]),
    "a table gets a slot at its end": Edit(
        "model.h", [("} stg_model;", "  /* Since 1.1. [replica] */\n  stg_error *(*warm_up)(void *self, stg_replica *replica);\n} stg_model;"),
                    assert_size("stg_model", 144, 152)],
        news=["stg_model: grows by warm_up, from 144 to 152 bytes"]),
    "a constant, a struct and a function are added": Edit(
        "session.h", [("/* The config's JSON Schema. [any] */",
                       "#define STG_NEW 1u\n\n/* Growing. */\ntypedef struct stg_new {\n  uint64_t struct_size;\n  uint64_t number;\n} stg_new;\n"
                       "#define STG_NEW_MIN_SIZE 16u\nSTG_ASSERT_SIZE(stg_new, 16);\n\n/* New. [any] */\nSTG_API void stg_do_new(const stg_new *args);\n"
                       "\n/* The config's JSON Schema. [any] */")],
        news=["stg_new: new", "stg_do_new: new", "STG_NEW: new"]),
    "a comment says it better": Edit("call.h", [("in nanoseconds; 0: none", "in nanoseconds; 0: there is none")]),
    "an argument is called otherwise": Edit("strategy.h", [("const stg_call *call, stg_string name);", "const stg_call *call, stg_string label);")]),
}
