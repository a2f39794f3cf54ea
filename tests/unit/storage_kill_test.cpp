// SPDX-License-Identifier: Apache-2.0
//
// What a kill at any moment leaves on the disk: a child is ended before and after each of its system calls in turn.
#include <functional>

#include "base/disk.hpp"
#include "base/storage.hpp"
#include "unit/storage_support.hpp"
#include "unit/traced_child.hpp"

using namespace stratagem;
using namespace stratagem::test;
namespace fs = std::filesystem;

namespace {

enum class Ended { killed, reached_its_end, cant_trace };

// Runs `body` in a child, which is killed at the stop number `kill_at`: there are two for each system call, before and after it.
Ended run_and_kill(int kill_at, const std::function<void()>& body) {
  const std::optional<pid_t> traced = start_traced(body);
  if (!traced) return Ended::cant_trace;
  const pid_t child = *traced;
  int status = 0;
  for (int stop = 0; stop < kill_at; ++stop) {
    ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
    waitpid(child, &status, 0);
    if (WIFEXITED(status)) {
      CHECK(WEXITSTATUS(status) == 0);
      return Ended::reached_its_end;
    }
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return Ended::killed;
}

// Kills `body` at every system call; after each, `check` looks at what is there, and `reset` makes it as it was.
void kill_everywhere(const std::function<void()>& body, const std::function<void()>& check, const std::function<void()>& reset) {
  for (int kill_at = 0;; ++kill_at) {
    INFO("killed at stop " << kill_at);
    REQUIRE(kill_at < 20000);
    const Ended ended = run_and_kill(kill_at, body);
    if (ended == Ended::cant_trace) {
      WARN("this machine does not let a process trace its child: nothing was tried");
      return;
    }
    check();
    if (ended == Ended::reached_its_end) {
      CHECK(kill_at > 20);
      return;
    }
    reset();
  }
}

}  // namespace

TEST_CASE("killed anywhere while it saves, a process leaves the old checkpoint or the new one, and a leftover that is found") {
  const TemporaryFolder folder;
  const Storage storage;  // the whole disk: paths are absolute
  const std::string path = folder / "last";
  save(storage, path, "old");
  int num_leftovers = 0;
  int num_old = 0;
  kill_everywhere([&] { save(storage, path, "new"); },
                  [&] {
                    CHECK(storage.list(folder.path().native()) == std::vector<std::string>{"last"});
                    const std::string content = content_of(storage, path);
                    CHECK((content == "old" || content == "new"));
                    num_old += content == "old" ? 1 : 0;
                    num_leftovers += static_cast<int>(disk::remove_leftovers(folder.path()).size());
                    CHECK(names_in(folder.path()) == std::vector<std::string>{"last"});
                    CHECK(content_of(storage, path) == content);
                  },
                  [&] { save(storage, path, "old"); });
  CHECK(content_of(storage, path) == "new");
  CHECK(num_old > 10);
  CHECK(num_leftovers > 10);
}

TEST_CASE("killed anywhere while it replaces a folder in two steps, a process leaves the old one or the new one to be put back") {
  const TemporaryFolder folder;
  const Storage storage;
  const std::string path = folder / "last";
  int num_put_back = 0;
  const auto reset = [&] {
    storage.remove(path);
    save(storage, path, "old");
  };
  reset();
  kill_everywhere(
      [&] {
        const disk::Temporary made = disk::make_temporary_folder(path);
        for (const char* name : file_names) write_file(made.path / name, "new");
        disk::replace_folder_in_two_steps(made.path, path);
      },
      [&] {
        const bool was_there = fs::exists(path);
        disk::remove_leftovers(folder.path());
        num_put_back += was_there ? 0 : 1;
        CHECK(names_in(folder.path()) == std::vector<std::string>{"last"});
        const std::string content = content_of(storage, path);
        CHECK((content == "old" || content == "new"));
      },
      reset);
  CHECK(content_of(storage, path) == "new");
  CHECK(num_put_back > 0);
}

TEST_CASE("killed anywhere while it removes a checkpoint, a process leaves all of it or nothing") {
  const TemporaryFolder folder;
  const Storage storage;
  const std::string path = folder / "step-1";
  save(storage, path, "x");
  kill_everywhere([&] { storage.remove(path); },
                  [&] {
                    if (fs::exists(path)) CHECK(content_of(storage, path) == "x");
                    disk::remove_leftovers(folder.path());
                    const std::vector<std::string> left = names_in(folder.path());
                    CHECK((left.empty() || left == std::vector<std::string>{"step-1"}));
                  },
                  [&] { save(storage, path, "x"); });
  CHECK_FALSE(fs::exists(path));
}

TEST_CASE("killed anywhere while it replaces a small file, a process leaves the old content or the new one") {
  const TemporaryFolder folder;
  const Storage storage;
  const std::string path = folder / "last";
  storage.replace(path, "step-10");
  kill_everywhere([&] { storage.replace(path, "step-20"); },
                  [&] {
                    const std::string content = read_file(path);
                    CHECK((content == "step-10" || content == "step-20"));
                    disk::remove_leftovers(folder.path());
                    CHECK(names_in(folder.path()) == std::vector<std::string>{"last"});
                  },
                  [&] { storage.replace(path, "step-10"); });
  CHECK(read_file(path) == "step-20");
}
