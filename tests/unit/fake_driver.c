/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for NVIDIA's driver, libcuda.so.1, put before it by LD_LIBRARY_PATH. What it answers stands in FAKE_CUDA, as words:
 * "init=803 version=12040 devices=2 count=999 name=1". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static int answer(const char *key, int otherwise) {
  const char *words = getenv("FAKE_CUDA");
  const char *found = words == NULL ? NULL : strstr(words, key);
  return found == NULL ? otherwise : atoi(found + strlen(key));
}

EXPORT int cuInit(unsigned flags) { return flags != 0 ? 1 : answer("init=", 0); }
#ifndef WITHOUT_VERSION
EXPORT int cuDriverGetVersion(int *version) {
  *version = answer("version=", 13020);
  return 0;
}
#endif
EXPORT int cuDeviceGetCount(int *count) {
  *count = answer("devices=", 1);
  return answer("count=", 0);
}
EXPORT int cuDeviceGet(int *device, int index) {
  *device = 100 + index;
  return 0;
}
EXPORT int cuDeviceGetName(char *name, int capacity_bytes, int device) {
  snprintf(name, (size_t)capacity_bytes, "Fake GPU %d", device - 100);
  return answer("name=", 0);
}
EXPORT int cuGetErrorString(int code, const char **text) {
  *text = code == 803 ? "system has unsupported display driver / cuda driver combination" : NULL;
  return code == 803 ? 0 : 1;
}
