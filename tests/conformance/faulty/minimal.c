/* SPDX-License-Identifier: Apache-2.0
 *
 * The smallest plugin there is, without a strategy: what the faults of a file are built from, one file each.
 */
#include <stratagem/plugin.h>

#ifndef NOTE
#define NOTE                                                                                                      \
  "{\"name\": \"minimal\", \"version\": \"1.0.0\", \"abi\": {\"major\": 1, \"min_minor\": 0, \"max_minor\": 0}, " \
  "\"strategies\": [], "                                                                                          \
  "\"models\": []}"
#endif
STG_PLUGIN_NOTE(NOTE);

#define TEXT(literal) \
  { literal, sizeof(literal) - 1 }
static const stg_plugin plugin = {sizeof plugin, TEXT("minimal"), TEXT("1.0.0"), 0, 0, 0, 0, 0};

#ifdef SECOND_SYMBOL
STG_EXPORT int another_symbol(void);
int another_symbol(void) { return 1; }
#endif
#ifdef UNIQUE_SYMBOL
__asm__(
    ".pushsection .data\n.globl shared_by_all\n.type shared_by_all, @gnu_unique_object\n.size shared_by_all, 8\n"
    "shared_by_all: .quad 0\n.popsection");
#endif
#ifdef TEXT_RELOCATION
__asm__(".pushsection .text\n.quad stg_plugin_probe\n.popsection");
#endif
#ifdef WRITABLE_CODE
__asm__(".pushsection .writable_code, \"awx\", @progbits\n.quad 0\n.popsection");
#endif
#ifdef NEEDS_C10
int c10_function(void);
#endif

STG_EXPORT uint32_t stg_plugin_probe(const stg_probe_request* request, stg_probe_reply* reply);
uint32_t stg_plugin_probe(const stg_probe_request* request, stg_probe_reply* reply) {
  if (request == 0 || reply == 0 || request->abi_major != STG_ABI_MAJOR) return STG_PROBE_BAD_ARGUMENT;
  reply->abi_major = STG_ABI_MAJOR;
  reply->min_minor = reply->max_minor = reply->minor = STG_ABI_MINOR;
  reply->plugin = &plugin;
  reply->text_size_bytes = 0;
#ifdef NEEDS_C10
  if (c10_function() != 0) return STG_PROBE_REFUSED;
#endif
  return STG_PROBE_ACCEPTED;
}
