/* SPDX-License-Identifier: Apache-2.0
 *
 * The way in: the probe with every kind of request, the ELF note, the tables.
 */
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rules.h"

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

/* ---- the note ---- */

static char* read_file(const char* path, uint64_t* size_bytes) {
  FILE* file = fopen(path, "rb");
  if (file == NULL || fseek(file, 0, SEEK_END) != 0) return NULL;
  *size_bytes = (uint64_t)ftell(file);
  rewind(file);
  char* content = malloc(*size_bytes);
  if (content != NULL && fread(content, 1, *size_bytes, file) != *size_bytes) *size_bytes = 0;
  fclose(file);
  return content;
}

/* The note's JSON without its white space, in `text`; 0 if the file has none. */
static int find_note(const char* file, uint64_t size_bytes, char* text, uint64_t capacity_bytes) {
  const Elf64_Ehdr* header = (const void*)file;
  for (int i = 0; size_bytes > sizeof *header && i < header->e_phnum; ++i) {
    const Elf64_Phdr* segment = (const void*)(file + header->e_phoff + (uint64_t)i * header->e_phentsize);
    if (segment->p_type != PT_NOTE) continue;
    for (uint64_t at = segment->p_offset, end = at + segment->p_filesz; at + sizeof(Elf64_Nhdr) < end;) {
      const Elf64_Nhdr* note = (const void*)(file + at);
      const char* owner = (const char*)(note + 1);
      const char* description = owner + (note->n_namesz + 3) / 4 * 4;
      at = (uint64_t)(description - file) + (note->n_descsz + 3) / 4 * 4;
      if (note->n_namesz != sizeof STG_NOTE_OWNER || memcmp(owner, STG_NOTE_OWNER, note->n_namesz) != 0) continue;
      uint64_t used = 0;
      for (uint32_t k = 0; k < note->n_descsz && description[k] != 0 && used + 1 < capacity_bytes; ++k) {
        if (strchr(" \t\n\r", description[k]) == NULL) text[used++] = description[k];
      }
      text[used] = 0;
      return note->n_type == STG_NOTE_TYPE && at <= end;
    }
  }
  return 0;
}

static void check_note_has(const char* note, const char* key, const char* value) {
  char part[256];
  snprintf(part, sizeof part, "\"%s\":%s", key, value);
  CHECK_THAT(strstr(note, part) != NULL, "the note says %s: %s", part, note);
}

static void the_note_agrees_with_the_probe(void) {
  static char note[65536];
  char value[128];
  uint64_t size_bytes = 0;
  char* file = read_file(the_host.path, &size_bytes);
  if (!CHECK(file != NULL) || !CHECK(find_note(file, size_bytes, note, sizeof note))) return;
  const answer got = ask(STG_ABI_MAJOR, 0, 1000, 512);
  snprintf(value, sizeof value, "\"%.*s\"", (int)the_host.plugin->name.size_bytes, the_host.plugin->name.data);
  check_note_has(note, "name", value);
  snprintf(value, sizeof value, "\"%.*s\"", (int)the_host.plugin->version.size_bytes, the_host.plugin->version.data);
  check_note_has(note, "version", value);
  snprintf(value, sizeof value, "%u", got.reply.abi_major);
  check_note_has(note, "major", value);
  snprintf(value, sizeof value, "%u", got.reply.min_minor);
  check_note_has(note, "min_minor", value);
  snprintf(value, sizeof value, "%u", got.reply.max_minor);
  check_note_has(note, "max_minor", value);
  for (uint64_t i = 0; i < the_host.plugin->num_strategies; ++i) {
    const stg_string name = the_host.plugin->strategies[i]->name;
    snprintf(value, sizeof value, "\"%.*s\"", (int)name.size_bytes, name.data);
    CHECK(strstr(note, value) != NULL);
  }
  free(file);
}

static void tables_are_whole(void) {
  const stg_plugin* plugin = the_host.plugin;
  const stg_string unknown = {"stratagem.nothing/1", 19};
  CHECK(plugin->name.size_bytes > 0 && plugin->version.size_bytes > 0);
  CHECK(plugin->get_extension == NULL || plugin->get_extension(unknown) == NULL);
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

const test probe_tests[] = {
    {"the probe accepts a range that meets the plugin's and chooses the highest minor", matching_minors_are_accepted},
    {"another major or minor is refused in words that name both sides", other_versions_are_refused_in_words},
    {"a refusal is cut to the buffer, ends in NUL, and tells the size it needs", refusals_are_cut_to_fit},
    {"null and impossible requests are not accepted", bad_requests_are_told_apart},
    {"several threads may probe at once", any_thread_may_probe},
    {"the ELF note is well formed and agrees with the probe and the table", the_note_agrees_with_the_probe},
    {"the tables are whole", tables_are_whole},
};
const uint64_t num_probe_tests = sizeof probe_tests / sizeof *probe_tests;
