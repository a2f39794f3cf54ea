// SPDX-License-Identifier: Apache-2.0
#include "conformance/runner/process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.hpp"

extern char** environ;

namespace stratagem::conformance {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t max_output_bytes = 4096, max_record_bytes = 1 << 20;

[[noreturn]] void give_up(const char* what) {
  throw Error{STG_INTERNAL, concat("can't start a child: ", what, ": ", std::strerror(errno))};
}

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  void reset() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

// Above the numbers that the child's are to have, so that one can't be written over while the other is still to come.
Fd raised(int fd) {
  const int high = fcntl(fd, F_DUPFD_CLOEXEC, 16);
  close(fd);
  if (high < 0) give_up("no file descriptor is free");
  return Fd(high);
}

struct Pipe {
  Pipe() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) give_up("pipe");
    read = raised(ends[0]);
    write = raised(ends[1]);
    fcntl(read.get(), F_SETFL, O_NONBLOCK);
  }
  Fd read, write;
};

Fd input_file(const std::string& text) {
  Fd file = raised(memfd_create("input", MFD_CLOEXEC));
  if (::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) give_up("memfd");
  lseek(file.get(), 0, SEEK_SET);
  return file;
}

pid_t spawn(const std::vector<std::string>& command, int input, int output, int records) {
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_adddup2(&actions, input, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output, STDERR_FILENO);
  posix_spawn_file_actions_adddup2(&actions, records, child_record_fd);
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  std::vector<char*> arguments;
  for (const std::string& part : command) arguments.push_back(const_cast<char*>(part.c_str()));
  arguments.push_back(nullptr);
  pid_t pid = -1;
  errno = posix_spawn(&pid, arguments[0], &actions, &attributes, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (errno != 0 || pid < 0) give_up(arguments[0]);
  return pid;
}

// What is there now. More than `max_bytes` is read, so that the child doesn't wait, and dropped. False at the end.
bool drain(int fd, std::string& into, size_t max_bytes) {
  char buffer[65536];
  for (int turns = 0; turns < 64; ++turns) {  // a flood must not keep us from looking at the clock
    const ssize_t got = read(fd, buffer, sizeof buffer);
    if (got == 0) return false;
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (into.size() < max_bytes) into.append(buffer, std::min(static_cast<size_t>(got), max_bytes - into.size()));
  }
  return true;
}

// Memory that is its own: what it maps of files (LibTorch is large) doesn't count.
uint64_t own_memory_bytes(pid_t pid) {
  const std::string path = concat("/proc/", pid, "/statm");
  FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return 0;
  unsigned long long size = 0, resident = 0, shared = 0;
  const int num_read = std::fscanf(file, "%llu %llu %llu", &size, &resident, &shared);
  std::fclose(file);
  return num_read == 3 && resident > shared ? (resident - shared) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) : 0;
}

bool has_ended(pid_t pid) {
  siginfo_t info{};
  return waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
}

void reap(pid_t pid, Ended& out) {
  kill(-pid, SIGKILL);  // before the leader is reaped: until then the group's number can't be another's
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) out.signal = WTERMSIG(status);
  if (WIFEXITED(status)) out.exit_code = WEXITSTATUS(status);
}

}  // namespace

Ended run_process(const std::vector<std::string>& command, const std::string& input, double timeout_s, uint64_t memory_bytes) {
  Pipe output, records;
  Fd request = input_file(input);
  Ended ended;
  const Clock::time_point start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const pid_t pid = spawn(command, request.get(), output.write.get(), records.write.get());
  output.write.reset();
  records.write.reset();
  pollfd waited[] = {{output.read.get(), POLLIN, 0}, {records.read.get(), POLLIN, 0}};
  for (bool is_over = false; !is_over;) {
    poll(waited, 2, 10);
    is_over = has_ended(pid);
    if (!drain(output.read.get(), ended.output, max_output_bytes)) waited[0].fd = -1;
    if (!drain(records.read.get(), ended.records, max_record_bytes)) waited[1].fd = -1;
    if (waited[0].fd < 0 && waited[1].fd < 0 && !is_over) usleep(2000);  // its pipes are closed, it is not
    ended.is_timed_out = !is_over && seconds() > timeout_s;
    ended.is_too_big = !is_over && own_memory_bytes(pid) > memory_bytes;
    is_over |= ended.is_timed_out || ended.is_too_big;
  }
  reap(pid, ended);
  drain(output.read.get(), ended.output, max_output_bytes);
  drain(records.read.get(), ended.records, max_record_bytes);
  ended.seconds = seconds();
  return ended;
}

void adopt_orphans() { prctl(PR_SET_CHILD_SUBREAPER, 1); }

void end_orphans() {
  for (int turns = 0; turns < 100; ++turns) {  // one that is killed may leave others
    bool is_alone = true;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::ifstream children(task.path() / "children");
      for (pid_t pid = 0; children >> pid; is_alone = false) kill(pid, SIGKILL);
    }
    if (is_alone) return;
    while (waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    usleep(1000);
  }
}

}  // namespace stratagem::conformance
