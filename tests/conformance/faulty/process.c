/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults against the process: what a setup, a create or a probe must leave alone.
 */
#include <fcntl.h>
#include <fenv.h>
#include <locale.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fault.h"
#include "harm.h"

static void* wait_for_ever(void* nothing) {
  for (;;) pause();
  return nothing;
}

static void start_thread(void) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, wait_for_ever, NULL) == 0) pthread_detach(thread);
}

static void handle_signal(int signal_number) { (void)signal_number; }

static void limit_files(void) {
  struct rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur /= 2;
  setrlimit(RLIMIT_NOFILE, &limit);
}

static void stay_on_one_cpu(void) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(sched_getcpu(), &cpus);
  sched_setaffinity(0, sizeof cpus, &cpus);
}

static void lose_memory(size_t size_bytes) {
  static void* volatile lost; /* so that the compiler keeps it */
  lost = malloc(size_bytes);
  if (lost == NULL) abort();
}

/* ---- what a child must survive as a result of the tool, and not as its end ---- */

static void write_much(void) {
  static char block[65536];
  memset(block, 'x', sizeof block);
  for (int i = 0; i < 3200; ++i) {
    if (write(STDOUT_FILENO, block, sizeof block) < 0) return;
  }
}

static void take_memory(void) {
  for (;;) {
    char* block = malloc(16 << 20);
    if (block == NULL) return;
    memset(block, 1, 16 << 20);
    usleep(2000);
  }
}

/* Its number is written down, so that a test can look whether it is still there. */
static void leave_child(void) {
  const pid_t child = fork();
  if (child == 0) {
    if (is_fault("misbehaves-by-daemon")) setsid();
    for (;;) pause();
  }
  FILE* file = fopen(getenv("STRATAGEM_FAULT_FILE"), "w");
  if (file == NULL) abort();
  fprintf(file, "%d", (int)child);
  fclose(file);
}

static void close_all(void) {
  for (int fd = 0; fd < 1024; ++fd) close(fd);
}

static void pretend(void) {
  static const char record[] = "{\"end\": 0, \"nonce\": \"\"}\n";
  for (int fd = 3; fd < 1024; ++fd) {
    if (write(fd, record, sizeof record - 1) < 0) continue;
  }
  exit(0);
}

static void misbehave(void) {
  if (is_fault("misbehaves-by-exit")) exit(0);
  if (is_fault("misbehaves-by-abort")) abort();
  if (is_fault("misbehaves-by-hanging")) wait_for_ever(NULL);
  if (is_fault("misbehaves-by-output")) write_much();
  if (is_fault("misbehaves-by-memory")) take_memory();
  if (is_fault("misbehaves-by-child") || is_fault("misbehaves-by-daemon")) leave_child();
  if (is_fault("misbehaves-by-closing")) close_all();
  if (is_fault("misbehaves-by-pretending")) pretend();
  if (is_fault("misbehaves-by-ignoring-signals")) {
    for (int i = 1; i < 65; ++i) signal(i, SIG_IGN);
    wait_for_ever(NULL);
  }
}

void harm_at_setup(void) {
  misbehave();
  if (is_fault("process-signals-kept")) signal(SIGUSR2, handle_signal);
  if (is_fault("process-environment-kept")) setenv("OMP_NUM_THREADS", "1", 1);
  if (is_fault("process-locale-kept")) setlocale(LC_ALL, "C.UTF-8");
  if (is_fault("process-arithmetic-kept")) fesetround(FE_DOWNWARD);
  if (is_fault("process-umask-kept")) umask(0177);
  if (is_fault("process-folder-kept") && chdir("/") != 0) abort();
  if (is_fault("process-limits-kept")) limit_files();
  if (is_fault("process-output-silent")) fprintf(stderr, "sequential: set up\n");
  if (is_fault("teardown-ends-threads") || is_fault("cycles-keep-threads")) start_thread();
  if (is_fault("cycles-keep-memory")) lose_memory(1024);
  if (is_fault("cycles-keep-descriptors") && open("/dev/null", O_RDONLY) < 0) abort();
  if (is_fault("host-threads-keep-their-share")) stay_on_one_cpu();
  if (is_fault("exit-with-live-instance")) atexit(abort);
}

void harm_at_create(void) {
  if (is_fault("create-starts-no-thread")) start_thread();
  if (is_fault("create-destroy-keeps-memory")) lose_memory(256);
}

void harm_at_probe(void) {
  if (is_fault("misbehaves-in-probe")) exit(0);
  if (is_fault("load-starts-no-thread")) start_thread();
  if (is_fault("probe-keeps-nothing")) lose_memory(64);
}
