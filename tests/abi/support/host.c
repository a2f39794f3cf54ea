/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading, checking, and small tensors for the C hosts; see host.h.
 */
#include "host.h"

#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

host the_host;
int64_t num_live_tensors, num_live_trees, num_foreign_releases;
const pthread_t* only_releaser;

/* ---- checks ---- */

atomic_int num_failures;
static atomic_int num_checks;

int check_at(const char* file, int line, int is_true, const char* format, ...) {
  ++num_checks;
  if (is_true) return 1;
  ++num_failures;
  va_list arguments;
  va_start(arguments, format);
  printf("  %s:%d: not so: ", file, line);
  vprintf(format, arguments);
  printf("\n");
  va_end(arguments);
  return 0;
}

int run_tests(const test* tests, uint64_t num_tests) {
  int num_failed_tests = 0;
  for (uint64_t i = 0; i < num_tests; ++i) {
    const int before = num_failures;
    num_checks = 0;
    tests[i].run();
    CHECK_THAT(num_checks > 0, "'%s' checked nothing", tests[i].sentence);
    printf("%s  %s\n", num_failures != before ? "FAILED" : "ok    ", tests[i].sentence);
    fflush(stdout);
    num_failed_tests += num_failures != before;
  }
  printf("%d of %d tests failed\n", num_failed_tests, (int)num_tests);
  return num_failed_tests == 0 ? 0 : 1;
}

int succeeds_at(const char* file, int line, stg_error* error, const char* call) {
  if (error == NULL) return check_at(file, line, 1, "%s", call);
  check_at(file, line, 0, "%s succeeds; it gave code %u: %.*s", call, error->code, (int)error->message.size_bytes,
           error->message.data);
  error->release(error);
  return 0;
}

int text_has(stg_string text, const char* part) {
  const uint64_t size_bytes = strlen(part);
  for (uint64_t i = 0; i + size_bytes <= text.size_bytes; ++i) {
    if (memcmp(text.data + i, part, size_bytes) == 0) return 1;
  }
  return 0;
}

int fails_at(const char* file, int line, stg_error* error, uint32_t code, const char* part, const char* call) {
  if (error == NULL) return check_at(file, line, 0, "%s gives code %u; it succeeded", call, code);
  int is_right = check_at(file, line, error->code == code, "%s gives code %u; it gave %u: %.*s", call, code, error->code,
                          (int)error->message.size_bytes, error->message.data);
  is_right &= check_at(file, line, error->message.size_bytes > 0 && error->message.data != NULL, "%s explains itself", call);
  is_right &= check_at(file, line, error->release != NULL, "the error of %s can be released", call);
  if (part != NULL) {
    is_right &= check_at(file, line, text_has(error->message, part), "%s says '%s'; it said: %.*s", call, part,
                         (int)error->message.size_bytes, error->message.data);
  }
  error->release(error);
  return is_right;
}

int is_close(double a, double b, double relative) { return fabs(a - b) <= relative * fmax(1.0, fmax(fabs(a), fabs(b))); }

/* ---- the plugin ---- */

static void refuse(const char* what, const char* detail) {
  fprintf(stderr, "%s: %s\n", what, detail);
  exit(3);
}

void load_plugin(int num_arguments, char** arguments) {
  if (num_arguments != 4) refuse("usage", "PLUGIN.so STRATEGY DEVICES");
  the_host.path = arguments[1];
  the_host.num_devices = strtoull(arguments[3], NULL, 10);
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL); /* never closed */
  if (library == NULL) refuse(arguments[1], dlerror());
  void* symbol = dlsym(library, STG_PLUGIN_PROBE_SYMBOL);
  if (symbol == NULL) refuse(arguments[1], dlerror());
  memcpy(&the_host.probe, &symbol, sizeof symbol); /* C has no cast from an object to a function pointer */

  char text[512] = "";
  const stg_probe_request request = {STG_ABI_MAJOR, 0, STG_ABI_MINOR, 0, {"c host", 6}};
  stg_probe_reply reply;
  memset(&reply, 0, sizeof reply);
  reply.text = text;
  reply.text_capacity_bytes = sizeof text;
  if (the_host.probe(&request, &reply) != STG_PROBE_ACCEPTED) refuse("the plugin refused", text);
  the_host.plugin = reply.plugin;
  if (the_host.plugin == NULL || the_host.plugin->struct_size < STG_PLUGIN_MIN_SIZE)
    refuse(arguments[1], "an accepted probe without a table");
  for (uint64_t i = 0; i < the_host.plugin->num_strategies; ++i) {
    const stg_strategy_factory* factory = the_host.plugin->strategies[i];
    if (factory->name.size_bytes == strlen(arguments[2]) && text_has(factory->name, arguments[2])) the_host.factory = factory;
  }
  if (the_host.factory == NULL) refuse(arguments[2], "the plugin has no strategy of this name");
  the_host.api = the_host.factory->api;
  if (the_host.factory->struct_size < STG_STRATEGY_FACTORY_MIN_SIZE || the_host.api->struct_size < STG_STRATEGY_API_MIN_SIZE) {
    refuse(arguments[2], "a table below the smallest released size");
  }
}

stg_strategy* make_strategy_from(const char* config_json, uint64_t flags, const stg_host* services, stg_error** error) {
  stg_create_args args;
  stg_strategy* made = NULL;
  memset(&args, 0, sizeof args);
  args.struct_size = sizeof args;
  args.config_json.data = config_json;
  args.config_json.size_bytes = strlen(config_json);
  args.flags = flags;
  args.host = services;
  *error = the_host.api->create(&args, &made);
  return made;
}

stg_strategy* make_strategy(int with_optimizer, uint64_t flags, const stg_host* services) {
  char config[256];
  stg_error* error = NULL;
  snprintf(config, sizeof config, "{%s\"devices\": %u, \"accelerator\": \"cpu\"}",
           with_optimizer ? "\"optimizer\": {\"name\": \"sgd\"}, " : "", (unsigned)the_host.num_devices);
  stg_strategy* made = make_strategy_from(config, flags, services, &error);
  return SUCCEEDS(error) ? made : NULL;
}

static void release_nothing(stg_error* self) { (void)self; }

stg_error* save_checkpoint(stg_strategy* strategy, const stg_checkpoint_args* args) {
  static stg_error absent = {STG_UNIMPLEMENTED,
                             STG_ERROR_INSTANCE_USABLE,
                             -1,
                             -1,
                             {STG_DEVICE_NONE, -1},
                             {"save: a null slot", 17},
                             NULL,
                             release_nothing,
                             NULL};
  return the_host.api->save == NULL ? &absent : the_host.api->save(strategy, NULL, args);
}

void destroy_strategy(stg_strategy* strategy) { the_host.api->destroy(strategy); }

/* ---- tensors ---- */

static void watch_releaser(void) {
  const int is_foreign = only_releaser != NULL && !pthread_equal(pthread_self(), *only_releaser);
  if (is_foreign) __atomic_fetch_add(&num_foreign_releases, 1, __ATOMIC_RELAXED);
}

static void release_own_tensor(stg_tensor* self) {
  watch_releaser();
  const int64_t before = __atomic_fetch_sub(&num_live_tensors, 1, __ATOMIC_ACQ_REL);
  if (before <= 0) abort(); /* released more often than made */
  free(self->owner);
}

stg_tensor* new_tensor(uint8_t code, uint8_t bits, int32_t num_dims, const int64_t* shape) {
  int64_t numel = 1;
  for (int32_t dim = 0; dim < num_dims; ++dim) numel *= shape[dim];
  const uint64_t data_bytes = ((uint64_t)numel * (bits / 8u) + 63) / 64 * 64;
  void* block = NULL;
  const uint64_t block_bytes = data_bytes + sizeof(stg_tensor) + (uint64_t)num_dims * 2 * sizeof(int64_t);
  if (posix_memalign(&block, 64, block_bytes) != 0) abort();
  memset(block, 0, block_bytes);
  stg_tensor* tensor = (stg_tensor*)(void*)((char*)block + data_bytes);
  tensor->dlpack_major = STG_DLPACK_MAJOR;
  tensor->owner = block;
  tensor->deleter = release_own_tensor;
  tensor->view.data = block;
  tensor->view.device.kind = STG_DEVICE_CPU;
  tensor->view.num_dims = num_dims;
  tensor->view.dtype.code = code;
  tensor->view.dtype.bits = bits;
  tensor->view.dtype.lanes = 1;
  tensor->view.shape = (int64_t*)(tensor + 1);
  tensor->view.strides = tensor->view.shape + num_dims;
  int64_t stride = 1;
  for (int32_t dim = num_dims - 1; dim >= 0; --dim) {
    tensor->view.shape[dim] = shape[dim];
    tensor->view.strides[dim] = stride;
    stride *= shape[dim];
  }
  __atomic_fetch_add(&num_live_tensors, 1, __ATOMIC_ACQ_REL);
  return tensor;
}

stg_tensor* new_float32(int32_t num_dims, const int64_t* shape) { return new_tensor(STG_DTYPE_FLOAT, 32, num_dims, shape); }

static char* data_of(const stg_tensor* tensor) { return (char*)tensor->view.data + tensor->view.byte_offset; }

float* floats(const stg_tensor* tensor) { return (float*)(void*)data_of(tensor); }

int64_t count_elements(const stg_tensor* tensor) {
  int64_t numel = 1;
  for (int32_t dim = 0; dim < tensor->view.num_dims; ++dim) numel *= tensor->view.shape[dim];
  return numel;
}

double element(const stg_tensor* tensor, int64_t at) {
  if (tensor->view.dtype.bits == 32) return (double)floats(tensor)[at];
  return ((const double*)(const void*)data_of(tensor))[at];
}

void set_element(stg_tensor* tensor, int64_t at, double value) {
  if (tensor->view.dtype.bits == 32) {
    floats(tensor)[at] = (float)value;
  } else {
    ((double*)(void*)data_of(tensor))[at] = value;
  }
}

void release_tensor(stg_tensor* tensor) {
  if (tensor != NULL && tensor->deleter != NULL) tensor->deleter(tensor);
}

/* ---- trees ---- */

static void release_own_tree(stg_tree* self) {
  watch_releaser();
  const int64_t before = __atomic_fetch_sub(&num_live_trees, 1, __ATOMIC_ACQ_REL);
  if (before <= 0) abort();
  for (uint32_t i = 0; i < self->root.count; ++i) {
    stg_value* value = &self->root.as.entries[i].value;
    if (value->type == STG_TENSOR) release_tensor(value->as.tensor);
  }
  free(self->owner);
  memset(self, 0, sizeof *self);
}

stg_tree new_dict(uint32_t num_entries, const char* const* names, stg_tensor* const* tensors) {
  stg_tree tree;
  memset(&tree, 0, sizeof tree);
  stg_entry* entries = calloc(num_entries, sizeof *entries);
  if (entries == NULL) abort();
  for (uint32_t i = 0; i < num_entries; ++i) {
    entries[i].key.data = names[i];
    entries[i].key.size_bytes = strlen(names[i]);
    entries[i].value.type = STG_TENSOR;
    entries[i].value.as.tensor = tensors[i];
  }
  tree.root.type = STG_DICT;
  tree.root.count = num_entries;
  tree.root.as.entries = entries;
  tree.owner = entries;
  tree.release = release_own_tree;
  __atomic_fetch_add(&num_live_trees, 1, __ATOMIC_ACQ_REL);
  return tree;
}

const stg_value* find_key(const stg_value* dict, const char* key) {
  for (uint32_t i = 0; dict->type == STG_DICT && i < dict->count; ++i) {
    const stg_string name = dict->as.entries[i].key;
    if (name.size_bytes == strlen(key) && memcmp(name.data, key, name.size_bytes) == 0) return &dict->as.entries[i].value;
  }
  return NULL;
}

void release_tree(stg_tree* tree) {
  if (tree->release != NULL) tree->release(tree);
  memset(tree, 0, sizeof *tree);
}

uint64_t clock_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
