// SPDX-License-Identifier: Apache-2.0
//
// What must be on the disk before something gets its name, and what happens where the disk refuses: the system calls of a child are
// recorded in their order, or made to fail. (A power cut can't be tried here; the order of syncs and renames is what outlives one.)
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <map>

#include "base/disk.hpp"
#include "base/storage.hpp"
#include "unit/storage_support.hpp"
#include "unit/traced_child.hpp"

using namespace stratagem;
using namespace stratagem::test;
namespace fs = std::filesystem;

namespace {

// --- in which order

const std::map<uint64_t, std::string> watched{{SYS_fsync, "sync"},      {SYS_fdatasync, "sync"},
#ifdef SYS_rename
                                              {SYS_rename, "rename"},   {SYS_mkdir, "mkdir"},
#endif
                                              {SYS_renameat, "rename"}, {SYS_renameat2, "rename"}, {SYS_mkdirat, "mkdir"}};

// The file or folder behind the child's descriptor, below `root`; a temporary's number is left out.
std::string name_of(pid_t child, uint64_t descriptor, const fs::path& root) {
  const fs::path path = fs::read_symlink(concat("/proc/", child, "/fd/", descriptor)).lexically_relative(root);
  std::string name;
  for (const fs::path& part : path) {
    const std::string text = part.native();
    const size_t end = disk::is_temporary_name(text) ? text.rfind(".tmp-") + 4 : text.size();
    name += (name.empty() ? "" : "/") + text.substr(0, end);
  }
  return name;
}

// "sync <name>", "rename" and "mkdir" of `body`, as far as they succeeded. None where a child can't be traced.
std::vector<std::string> recorded(const fs::path& root, const std::function<void()>& body) {
  std::vector<std::string> events;
  const std::optional<pid_t> child = start_traced(body);
  if (!child) {
    WARN("this machine does not let a process trace its child: nothing was recorded");
    return events;
  }
  ptrace(PTRACE_SETOPTIONS, *child, nullptr, PTRACE_O_TRACESYSGOOD);
  std::string begun;
  for (int status = 0;;) {
    ptrace(PTRACE_SYSCALL, *child, nullptr, nullptr);
    waitpid(*child, &status, 0);
    if (WIFEXITED(status) || WIFSIGNALED(status)) {
      CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
      return events;
    }
    __ptrace_syscall_info info{};
    ptrace(PTRACE_GET_SYSCALL_INFO, *child, reinterpret_cast<void*>(sizeof info), &info);
    if (info.op == PTRACE_SYSCALL_INFO_ENTRY) {
      const auto found = watched.find(info.entry.nr);
      begun = found == watched.end() ? "" : found->second;
      if (begun == "sync") begun += " " + name_of(*child, info.entry.args[0], root);
    } else if (info.op == PTRACE_SYSCALL_INFO_EXIT && !begun.empty() && info.exit.is_error == 0) {
      events.push_back(begun);
    }
  }
}

// --- what fails

// From here on the system call fails with `error_number` in this process; with a descriptor, only for it. It can't be taken back.
void make_fail(uint32_t call, int error_number, int descriptor = -1) {
  const bool is_any = descriptor < 0;
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args)),
      BPF_JUMP(BPF_JMP | (is_any ? BPF_JGE : BPF_JEQ) | BPF_K, is_any ? 0 : static_cast<uint32_t>(descriptor), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error_number)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{sizeof filter / sizeof *filter, filter};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    throw std::system_error(errno, std::generic_category(), "seccomp");
  }
}

// What `body` throws, in a child of its own.
std::string refusal_in_child(const std::function<void()>& body) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    std::string text = "nothing was refused";
    try {
      body();
    } catch (const Error& error) {
      text = code_name(error.code) + " " + error.message;
    } catch (const std::exception& error) {
      text = error.what();
    }
    const ssize_t written = write(ends[1], text.data(), text.size());
    _exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string text(4096, '\0');
  const ssize_t size = read(ends[0], text.data(), text.size());
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  text.resize(size < 0 ? 0 : static_cast<size_t>(size));
  return text;
}

// This process's descriptor of something whose name begins so.
int descriptor_of(const std::string& beginning) {
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const fs::path path = fs::read_symlink(entry.path(), ignored);
    if (path.filename().native().starts_with(beginning)) return std::stoi(entry.path().filename());
  }
  throw not_found("no open ", beginning);
}

int next_descriptor() {
  const int number = open("/dev/null", O_RDONLY | O_CLOEXEC);
  close(number);
  return number;
}

// An old checkpoint, whose replacement fails where `spoil` says; the old one must stand.
void check_old_stands(const std::function<void(Transaction&)>& spoil, std::initializer_list<std::string> parts) {
  const TemporaryFolder folder;
  const Storage storage;
  const std::string path = folder / "last";
  save(storage, path, "old");
  const std::string text = refusal_in_child([&] {
    Transaction transaction = storage.begin(path);
    spoil(transaction);
    for (const char* name : file_names) transaction.write(name, "new");
    transaction.commit();
  });
  for (const std::string& part : parts) CHECK_THAT(text, Catch::Contains(part));
  CHECK(content_of(storage, path) == "old");
  disk::remove_leftovers(folder.path());
  CHECK(names_in(folder.path()) == std::vector<std::string>{"last"});
}

}  // namespace

TEST_CASE("each file of a checkpoint and its folder are on the disk before it gets its name, and the name itself after") {
  const TemporaryFolder folder;
  const Storage storage;
  const std::string path = folder / "last";
  const std::vector<std::string> before{"sync .last.tmp/model.safetensors", "sync .last.tmp/optimizer.safetensors",
                                        "sync .last.tmp/state.json", "sync .last.tmp", "rename"};
  for (const bool is_first : {true, false}) {
    CAPTURE(is_first);
    const std::vector<std::string> events = recorded(folder.path(), [&] { save(storage, path, "new"); });
    if (events.empty()) return;
    std::vector<std::string> expected = before;
    expected.insert(expected.begin(), "mkdir");  // the temporary folder
    // An old one is exchanged with the new one; then it has the temporary's name, and goes.
    expected.push_back("sync .");
    CHECK(events == expected);
  }
}

TEST_CASE("folders that are made for a checkpoint are on the disk too") {
  const TemporaryFolder folder;
  const Storage storage;
  const std::vector<std::string> events = recorded(folder.path(), [&] { save(storage, folder / "a/b/last", "new"); });
  if (events.empty()) return;
  const std::vector<std::string> first(events.begin(), events.begin() + std::min<ptrdiff_t>(4, std::ssize(events)));
  CHECK(first == std::vector<std::string>{"mkdir", "sync .", "mkdir", "sync a"});
  CHECK(events.back() == "sync a/b");
}

TEST_CASE("a small file is on the disk before it gets its name, and a removed folder's name goes from the disk first") {
  const TemporaryFolder folder;
  const Storage storage;
  std::vector<std::string> events = recorded(folder.path(), [&] { storage.replace(folder / "last", "step-1"); });
  if (events.empty()) return;
  CHECK(events == std::vector<std::string>{"sync .last.tmp", "rename", "sync ."});
  save(storage, folder / "step-1", "x");
  events = recorded(folder.path(), [&] { storage.remove(folder / "step-1"); });
  CHECK(events == std::vector<std::string>{"rename", "sync ."});
}

TEST_CASE("on a full disk the error names the file, and the old checkpoint stands") {
  check_old_stands([](Transaction&) { make_fail(SYS_pwrite64, ENOSPC); },
                   {"RESOURCE_EXHAUSTED", "can't write ", "/last/state.json", "No space left on device"});
  check_old_stands(
      [](Transaction& transaction) {
        transaction.write("early", "fits");
        make_fail(SYS_openat, ENOSPC);
      },
      {"RESOURCE_EXHAUSTED", "state.json", "No space left on device"});
}

TEST_CASE("a sync that fails, of a file or of a folder, is an error that names it, and the old checkpoint stands") {
  check_old_stands(
      [](Transaction& transaction) {
        transaction.write("early", "x");
        make_fail(SYS_fsync, EIO, descriptor_of("early"));
      },
      {"can't sync ", "/last/early", "Input/output error"});
  check_old_stands([](Transaction&) { make_fail(SYS_fsync, EIO, descriptor_of(".last.tmp-")); },
                   {"can't sync ", ".last.tmp-", "Input/output error"});
  // The folder above is opened for its sync alone, after the files.
  check_old_stands(
      [](Transaction& transaction) {
        for (const char* name : file_names) transaction.write(name, "new");
        make_fail(SYS_fsync, EIO, next_descriptor());
      },
      {"can't sync ", "Input/output error"});
}
