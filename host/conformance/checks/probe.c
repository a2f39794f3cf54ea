/* SPDX-License-Identifier: Apache-2.0
 *
 * The way in: the probe with every kind of request, the ELF note, the tables.
 */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "conformance/checks/check.h"
#include "conformance/fixture/process.h"

#define CANARY 0x5a

typedef struct answer {
  uint32_t code;
  stg_probe_reply reply;
  char text[600];
} answer;

static answer ask(uint32_t major, uint32_t min_minor, uint32_t max_minor, uint64_t capacity_bytes) {
  answer got;
  const stg_probe_request request = {major, min_minor, max_minor, 0, {"rules host", 10}};
  memset(&got, 0, sizeof got);
  memset(got.text, CANARY, sizeof got.text);
  got.reply.text = got.text;
  got.reply.text_capacity_bytes = capacity_bytes;
  got.code = the_host.probe(&request, &got.reply);
  got.reply.text = NULL; /* `got` is about to move */
  return got;
}

static void matching_minors_are_accepted(void) {
  const answer exact = ask(STG_ABI_MAJOR, STG_ABI_MINOR, STG_ABI_MINOR, 512), wide = ask(STG_ABI_MAJOR, 0, 1000, 512);
  CHECK(exact.code == STG_PROBE_ACCEPTED && exact.reply.plugin == the_host.plugin && exact.reply.text_size_bytes == 0);
  CHECK(exact.reply.abi_major == STG_ABI_MAJOR && exact.reply.minor == STG_ABI_MINOR);
  CHECK(wide.code == STG_PROBE_ACCEPTED && wide.reply.plugin != NULL);
  CHECK_THAT(wide.reply.minor == wide.reply.max_minor, "the highest that both know is chosen: %u of %u to %u", wide.reply.minor,
             wide.reply.min_minor, wide.reply.max_minor);
}

static void check_refused(const answer* got, const char* part) {
  CHECK(got->code == STG_PROBE_REFUSED && got->reply.plugin == NULL && got->reply.minor == 0);
  CHECK(got->reply.abi_major == STG_ABI_MAJOR);
  CHECK(got->reply.text_size_bytes == strlen(got->text) + 1);
  CHECK_THAT(strstr(got->text, part) != NULL, "the refusal names %s: %s", part, got->text);
}

static void other_versions_are_refused_in_words(void) {
  const answer major = ask(7, 0, 3, 512), low = ask(0, 0, 0, 512), minor = ask(STG_ABI_MAJOR, 900, 901, 512);
  check_refused(&major, "7.");
  check_refused(&low, "0.");
  check_refused(&minor, "900");
  check_refused(&major, "1."); /* both sides */
}

static void refusals_are_cut_to_fit(void) {
  const answer whole = ask(7, 0, 0, 512);
  for (uint64_t capacity = 1; capacity <= 40; ++capacity) {
    const answer cut = ask(7, 0, 0, capacity);
    CHECK(cut.code == STG_PROBE_REFUSED && cut.reply.text_size_bytes == whole.reply.text_size_bytes);
    CHECK(strlen(cut.text) == capacity - 1 && memcmp(cut.text, whole.text, capacity - 1) == 0);
    CHECK_THAT(cut.text[capacity] == CANARY, "nothing is written past %d bytes", (int)capacity);
  }
  const stg_probe_request request = {7, 0, 0, 0, {NULL, 0}};
  stg_probe_reply reply;
  memset(&reply, 0, sizeof reply);
  CHECK(the_host.probe(&request, &reply) == STG_PROBE_REFUSED && reply.text_size_bytes > 1); /* no buffer at all */
}

static void bad_requests_are_told_apart(void) {
  const stg_probe_request request = {STG_ABI_MAJOR, 0, STG_ABI_MINOR, 0, {NULL, 0}};
  stg_probe_reply reply;
  memset(&reply, 0, sizeof reply);
  CHECK(the_host.probe(NULL, &reply) == STG_PROBE_BAD_ARGUMENT);
  CHECK(the_host.probe(&request, NULL) == STG_PROBE_BAD_ARGUMENT);
  CHECK(ask(STG_ABI_MAJOR, 3, 1, 512).code != STG_PROBE_ACCEPTED);
}

static void* probe_often(void* failures) {
  for (int i = 0; i < 500; ++i) {
    if (ask(STG_ABI_MAJOR, 0, STG_ABI_MINOR, 512).code != STG_PROBE_ACCEPTED) ++*(int*)failures;
    if (ask(9, 0, 0, 512).code != STG_PROBE_REFUSED) ++*(int*)failures;
  }
  return NULL;
}

static void any_thread_may_probe(void) {
  pthread_t threads[4];
  int failures[4] = {0};
  for (int i = 0; i < 4; ++i) pthread_create(&threads[i], NULL, probe_often, &failures[i]);
  for (int i = 0; i < 4; ++i) {
    pthread_join(threads[i], NULL);
    CHECK(failures[i] == 0);
  }
}

static void tables_are_whole(void) {
  const stg_plugin* plugin = the_host.plugin;
  CHECK(plugin->name.size_bytes > 0 && plugin->version.size_bytes > 0);
  for (uint64_t i = 0; i < plugin->num_strategies; ++i) {
    const stg_strategy_factory* factory = plugin->strategies[i];
    CHECK(factory->struct_size >= STG_STRATEGY_FACTORY_MIN_SIZE && factory->struct_size <= STG_MAX_STRUCT_SIZE_BYTES);
    CHECK(factory->summary.size_bytes > 0 && memchr(factory->summary.data, '\n', factory->summary.size_bytes) == NULL);
    CHECK(factory->options_schema.size_bytes > 1 && factory->options_schema.data[0] == '{');
    CHECK(factory->num_device_kinds > 0 && factory->device_kinds != NULL && factory->api != NULL);
    CHECK(factory->api->struct_size >= STG_STRATEGY_API_MIN_SIZE && factory->api->create != NULL &&
          factory->api->destroy != NULL);
  }
}

/* ---- what it keeps to itself ---- */

static void probing_keeps_nothing(void) {
  for (int i = 0; i < 100; ++i) ask(1, 0, 0, 512);
  const int64_t before = allocated_bytes();
  for (int i = 0; i < 10000; ++i) ask(i % 2 == 0 ? STG_ABI_MAJOR : 9, 0, 0, 512);
  const int64_t grown = allocated_bytes() - before;
  CHECK_THAT(grown <= 1024, "10000 probes leave %d bytes behind; 1024 are let pass", (int)grown);
}

static void only_the_reply_is_written(void) {
  struct {
    uint64_t before[4];
    stg_probe_reply reply;
    uint64_t behind[4];
  } room;
  for (uint32_t major = 0; major < 3; ++major) {
    char text[64];
    stg_probe_request request = {major, 0, 5, 0, {"a host", 6}};
    const stg_probe_request same = request;
    memset(&room, CANARY, sizeof room); /* garbage in every field but these two */
    room.reply.text = text;
    room.reply.text_capacity_bytes = sizeof text;
    the_host.probe(&request, &room.reply);
    CHECK_THAT(memcmp(&request, &same, sizeof same) == 0, "major %u: the request is as it was", major);
    for (int i = 0; i < 4; ++i)
      CHECK_THAT(room.before[i] == room.behind[i] && room.before[i] == UINT64_C(0x5a5a5a5a5a5a5a5a),
                 "major %u: nothing is written beside the reply", major);
    CHECK_THAT(room.reply.text == text && room.reply.text_capacity_bytes == sizeof text,
               "major %u: the buffer's fields are as they were", major);
    CHECK_THAT(
        room.reply.abi_major == STG_ABI_MAJOR && room.reply.min_minor <= room.reply.max_minor && room.reply.max_minor < 1000,
        "major %u: the reply has all that the plugin speaks: %u.%u to %u", major, room.reply.abi_major, room.reply.min_minor,
        room.reply.max_minor);
    CHECK_THAT((major == STG_ABI_MAJOR) == (room.reply.plugin != NULL), "major %u: a table, or null", major);
  }
}

/* Its last byte is the last of a page, behind which nothing can be read. */
static void the_name_is_read_by_its_size(void) {
  char text[256];
  char* pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (!CHECK(pages != MAP_FAILED) || !CHECK(mprotect(pages + 4096, 4096, PROT_NONE) == 0)) return;
  memset(pages, 'n', 4096);
  for (uint64_t size_bytes = 0; size_bytes <= 4096; size_bytes += 512) {
    const stg_probe_request request = {7, 0, 0, 0, {pages + 4096 - size_bytes, size_bytes}};
    stg_probe_reply reply;
    memset(&reply, 0, sizeof reply);
    reply.text = text;
    reply.text_capacity_bytes = sizeof text;
    CHECK(the_host.probe(&request, &reply) == STG_PROBE_REFUSED);
  }
}

static void unknown_extensions_are_null(void) {
  static char long_id[70000];
  memset(long_id, 'x', sizeof long_id);
  const stg_string ids[] = {{"stratagem.nothing/1", 19}, {"", 0}, {NULL, 0}, {long_id, sizeof long_id}};
  for (size_t i = 0; i < sizeof ids / sizeof *ids; ++i)
    CHECK_THAT(the_host.plugin->get_extension == NULL || the_host.plugin->get_extension(ids[i]) == NULL, "id %u is unknown",
               (unsigned)i);
}

DEFINE_CHECKS(
    probe_checks,
    {"probe-chooses-highest-minor",
     "The probe accepts ABI 1.0, and a host of 1.0 to 1.1000, for which it chooses the highest minor that both know", "A1",
     NEEDS_PLUGIN, matching_minors_are_accepted},
    {"probe-refuses-other-versions", "Majors 0 and 7 and minors 900 to 901 are refused in words that name both sides' versions",
     "A1", NEEDS_LIBRARY, other_versions_are_refused_in_words},
    {"probe-cuts-refusal-to-fit",
     "A refusal is cut to buffers of 1 to 40 bytes, ends in NUL, and tells the size that the whole needs", "A1", NEEDS_LIBRARY,
     refusals_are_cut_to_fit},
    {"probe-tells-bad-arguments", "A null request or reply is answered with 2, and a range of minors 3 to 1 is not accepted",
     "A1", NEEDS_LIBRARY, bad_requests_are_told_apart},
    {"probe-many-threads", "4 threads at once get the right answer to 1000 requests each", "A1", NEEDS_LIBRARY,
     any_thread_may_probe},
    {"tables-whole", "Names, version, summaries of one line, schemas, device kinds and functions of the tables are there", "B3",
     NEEDS_PLUGIN, tables_are_whole},
    {"probe-keeps-nothing", "10000 probes, accepted and refused, leave at most 1024 bytes allocated", "A1", NEEDS_PLUGIN,
     probing_keeps_nothing},
    {"probe-writes-its-reply-only",
     "The request and what lies around the reply stay as they were, and each field of a reply full of garbage is set", "A1",
     NEEDS_LIBRARY, only_the_reply_is_written},
    {"probe-reads-name-by-size",
     "A host's name of 0 to 4096 bytes at the end of readable memory, without a NUL, is read by its size", "D1", NEEDS_LIBRARY,
     the_name_is_read_by_its_size},
    {"unknown-extension-is-null",
     "get_extension is absent, or null for four ids that nobody knows, an empty one and one of 70000 bytes among them", "B3",
     NEEDS_PLUGIN, unknown_extensions_are_null});
