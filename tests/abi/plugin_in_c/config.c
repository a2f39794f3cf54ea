/* SPDX-License-Identifier: Apache-2.0
 *
 * The config of create: one JSON object. A reader for just the keys that this strategy knows, strict in what JSON is; a key that it
 * doesn't know is an error, because an option that is silently ignored is worse than one that is refused.
 *
 * A plugin that has a JSON library at hand uses that; here there is only the C library.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sequential.h"

#define MAX_DEPTH 32
#define MAX_KEY_BYTES 64

typedef struct reader {
  const char* at;
  const char* begin;
  const char* end;
  uint32_t depth;
  stg_error* error; /* the first one; then nothing more is read */
} reader;

static int fail(reader* in, const char* pointer, const char* wanted) {
  if (in->error == NULL) {
    in->error = seq_error(STG_INVALID_ARGUMENT, "config%s%s: %s (at byte %" PRIu64 ")", *pointer == 0 ? "" : " at ", pointer,
                          wanted, (uint64_t)(in->at - in->begin));
  }
  return 0;
}

/* ---- tokens ---- */

/* The next character that is not white space, not taken; 0 at the end. */
static char peek(reader* in) {
  while (in->at < in->end && (*in->at == ' ' || *in->at == '\t' || *in->at == '\n' || *in->at == '\r')) ++in->at;
  return in->at < in->end ? *in->at : 0;
}

static int accept(reader* in, char wanted) {
  if (peek(in) != wanted || in->at == in->end) return 0;
  ++in->at;
  return 1;
}

static int read_word(reader* in, const char* word) {
  const uint64_t size_bytes = strlen(word);
  peek(in);
  if ((uint64_t)(in->end - in->at) < size_bytes || memcmp(in->at, word, size_bytes) != 0) return 0;
  in->at += size_bytes;
  return 1;
}

/* A string, cut at the capacity. \u escapes become '?': no key or name known here has one. */
static int read_string(reader* in, const char* pointer, char* text, uint64_t capacity_bytes) {
  static const char escapes[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
  uint64_t used = 0;
  if (!accept(in, '"')) return fail(in, pointer, "expected a string");
  while (in->at < in->end && *in->at != '"') {
    char c = *in->at++;
    if ((unsigned char)c < 0x20) return fail(in, pointer, "a control character in a string; write it as \\u00xx");
    if (c == '\\') {
      const char escape = in->at < in->end ? *in->at++ : 0;
      const char* found = escape == 0 ? NULL : strchr(escapes, escape);
      for (int digit = 0; escape == 'u' && digit < 4; ++digit) {
        if (in->at == in->end || *in->at == 0 || strchr("0123456789abcdefABCDEF", *in->at) == NULL) {
          return fail(in, pointer, "\\u needs four hexadecimal digits");
        }
        ++in->at;
      }
      if (found == NULL && escape != 'u') return fail(in, pointer, "an unknown escape in a string");
      c = '?';
      if (found != NULL) c = meanings[found - escapes];
    }
    if (used + 1 < capacity_bytes) text[used++] = c;
  }
  if (in->at == in->end) return fail(in, pointer, "a string without its closing quote");
  ++in->at;
  if (capacity_bytes > 0) text[used] = 0;
  return 1;
}

static const char* skip_digits(const char* at, const char* end) {
  while (at < end && *at >= '0' && *at <= '9') ++at;
  return at;
}

/* A number as JSON writes it; strtod alone would also take hexadecimal, "inf" and a leading "+". */
static int read_number(reader* in, const char* pointer, double* out) {
  char text[64];
  peek(in);
  const char *begin = in->at, *at = begin;
  if (at < in->end && *at == '-') ++at;
  const char* digits = at;
  at = skip_digits(at, in->end);
  int is_good = at > digits && (*digits != '0' || at == digits + 1);
  if (is_good && at < in->end && *at == '.') {
    const char* fraction = ++at;
    at = skip_digits(at, in->end);
    is_good = at > fraction;
  }
  if (is_good && at < in->end && (*at == 'e' || *at == 'E')) {
    ++at;
    if (at < in->end && (*at == '+' || *at == '-')) ++at;
    const char* exponent = at;
    at = skip_digits(at, in->end);
    is_good = at > exponent;
  }
  if (!is_good || (uint64_t)(at - begin) >= sizeof text) return fail(in, pointer, "expected a number");
  memcpy(text, begin, (uint64_t)(at - begin));
  text[at - begin] = 0;
  *out = strtod(text, NULL);
  in->at = at;
  return isfinite(*out) ? 1 : fail(in, pointer, "the number is too large");
}

static int read_index(reader* in, const char* pointer, double max, double* out) {
  if (!read_number(in, pointer, out)) return 0;
  return *out >= 0 && *out <= max && *out == floor(*out) ? 1 : fail(in, pointer, "expected a whole number in range");
}

/* ---- structures ---- */

typedef int (*entry_reader)(reader* in, const char* key, seq_config* config);

/* Reads {...}, one entry by `read_entry`, which takes the value. */
static int read_object(reader* in, const char* pointer, entry_reader read_entry, seq_config* config) {
  char seen[16][MAX_KEY_BYTES];
  uint32_t num_seen = 0;
  if (!accept(in, '{')) return fail(in, pointer, "expected an object");
  if (++in->depth > MAX_DEPTH) return fail(in, pointer, "nested too deeply");
  for (int is_first = 1; !accept(in, '}'); is_first = 0) {
    char key[MAX_KEY_BYTES];
    if (!is_first && !accept(in, ',')) return fail(in, pointer, "expected ',' or '}'");
    if (!read_string(in, pointer, key, sizeof key)) return 0;
    for (uint32_t i = 0; i < num_seen; ++i) {
      if (strcmp(seen[i], key) == 0) return fail(in, pointer, "the same key twice");
    }
    if (num_seen == 16) return fail(in, pointer, "more keys than there are known ones");
    memcpy(seen[num_seen++], key, sizeof key);
    if (!accept(in, ':')) return fail(in, pointer, "expected ':'");
    if (!read_entry(in, key, config)) return fail(in, pointer, "this value is not understood");
  }
  --in->depth;
  return 1;
}

static int unknown_key(reader* in, const char* where, const char* key, const char* known) {
  if (in->error == NULL) {
    in->error = seq_error(STG_INVALID_ARGUMENT, "config at %s/%s: unknown key; known here: %s", where, key, known);
  }
  return 0;
}

static int read_option(reader* in, const char* key, seq_config* config) {
  (void)config;
  return unknown_key(in, "/options", key, "none");
}

static int read_optimizer(reader* in, const char* key, seq_config* config) {
  char name[MAX_KEY_BYTES];
  double value;
  (void)config;
  if (strcmp(key, "name") == 0) {
    if (!read_string(in, "/optimizer/name", name, sizeof name)) return 0;
    return strcmp(name, "sgd") == 0 ? 1 : fail(in, "/optimizer/name", "this strategy has \"sgd\" only");
  }
  /* The learning rate comes with each update. */
  if (strcmp(key, "lr") == 0) return read_number(in, "/optimizer/lr", &value);
  if (strcmp(key, "momentum") == 0 || strcmp(key, "weight_decay") == 0) {
    if (!read_number(in, "/optimizer", &value)) return 0;
    return value == 0 ? 1 : fail(in, "/optimizer", "momentum and weight_decay can only be 0: plain SGD");
  }
  return unknown_key(in, "/optimizer", key, "name, lr, momentum, weight_decay");
}

static int set_num_devices(reader* in, uint64_t num_devices, seq_config* config) {
  config->devices = calloc(num_devices, sizeof *config->devices);
  if (config->devices == NULL) {
    in->error = seq_out_of_memory();
    return 0;
  }
  config->num_devices = num_devices;
  for (uint64_t i = 0; i < num_devices; ++i) config->devices[i] = (int32_t)i;
  return 1;
}

static int read_devices(reader* in, seq_config* config) {
  double number;
  char text[MAX_KEY_BYTES];
  if (peek(in) == '"') {
    if (!read_string(in, "/devices", text, sizeof text)) return 0;
    if (strcmp(text, "auto") != 0) return fail(in, "/devices", "expected a count, \"auto\", or a list of indices");
    return set_num_devices(in, 1, config);
  }
  if (!accept(in, '[')) {
    if (!read_index(in, "/devices", SEQ_MAX_DEVICES, &number)) return 0;
    if (number < 1) return fail(in, "/devices", "at least one device is needed");
    return set_num_devices(in, (uint64_t)number, config);
  }
  if (!set_num_devices(in, SEQ_MAX_DEVICES, config)) return 0;
  uint64_t num_devices = 0;
  do {
    if (num_devices == SEQ_MAX_DEVICES) return fail(in, "/devices", "more than 256 devices");
    if (!read_index(in, "/devices", SEQ_MAX_DEVICES - 1, &number)) return 0;
    for (uint64_t i = 0; i < num_devices; ++i) {
      if (config->devices[i] == (int32_t)number) return fail(in, "/devices", "the same device twice");
    }
    config->devices[num_devices++] = (int32_t)number;
  } while (accept(in, ','));
  config->num_devices = num_devices;
  return accept(in, ']') ? 1 : fail(in, "/devices", "expected ',' or ']'");
}

static int read_text_of(reader* in, const char* pointer, const char* one, const char* other, const char* wanted) {
  char text[MAX_KEY_BYTES];
  if (!read_string(in, pointer, text, sizeof text)) return 0;
  return strcmp(text, one) == 0 || strcmp(text, other) == 0 ? 1 : fail(in, pointer, wanted);
}

static int read_key(reader* in, const char* key, seq_config* config) {
  double number;
  if (strcmp(key, "devices") == 0) return read_devices(in, config);
  if (strcmp(key, "accelerator") == 0) {
    return read_text_of(in, "/accelerator", "cpu", "auto", "this strategy runs on \"cpu\" (or \"auto\") only");
  }
  if (strcmp(key, "precision") == 0) {
    return read_text_of(in, "/precision", "32-true", "32-true", "this strategy has \"32-true\" only");
  }
  if (strcmp(key, "seed") == 0) {
    if (!read_index(in, "/seed", 9007199254740992.0, &number)) return 0;
    config->seed = (uint64_t)number;
    return 1;
  }
  if (strcmp(key, "threads") == 0) return read_index(in, "/threads", 1024, &number); /* one is used whatever it says */
  if (strcmp(key, "deterministic") == 0) return read_word(in, "true") || read_word(in, "false"); /* it always is */
  if (strcmp(key, "options") == 0) return read_object(in, "/options", read_option, config);
  if (strcmp(key, "optimizer") == 0) {
    config->has_optimizer = 1;
    return read_object(in, "/optimizer", read_optimizer, config);
  }
  return unknown_key(in, "", key, "accelerator, devices, precision, optimizer, seed, deterministic, threads, options");
}

stg_error* seq_read_config(stg_string json, seq_config* out) {
  reader in = {json.data, json.data, json.data, 0, NULL};
  if (json.data != NULL) in.end += json.size_bytes;
  memset(out, 0, sizeof *out);
  if (json.size_bytes > 0 && json.data == NULL) return seq_error(STG_INVALID_ARGUMENT, "config_json has a size but no text");
  if (json.size_bytes > 0 && read_object(&in, "", read_key, out)) {
    peek(&in);
    if (in.at != in.end) fail(&in, "", "text after the object");
  }
  if (in.error == NULL && out->devices == NULL) set_num_devices(&in, 1, out);
  if (in.error != NULL) {
    free(out->devices);
    out->devices = NULL;
  }
  return in.error;
}
