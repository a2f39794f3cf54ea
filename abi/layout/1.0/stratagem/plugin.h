/* SPDX-License-Identifier: Apache-2.0
 *
 * Finding and entering a plugin. A plugin exports exactly one symbol, stg_plugin_probe, and carries an ELF note that says in JSON what
 * it is, so that a host knows before it runs any of it.
 *
 * Plugins are opened RTLD_NOW | RTLD_LOCAL, linked -z nodelete, and never unloaded.
 */
#ifndef STRATAGEM_PLUGIN_H
#define STRATAGEM_PLUGIN_H

#include <stratagem/strategy.h>

STG_EXTERN_C_BEGIN

/* What a plugin offers. Growing. It and all that it points to live as long as the process. */
typedef struct stg_plugin {
  uint64_t struct_size;
  stg_string name;                               /* lifetime: the process; as in the note */
  stg_string version;                            /* lifetime: the process; as in the note */
  const stg_strategy_factory *const *strategies; /* lifetime: the process */
  uint64_t num_strategies;
  const stg_model_factory *const *models; /* lifetime: the process */
  uint64_t num_models;
  /* The table of an optional group of functions (extension.h), null if the plugin lacks it. The result lives as long as the process. [any] */
  const void *(*get_extension)(stg_string id);
} stg_plugin;
#define STG_PLUGIN_MIN_SIZE 80u
STG_ASSERT_SIZE(stg_plugin, 80);

/* Answers of the probe. */
#define STG_PROBE_ACCEPTED 0u
#define STG_PROBE_REFUSED 1u
#define STG_PROBE_BAD_ARGUMENT 2u

/* What the host says. Fixed for ever, across all majors. */
typedef struct stg_probe_request {
  uint32_t abi_major;
  uint32_t min_minor;   /* lowest minor that the host can use */
  uint32_t max_minor;   /* highest */
  uint32_t reserved;    /* 0 */
  stg_string host_name; /* lifetime: the call; for messages */
} stg_probe_request;
STG_ASSERT_SIZE(stg_probe_request, 32);

/* What the plugin answers. Fixed for ever, across all majors. The host sets `text` and `text_capacity_bytes`; the plugin the rest. */
typedef struct stg_probe_reply {
  uint32_t abi_major;
  uint32_t min_minor;
  uint32_t max_minor;
  uint32_t minor;     /* the one chosen: the highest that both know; 0 if refused */
  const void *plugin; /* accepted: a const stg_plugin * of that major and minor; lifetime: the process; refused: null */
  char *text;         /* lifetime: the call; the host's buffer for a refusal in words, NUL-terminated, cut to fit; may be null */
  uint64_t text_capacity_bytes;
  uint64_t text_size_bytes; /* what the whole text needs, with its NUL; 0 if accepted */
} stg_probe_reply;
STG_ASSERT_SIZE(stg_probe_reply, 48);

/* The one exported symbol. Allocates nothing and starts nothing; may be called any number of times. `reply` is the
 * caller's memory. [any] */
typedef uint32_t (*stg_plugin_probe_fn)(const stg_probe_request *request, stg_probe_reply *reply);
#define STG_PLUGIN_PROBE_SYMBOL "stg_plugin_probe"

#if defined(__GNUC__)
#define STG_EXPORT __attribute__((visibility("default")))
#else
#define STG_EXPORT
#endif

/* The ELF note: owner "Stratagem", type 1, description: JSON text, filled up with one to four NULs to a multiple of 4 bytes (a reader
 * cuts at the first). Keys: "name", "version", "abi": {"major", "min_minor",
 * "max_minor"}, "strategies": [names], "models": [names], and what it was built with, where it links them: "libtorch", "cuda", "nccl"
 * (version texts). Read from the file's PT_NOTE segments, without running anything. */
#define STG_NOTE_OWNER "Stratagem"
#define STG_NOTE_TYPE 1u
#define STG_NOTE_SECTION ".note.stratagem"

/* Puts the note into the plugin: STG_PLUGIN_NOTE("{\"name\": \"mine\", ...}") once, at file scope, with a string literal. */
#define STG_PLUGIN_NOTE(json)                                                                             \
  typedef struct stg_note_ {                                                                              \
    uint32_t owner_size_bytes;                                                                            \
    uint32_t description_size_bytes;                                                                      \
    uint32_t type;                                                                                        \
    char owner[12];                                                                                       \
    char description[(sizeof(json) + 3) / 4 * 4];                                                         \
  } stg_note_;                                                                                            \
  static const stg_note_ stg_note_value_ __attribute__((section(STG_NOTE_SECTION), used, aligned(4))) = { \
      sizeof(STG_NOTE_OWNER), (sizeof(json) + 3) / 4 * 4, STG_NOTE_TYPE, STG_NOTE_OWNER, json}

STG_EXTERN_C_END
#endif
