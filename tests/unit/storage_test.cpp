// SPDX-License-Identifier: Apache-2.0
//
// The storage on the local disk, and a host's own. What a kill leaves is in storage_kill_test.cpp.
#include "base/storage.hpp"

#include <sys/resource.h>
#include <sys/stat.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <mutex>
#include <thread>

#include "base/checksum.hpp"
#include "base/disk.hpp"
#include "base/structs.hpp"
#include "base/value.hpp"
#include "unit/storage_support.hpp"

using namespace stratagem;
using namespace stratagem::test;
namespace fs = std::filesystem;

namespace {

// Runs `body` in threads of their own at the same time; what they throw fails the test.
void in_threads(int num_threads, const std::function<void(int)>& body) {
  std::mutex mutex;
  std::vector<std::string> errors;
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      try {
        body(t);
      } catch (const Error& error) {
        const std::scoped_lock lock{mutex};
        errors.push_back(error.message);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(errors == std::vector<std::string>{});
}

// No file of this process can grow over `limit_bytes` while it lives: as a full disk, but without one.
class FullDisk {
 public:
  explicit FullDisk(rlim_t limit_bytes) {
    saved_handler_ = signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &saved_);
    const rlimit tight{limit_bytes, saved_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &tight);
  }
  ~FullDisk() {
    setrlimit(RLIMIT_FSIZE, &saved_);
    signal(SIGXFSZ, saved_handler_);
  }

 private:
  rlimit saved_{};
  void (*saved_handler_)(int);
};

}  // namespace

TEST_CASE("a checkpoint is invisible until it is committed, and then whole") {
  const TemporaryFolder folder;
  const LocalStorage local{folder.path()};
  const Storage storage{local.table()};
  Transaction transaction = storage.begin("step-10");
  transaction.write("a.json", "{}");
  transaction.write("b.bin", 6, "world", 5);
  transaction.write("b.bin", 0, "hello ", 6);
  CHECK(storage.list("").empty());
  check_error(error_of([&] { storage.open("step-10/a.json"); }), STG_NOT_FOUND, {folder / "step-10/a.json", "No such file"});

  transaction.commit();
  CHECK(storage.list("") == std::vector<std::string>{"step-10"});
  CHECK(storage.list("step-10") == std::vector<std::string>{"a.json", "b.bin"});
  CHECK(storage.read_text("step-10/b.bin") == "hello world");
  CHECK(names_in(folder.path()) == std::vector<std::string>{"step-10"});
}

TEST_CASE("a checkpoint replaces one of the same name as a whole") {
  const TemporaryFolder folder;
  const LocalStorage local{folder.path()};
  const Storage storage{local.table()};
  {
    Transaction old = storage.begin("last");
    old.write("only-in-the-old", "1");
    old.commit();
  }
  save(storage, "last", "new");
  CHECK(content_of(storage, "last") == "new");
  CHECK(names_in(folder.path()) == std::vector<std::string>{"last"});
}

TEST_CASE("a checkpoint that is rolled back, or forgotten, leaves nothing and changes nothing") {
  const TemporaryFolder folder;
  const LocalStorage local{folder.path()};
  const Storage storage{local.table()};
  save(storage, "last", "old");
  {
    Transaction forgotten = storage.begin("last");
    forgotten.write("state.json", "half");
    CHECK(names_in(folder.path()).size() == 2);
  }
  CHECK(names_in(folder.path()) == std::vector<std::string>{"last"});
  CHECK(content_of(storage, "last") == "old");
}

TEST_CASE("a transaction ends with its commit") {
  const TemporaryFolder folder;
  const LocalStorage local{folder.path()};
  Transaction transaction = Storage{local.table()}.begin("x");
  transaction.commit();
  check_error(error_of([&] { transaction.commit(); }), STG_FAILED_PRECONDITION, {"twice"});
  check_error(error_of([&] { transaction.write("late", "1"); }), STG_FAILED_PRECONDITION, {"late", "after"});
}

TEST_CASE("folders above a checkpoint are made") {
  const TemporaryFolder folder;
  const LocalStorage local{folder / "not/there/yet"};
  const Storage storage{local.table()};
  save(storage, "runs/fashion/step-1", "x");
  CHECK(content_of(storage, "runs/fashion/step-1") == "x");
  storage.replace("other/last", "step-1");
  CHECK(read_file(folder / "not/there/yet/other/last") == "step-1");
}

TEST_CASE("a full disk is said, and the checkpoint that was there stays") {
  const TemporaryFolder folder;
  const LocalStorage local{folder.path()};
  const Storage storage{local.table()};
  save(storage, "last", "old");
  const std::string large(100'000, 'x');
  {
    const FullDisk full{65'536};
    check_error(error_of([&] { save(storage, "last", large); }), STG_RESOURCE_EXHAUSTED,
                {folder / "last/state.json", "File too large"});
    check_error(error_of([&] { storage.replace("pointer", large); }), STG_RESOURCE_EXHAUSTED, {"pointer"});
  }
  CHECK(content_of(storage, "last") == "old");
  CHECK(names_in(folder.path()) == std::vector<std::string>{"last"});
  save(storage, "last", large);
  CHECK(content_of(storage, "last") == large);
}

TEST_CASE("what errno says decides the code") {
  CHECK(disk::errno_error(ENOSPC, "write", "x").code == STG_RESOURCE_EXHAUSTED);
  CHECK(disk::errno_error(EDQUOT, "write", "x").code == STG_RESOURCE_EXHAUSTED);
  CHECK(disk::errno_error(EACCES, "open", "x").code == STG_PERMISSION_DENIED);
  CHECK(disk::errno_error(EROFS, "open", "x").code == STG_PERMISSION_DENIED);
  CHECK(disk::errno_error(ENOENT, "open", "x").code == STG_NOT_FOUND);
  CHECK(disk::errno_error(EIO, "read", "x").code == STG_UNKNOWN);
  check_error(disk::errno_error(ENOSPC, "write", "some/file"), STG_RESOURCE_EXHAUSTED,
              {"can't write " + fs::absolute("some/file").native() + ": No space left on device"});
}

TEST_CASE("a file where a checkpoint should be is not replaced by one") {
  const TemporaryFolder folder;
  const LocalStorage local{folder.path()};
  const Storage storage{local.table()};
  storage.replace("last", "a file");
  check_error(error_of([&] { save(storage, "last", "new"); }), STG_ALREADY_EXISTS, {folder / "last"});
  CHECK(storage.read_text("last") == "a file");
  CHECK(names_in(folder.path()) == std::vector<std::string>{"last"});
}

TEST_CASE("files of a checkpoint have plain names") {
  const TemporaryFolder folder;
  const LocalStorage local{folder.path()};
  Transaction transaction = Storage{local.table()}.begin("x");
  for (const std::string& name :
       {std::string(), std::string("."), std::string(".."), std::string("a/b"), std::string("/etc/x"), std::string("a\0b", 3)}) {
    check_error(error_of([&] { transaction.write(name, "1"); }), STG_INVALID_ARGUMENT, {"plain name", folder / "x"});
  }
  check_error(error_of([&] { transaction.write("a", 0, nullptr, 4); }), STG_INVALID_ARGUMENT, {"null pointer for 4 bytes"});
  check_error(error_of([&] { transaction.write("a", UINT64_MAX, "x", 1); }), STG_INVALID_ARGUMENT, {"18446744073709551615"});
  transaction.write("a", 0, nullptr, 0);
  transaction.commit();
}

TEST_CASE("with a root, paths stay inside it") {
  const TemporaryFolder folder;
  const LocalStorage local{folder / "root"};
  const Storage storage{local.table()};
  storage.replace("a", "1");
  for (const std::string path : {"../x", "a/../../x", "..", "/etc/passwd", "b/.."}) {
    check_error(error_of([&] { storage.begin(path); }), STG_INVALID_ARGUMENT, {path, folder / "root"});
    check_error(error_of([&] { storage.open(path); }), STG_INVALID_ARGUMENT, {path});
    check_error(error_of([&] { storage.list(path); }), STG_INVALID_ARGUMENT, {path});
    check_error(error_of([&] { storage.remove(path); }), STG_INVALID_ARGUMENT, {path});
    check_error(error_of([&] { storage.replace(path, "x"); }), STG_INVALID_ARGUMENT, {path});
  }
  CHECK(names_in(folder.path()) == std::vector<std::string>{"root"});
  CHECK(storage.list(".") == std::vector<std::string>{"a"});
}

TEST_CASE("what has no name can't be made or removed, and neither can a temporary") {
  const TemporaryFolder folder;
  const LocalStorage local{folder.path()};
  const Storage storage{local.table()};
  save(storage, "keep", "x");
  for (const char* path : {"", ".", "keep/."}) {
    check_error(error_of([&] { storage.remove(path); }), STG_INVALID_ARGUMENT, {"does not end in a name"});
    check_error(error_of([&] { storage.begin(path); }), STG_INVALID_ARGUMENT, {"does not end in a name"});
  }
  check_error(error_of([&] { storage.begin(".keep.tmp-1-2"); }), STG_INVALID_ARGUMENT, {"temporary"});
  check_error(error_of([&] { storage.begin(std::string("a\0b", 3)); }), STG_INVALID_ARGUMENT, {"zero byte"});
  CHECK(content_of(storage, "keep") == "x");
}

TEST_CASE("without a root, paths are absolute or relative to the working directory") {
  const TemporaryFolder folder;
  const LocalStorage whole_disk;
  CHECK(whole_disk.resolve(to_abi("/a/b")) == "/a/b");
  CHECK(whole_disk.resolve(to_abi("/a/b//")) == "/a/b");
  CHECK(whole_disk.resolve(to_abi("a/b")) == fs::current_path() / "a/b");
  save(Storage{}, folder / "sub/../step-1/", "x");
  CHECK(content_of(Storage{}, folder / "step-1") == "x");
}

TEST_CASE("reading past a file's end is data loss, with the numbers") {
  const TemporaryFolder folder;
  write_file(folder / "f", "12345");
  const StorageFile file = Storage{}.open(folder / "f");
  CHECK(file.size_bytes() == 5);
  char buffer[10];
  file.read(2, buffer, 3);
  CHECK(std::string(buffer, 3) == "345");
  check_error(error_of([&] { file.read(2, buffer, 4); }), STG_DATA_LOSS, {folder / "f", "4 bytes wanted at offset 2, 3 there"});
  check_error(error_of([&] { file.read(9, buffer, 1); }), STG_DATA_LOSS, {"1 bytes wanted at offset 9, 0 there"});
  file.read(5, nullptr, 0);
}

TEST_CASE("what is no regular file can't be opened") {
  const TemporaryFolder folder;
  check_error(error_of([&] { Storage{}.open(folder.path().native()); }), STG_INVALID_ARGUMENT, {"a folder"});
  REQUIRE(mkfifo((folder / "pipe").c_str(), 0600) == 0);
  check_error(error_of([&] { Storage{}.open(folder / "pipe"); }), STG_INVALID_ARGUMENT, {"no regular file"});
  check_error(error_of([&] { Storage{}.open(folder / "pipe/x"); }), STG_INVALID_ARGUMENT, {"Not a directory"});
}

TEST_CASE("a small file is not read when it is not small") {
  const TemporaryFolder folder;
  write_file(folder / "f", "12345");
  CHECK(Storage{}.read_text(folder / "f", 5) == "12345");
  check_error(error_of([&] { Storage{}.read_text(folder / "f", 4); }), STG_INVALID_ARGUMENT, {"5 bytes; at most 4"});
}

TEST_CASE("removing takes a file, a folder or a link, and nothing is no error") {
  const TemporaryFolder folder;
  const Storage storage;
  save(storage, folder / "step-1", "x");
  fs::create_directory_symlink("step-1", folder / "link");
  storage.remove(folder / "link");
  CHECK(content_of(storage, folder / "step-1") == "x");
  storage.remove(folder / "step-1/state.json");
  storage.remove(folder / "step-1");
  storage.remove(folder / "step-1");
  CHECK(names_in(folder.path()).empty());
}

TEST_CASE("a list is sorted, and a folder that is not there is an error") {
  const TemporaryFolder folder;
  for (const char* name : {"c", "a", "B", ".hidden", ".x.tmp-12-3", ".x.old-12-3", ".x.tmp-12", "x.tmp-1-1"})
    write_file(folder / name, "");
  CHECK(Storage{}.list(folder.path().native()) == std::vector<std::string>{".hidden", ".x.tmp-12", "B", "a", "c", "x.tmp-1-1"});
  check_error(error_of([&] { Storage{}.list(folder / "none"); }), STG_NOT_FOUND, {folder / "none"});
}

TEST_CASE("leftovers of ended processes are removed, those of living ones are not") {
  const TemporaryFolder folder;
  const Storage storage;
  Transaction living = storage.begin(folder / "last");
  living.write("state.json", "x");
  fs::create_directory(folder / ".last.tmp-1-0");  // process 1 lives, but whoever made this has ended
  write_file(folder / ".last.tmp-1-0/half", "1");
  write_file(folder / ".pointer.tmp-99999999-7", "half");
  write_file(folder / "mine.tmp-1-1", "not a temporary's name");
  CHECK(disk::remove_leftovers(folder.path()) == std::vector<std::string>{".last.tmp-1-0", ".pointer.tmp-99999999-7"});
  CHECK(disk::remove_leftovers(folder.path()).empty());
  living.commit();
  CHECK(names_in(folder.path()) == std::vector<std::string>{"last", "mine.tmp-1-1"});
  CHECK(disk::remove_leftovers(folder / "none").empty());
}

TEST_CASE("only names that a temporary is given are taken for one") {
  for (const char* name : {".a.tmp-1-0", ".a.b.tmp-12-34", ".a.old-1-2", "..tmp-1.tmp-1-2", ".a-1-1.tmp-5-6"}) {
    INFO(name);
    CHECK(disk::is_temporary_name(name));
  }
  for (const char* name : {"", "a.tmp-1-2", ".tmp-1-2", "..tmp-1-2", ".a.tmp-1", ".a.tmp-1-", ".a.tmp--1", ".a.tmp-1-2x",
                           ".a.tmp1-2", ".a.bak-1-2", ".atmp-1-2", "-1-2", "1", ".a.tmp-x-2"}) {
    INFO(name);
    CHECK_FALSE(disk::is_temporary_name(name));
  }
}

TEST_CASE("a folder that was moved aside is put back where nothing took its place, and removed where something did") {
  const TemporaryFolder folder;
  fs::create_directory(folder / ".a.old-5-5");
  write_file(folder / ".a.old-5-5/f", "1");
  fs::create_directory(folder / ".b.old-5-6");
  fs::create_directory(folder / "b");
  CHECK(disk::remove_leftovers(folder.path()) == std::vector<std::string>{".a.old-5-5", ".b.old-5-6"});
  CHECK(names_in(folder.path()) == std::vector<std::string>{"a", "b"});
  CHECK(read_file(folder / "a/f") == "1");
}

TEST_CASE("several threads write one checkpoint") {
  const TemporaryFolder folder;
  const Storage storage;
  Transaction transaction = storage.begin(folder / "shared");
  in_threads(4, [&](int t) {
    const std::string letter(1, static_cast<char>('a' + t));
    for (int i = 0; i < 50; ++i) transaction.write("all", static_cast<uint64_t>(t * 50 + i), letter.data(), 1);
  });
  transaction.commit();
  CHECK(storage.read_text(folder / "shared/all") ==
        std::string(50, 'a') + std::string(50, 'b') + std::string(50, 'c') + std::string(50, 'd'));
}

TEST_CASE("several threads save and remove checkpoints of one name, and each finds its way") {
  const TemporaryFolder folder;
  const Storage storage;
  for (int round = 0; round < 20; ++round) {
    const std::string path = folder / concat("step-", round);
    in_threads(4, [&](int t) {
      save(storage, path, std::to_string(t));
      if (t < 2) storage.remove(path);
      save(storage, path, std::to_string(t));
    });
    content_of(storage, path);
  }
  CHECK(names_in(folder.path()).size() == 20);
}

TEST_CASE("what another process clears away at the same time is removed all the same") {
  const TemporaryFolder folder;
  std::atomic<bool> is_over{false};
  std::thread cleaner([&] {
    while (!is_over) disk::remove_leftovers(folder.path());
  });
  std::string failure;
  for (int i = 0; i < 100 && failure.empty(); ++i) {
    const std::filesystem::path checkpoint = folder.path() / concat("step-", i);
    std::filesystem::create_directory(checkpoint);
    for (int file = 0; file < 50; ++file) write_file(checkpoint / std::to_string(file), "x");
    try {
      disk::remove(checkpoint);
    } catch (const Error& error) {
      failure = error.message;
    }
  }
  is_over = true;
  cleaner.join();
  CHECK(failure.empty());
}

TEST_CASE("a storage of the host's that lacks a function is used as far as it goes") {
  stg_storage table = sized<stg_storage>();
  const Storage storage{&table};
  check_error(error_of([&] { storage.begin("x"); }), STG_UNIMPLEMENTED, {"`commit`"});
  check_error(error_of([&] { storage.open("x"); }), STG_UNIMPLEMENTED, {"`close`"});
  check_error(error_of([&] { storage.list("x"); }), STG_UNIMPLEMENTED, {"`list`"});
  check_error(error_of([&] { storage.remove("x"); }), STG_UNIMPLEMENTED, {"`remove`"});
  check_error(error_of([&] { storage.replace("x", ""); }), STG_UNIMPLEMENTED, {"`replace`"});
  table.struct_size = STG_STORAGE_MIN_SIZE - 8;
  check_error(error_of([&] { Storage{&table}; }), STG_INVALID_ARGUMENT, {"stg_storage.struct_size is 88"});
}

TEST_CASE("an error of the host's storage comes through with its code") {
  stg_storage table = sized<stg_storage>();
  table.remove = [](void*, stg_string path) {
    return to_abi(Error{STG_PERMISSION_DENIED, concat("bucket says no to ", text_of(path))});
  };
  check_error(error_of([&] { Storage{&table}.remove("step-1"); }), STG_PERMISSION_DENIED, {"bucket says no to step-1"});
}

TEST_CASE("a list of the host's storage must be a list of texts") {
  stg_storage table = sized<stg_storage>();
  table.list = [](void*, stg_string, stg_tree* names) -> stg_error* {
    *names = make_tree(make_list("b", "a")).give();
    return nullptr;
  };
  CHECK(Storage{&table}.list("x") == std::vector<std::string>{"a", "b"});
  table.list = [](void*, stg_string, stg_tree* names) -> stg_error* {
    *names = make_tree(make_list("b", int64_t{1})).give();
    return nullptr;
  };
  check_error(error_of([&] { Storage{&table}.list("x"); }), STG_INTERNAL, {"x", "int64 at 1"});
  table.list = [](void*, stg_string, stg_tree* names) -> stg_error* {
    *names = make_tree("b").give();
    return nullptr;
  };
  check_error(error_of([&] { Storage{&table}.list("x"); }), STG_INTERNAL, {"string"});
}

TEST_CASE("a transaction of the host's storage is ended once: by commit, also when it fails, or by rollback") {
  struct Counts {
    int commits = 0;
    int rollbacks = 0;
  } counts;
  stg_storage table = sized<stg_storage>();
  table.self = &counts;
  table.begin = [](void* self, stg_string, void** transaction) -> stg_error* {
    *transaction = self;
    return nullptr;
  };
  table.commit = [](void* self, void*) -> stg_error* {
    ++static_cast<Counts*>(self)->commits;
    return to_abi(Error{STG_UNAVAILABLE, "no"});
  };
  table.rollback = [](void* self, void*) { ++static_cast<Counts*>(self)->rollbacks; };
  const Storage storage{&table};
  {
    Transaction transaction = storage.begin("x");
    check_error(error_of([&] { transaction.commit(); }), STG_UNAVAILABLE, {"no"});
  }
  CHECK(counts.commits == 1);
  CHECK(counts.rollbacks == 0);
  {
    Transaction moved = storage.begin("x");
    const Transaction transaction{std::move(moved)};
  }
  CHECK(counts.commits == 1);
  CHECK(counts.rollbacks == 1);
}

TEST_CASE("a file's checksum is that of zlib, and a changed byte is found") {
  const TemporaryFolder folder;
  write_file(folder / "f", "123456789");
  CHECK(checksum_of(Storage{}.open(folder / "f")) == "crc32:cbf43926");
  write_file(folder / "empty", "");
  CHECK(checksum_of(Storage{}.open(folder / "empty")) == "crc32:00000000");
  verify_checksum(Storage{}.open(folder / "f"), "crc32:cbf43926");
  write_file(folder / "f", "123456780");
  check_error(error_of([&] { verify_checksum(Storage{}.open(folder / "f"), "crc32:cbf43926"); }), STG_DATA_LOSS,
              {folder / "f", "crc32:cbf43926 was written"});

  const std::string large(3'000'000, 'z');  // more than a chunk
  write_file(folder / "large", large);
  Checksum checksum;
  checksum.add(large.data(), 1'000'000);
  checksum.add(nullptr, 0);
  checksum.add(large.data(), 2'000'000);
  CHECK(checksum_of(Storage{}.open(folder / "large")) == checksum.text());
}
