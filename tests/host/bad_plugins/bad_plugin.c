/* SPDX-License-Identifier: Apache-2.0
 *
 * Plugins that are wrong in one way each, chosen by FAULT when this is compiled. What the host must say about each is in
 * loading_test.cpp.
 */
#include <stratagem/plugin.h>
#include <string.h>

#define FAULT_NO_NOTE 1
#define FAULT_OTHER_MAJOR 2
#define FAULT_NEWER_MINOR 3
#define FAULT_NO_PROBE 4
#define FAULT_NULL_TABLE 5
#define FAULT_SMALL_TABLE 6
#define FAULT_HUGE_TABLE 7
#define FAULT_OTHER_NAME 8
#define FAULT_OTHER_FACTORIES 9
#define FAULT_REFUSES 10
#define FAULT_PROBE_DISAGREES 11
#define FAULT_NULL_FACTORY 12
#define FAULT_OTHER_LIBTORCH 13
#define FAULT_ODD_ANSWER 14
#define FAULT_NONE 15
#define FAULT_MISSING_DEPENDENCY 16
#define FAULT_NONE_WITH_DEPENDENCY 17
#define FAULT_SCHEMA 18
#define FAULT_PROBE_OTHER_MAJOR 19
#define FAULT_PROBE_CHOOSES_NEWER 20
#define FAULT_NULL_SLOTS 21

#if FAULT == FAULT_OTHER_MAJOR
#define ABI "{\"major\": 2, \"min_minor\": 3, \"max_minor\": 5}"
#elif FAULT == FAULT_NEWER_MINOR
#define ABI "{\"major\": 1, \"min_minor\": 7, \"max_minor\": 9}"
#else
#define ABI "{\"major\": 1, \"min_minor\": 0, \"max_minor\": 0}"
#endif

#if FAULT == FAULT_OTHER_LIBTORCH
#define BUILT_WITH ", \"libtorch\": \"1.13.1\""
#else
#define BUILT_WITH ""
#endif

#if FAULT != FAULT_NO_NOTE
STG_PLUGIN_NOTE("{\"name\": \"bad\", \"version\": \"1.0.0\", \"abi\": " ABI
                ", \"strategies\": [\"bad\"], \"models\": []" BUILT_WITH "}");
#endif

#if FAULT != FAULT_NO_PROBE

#if FAULT == FAULT_NULL_SLOTS
/* It can be made and destroyed, and has no function besides. */
static stg_error *create(const stg_create_args *args, stg_strategy **out) {
  (void)args;
  *out = (void *)out;
  return NULL;
}
static void destroy(stg_strategy *self) { (void)self; }
static stg_strategy_api api = {.struct_size = sizeof(stg_strategy_api), .create = create, .destroy = destroy};
#else
static stg_strategy_api api = {.struct_size = sizeof(stg_strategy_api)};
#endif
static const uint32_t kinds[] = {STG_DEVICE_CPU};

static stg_string text(const char *s) { return (stg_string){s, strlen(s)}; }

static const stg_plugin *table(void) {
  static stg_strategy_factory factory;
  static const stg_strategy_factory *factories[1];
  static stg_plugin plugin;
  factory = (stg_strategy_factory){sizeof factory,
                                   text("bad"),
                                   text("wrong in one way"),
                                   text(FAULT == FAULT_SCHEMA ? "{\"type\": 5}" : ""),
                                   kinds,
                                   1,
                                   0,
                                   &api};
  factories[0] = FAULT == FAULT_NULL_FACTORY ? NULL : &factory;
  plugin = (stg_plugin){sizeof plugin, text("bad"), text("1.0.0"), factories, 1, NULL, 0, NULL};
  if (FAULT == FAULT_SMALL_TABLE) plugin.struct_size = 40;
  if (FAULT == FAULT_HUGE_TABLE) plugin.struct_size = 0xdeadbeef00000000u;
  if (FAULT == FAULT_OTHER_NAME) plugin.name = text("good");
  if (FAULT == FAULT_OTHER_FACTORIES) plugin.num_strategies = 0;
  return FAULT == FAULT_NULL_TABLE ? NULL : &plugin;
}

STG_EXPORT uint32_t stg_plugin_probe(const stg_probe_request *request, stg_probe_reply *reply) {
  static const char refusal[] = "wants a host that was made on a Tuesday";
  (void)request;
  reply->abi_major = FAULT == FAULT_PROBE_OTHER_MAJOR ? 2 : 1;
  reply->min_minor = 0;
  reply->max_minor = FAULT == FAULT_PROBE_DISAGREES ? 4 : 0;
  reply->minor = FAULT == FAULT_PROBE_CHOOSES_NEWER ? 3 : 0;
  reply->plugin = table();
  reply->text_size_bytes = 0;
  if (FAULT == FAULT_ODD_ANSWER) return 77;
  if (FAULT != FAULT_REFUSES) return STG_PROBE_ACCEPTED;
  reply->plugin = NULL;
  reply->text_size_bytes = sizeof refusal;
  strncpy(reply->text, refusal, reply->text_capacity_bytes - 1);
  return STG_PROBE_REFUSED;
}
#endif /* FAULT_NO_PROBE */

#if FAULT == FAULT_MISSING_DEPENDENCY || FAULT == FAULT_NONE_WITH_DEPENDENCY
extern int dependency(void);
int use_dependency(void);
int use_dependency(void) { return dependency(); }
#endif
