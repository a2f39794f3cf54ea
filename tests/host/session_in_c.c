/* SPDX-License-Identifier: Apache-2.0
 *
 * libstratagem from plain C: the header is C, the library needs nothing else, errors say what is wrong, and a run goes through. The
 * arguments: the folder that paths of the config are relative to; and "fit", to train on x.npy in it.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <stratagem/session.h>
#include <string.h>

#define REQUIRE(condition)                                                     \
  do {                                                                         \
    if (!(condition)) {                                                        \
      fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                 \
    }                                                                          \
  } while (0)

static stg_string text(const char *s) {
  stg_string out = {s, strlen(s)};
  return out;
}

static int holds(const char *data, uint64_t size_bytes, const char *part) {
  char *copy = calloc(size_bytes + 1, 1);
  int found;
  REQUIRE(copy != NULL);
  memcpy(copy, data, size_bytes);
  found = strstr(copy, part) != NULL;
  free(copy);
  return found;
}

static void require_error(stg_error *error, uint32_t code, const char *part) {
  REQUIRE(error != NULL);
  REQUIRE(error->code == code);
  REQUIRE(holds(error->message.data, error->message.size_bytes, part));
  error->release(error);
}

static void require_text(stg_error *error, stg_tree *tree, const char *part) {
  if (error != NULL) fprintf(stderr, "%.*s\n", (int)error->message.size_bytes, error->message.data);
  REQUIRE(error == NULL);
  REQUIRE(tree->root.type == STG_STRING);
  REQUIRE(holds(tree->root.as.utf8, tree->root.count, part));
  tree->release(tree);
}

static stg_error *count_progress(void *self, const stg_progress *progress) {
  REQUIRE(progress->struct_size >= STG_PROGRESS_MIN_SIZE);
  ++*(int *)self;
  return NULL;
}

static stg_session_args arguments(const char *config, const char *folder) {
  stg_session_args args;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.config_text = text(config);
  args.config_folder = text(folder);
  args.stage = STG_STAGE_FIT;
  return args;
}

/* On another thread than the one that opened the session. */
static void *run(void *given) {
  const stg_session session = *(stg_session *)given;
  stg_tree result;
  require_text(stg_session_run(session, &result), &result, "\"steps\":3");
  require_error(stg_session_run(session, &result), STG_FAILED_PRECONDITION, "this session has run");
  stg_session_close(session);
  return NULL;
}

static void fit(const char *folder) {
  const char *config =
      "{\"strategy\": {\"name\": \"single_device\", \"accelerator\": \"cpu\"}, \"model\": {\"kind\": \"library\", \"name\": "
      "\"toy\"},"
      " \"optimizer\": {\"name\": \"sgd\", \"lr\": 1}, \"data\": {\"train\": {\"format\": \"npy\", \"inputs\": \"x.npy\"}}}";
  stg_session_args args = arguments(config, folder);
  stg_session_events events;
  stg_session session = 0;
  pthread_t thread;
  int num_progress = 0;
  memset(&events, 0, sizeof events);
  events.struct_size = sizeof events;
  events.self = &num_progress;
  events.progress = count_progress;
  args.events = &events;
  REQUIRE(stg_session_open(&args, &session) == NULL);
  REQUIRE(pthread_create(&thread, NULL, run, &session) == 0);
  REQUIRE(pthread_join(thread, NULL) == 0);
  REQUIRE(num_progress == 3);
}

int main(int argc, char **argv) {
  stg_tree tree;
  stg_session session = 0;
  stg_session_args args;
  REQUIRE(argc >= 2);
  REQUIRE(stg_version().size_bytes > 0);
  require_text(stg_config_schema(&tree), &tree, "Stratagem config");
  require_text(stg_list_plugins(text(""), &tree), &tree, "\"plugins\"");
  require_text(stg_doctor(text(""), &tree), &tree, "\"schema_version\":1");
  require_error(stg_doctor(text("/nowhere.json"), &tree), STG_NOT_FOUND, "/nowhere.json");
  require_error(stg_inspect_plugin(text("/nowhere.so"), &tree), STG_NOT_FOUND, "/nowhere.so");
  require_error(stg_config_schema(NULL), STG_INVALID_ARGUMENT, "result is null");

  require_error(stg_session_open(NULL, &session), STG_INVALID_ARGUMENT, "args is null");
  args = arguments("{\"sede\": 1}", argv[1]);
  require_error(stg_session_open(&args, &session), STG_INVALID_ARGUMENT, "/sede: unknown key");
  args.stage = 9;
  require_error(stg_session_open(&args, &session), STG_INVALID_ARGUMENT, "stage is 9");
  args.struct_size = 8;
  require_error(stg_session_open(&args, &session), STG_INVALID_ARGUMENT, "struct_size is 8");
  args = arguments("{}", "here");
  require_error(stg_session_open(&args, &session), STG_INVALID_ARGUMENT, "config_folder is \"here\"; it must be absolute");
  args = arguments("{}", "");
  require_error(stg_session_open(&args, &session), STG_INVALID_ARGUMENT, "config_folder is \"\"; it must be absolute");
  args.config_path = text("/nowhere.json");
  require_error(stg_session_open(&args, &session), STG_INVALID_ARGUMENT, "config_path and config_text are both given");
  args = arguments("{}", argv[1]);
  args.num_overrides = 1;
  require_error(stg_session_open(&args, &session), STG_INVALID_ARGUMENT, "overrides is null");
  REQUIRE(session == 0);
  stg_session_request_stop(0);
  stg_session_close(0);

  if (argc == 3 && strcmp(argv[2], "fit") == 0) fit(argv[1]);
  return 0;
}
