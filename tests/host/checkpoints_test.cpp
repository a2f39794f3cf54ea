// SPDX-License-Identifier: Apache-2.0
//
// Which checkpoints there are, which is the newest, which go.
#include "libstratagem/loop/checkpoints.hpp"

#include <sys/stat.h>

#include "base/disk.hpp"
#include "base/safetensors.hpp"
#include "support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

/// Writes what a strategy would: a folder with a weights file.
void save_whole(const std::string& folder) {
  Storage storage;
  Transaction transaction = storage.begin(folder);
  const TensorPtr tensor = allocate_tensor(float32, {16});
  write_safetensors(transaction, "model.safetensors", {{"w", &tensor->view}});
  transaction.commit();
}

void damage(const fs::path& checkpoint) {
  const std::string whole = read_file(checkpoint / "model.safetensors");
  write_file(checkpoint / "model.safetensors", whole.substr(0, whole.size() / 2));
}

struct Run {
  explicit Run(std::optional<int64_t> keep_last) {
    config.dir = folder / "run";
    config.keep_last = keep_last;
    config.every_n_steps = 1;
  }
  TemporaryFolder folder;
  CheckpointConfig config;
  std::vector<std::string> warnings;

  Checkpoints open(std::optional<int64_t> resumed_step = {}) {
    return Checkpoints(config, resumed_step, [this](const std::string& text) { warnings.push_back(text); });
  }
  std::vector<std::string> left() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(config.dir)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }
};

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("A checkpoint's name holds its step, and only such names are read") {
  CHECK(checkpoint_name(200) == "step-00000200");
  CHECK(checkpoint_name(1234567890) == "step-1234567890");
  CHECK(step_of("step-00000200") == 200);
  CHECK(step_of("step-1234567890") == 1234567890);
  for (const char* name :
       {"step-200", "step-0000020x", "step-", "last", "xstep-00000200", "step--0000001", ".step-00000200.tmp-1-1"}) {
    INFO(name);
    CHECK(!step_of(name));
  }
}

TEST_CASE("keep_last keeps the newest by number, not by text") {
  Run run(2);
  Checkpoints checkpoints = run.open();
  for (int64_t step = 1; step <= 11; ++step) checkpoints.save(step, save_whole);
  CHECK(run.left() == Names{"last", "step-00000010", "step-00000011"});
  CHECK(read_file(run.config.dir / "last") == "step-00000011\n");
  CHECK(checkpoints.newest() == run.config.dir / "step-00000011");
}

TEST_CASE("keep_last 1 leaves exactly the newest, also past the number of digits") {
  Run run(1);
  Checkpoints checkpoints = run.open();
  for (const int64_t step : {99999999, 100000000}) checkpoints.save(step, save_whole);
  CHECK(run.left() == Names{"last", "step-100000000"});
}

TEST_CASE("Without keep_last all stay") {
  Run run({});
  Checkpoints checkpoints = run.open();
  for (int64_t step = 1; step <= 3; ++step) checkpoints.save(step, save_whole);
  CHECK(run.left() == Names{"last", "step-00000001", "step-00000002", "step-00000003"});
}

TEST_CASE("The best stay beside keep_last's, and those that were saved for being best go when they are it no more") {
  Run run(1);
  Checkpoints checkpoints = run.open();
  checkpoints.save(1, save_whole, {1}, true);
  checkpoints.save(2, save_whole, {1});
  CHECK(run.left() == Names{"best", "last", "step-00000001", "step-00000002"});
  checkpoints.save(3, save_whole, {3, 1}, true);
  CHECK(run.left() == Names{"best", "last", "step-00000001", "step-00000002", "step-00000003"});
  CHECK(read_file(run.config.dir / "best") == "step-00000003\n");
  checkpoints.save(4, save_whole, {3});
  CHECK(run.left() == Names{"best", "last", "step-00000003", "step-00000004"});
  // The newest stays, whatever it was saved for, until there is a newer one.
  checkpoints.save(5, save_whole, {5}, true);
  CHECK(run.left() == Names{"best", "last", "step-00000004", "step-00000005"});
  checkpoints.keep_newest();
  CHECK(run.left() == Names{"best", "last", "step-00000005"});
}

TEST_CASE("After a resume the best of before stay until they are it no more") {
  Run run(1);
  run.open().save(1, save_whole, {1}, true);
  run.open(1).save(2, save_whole, {1});
  CHECK(run.left() == Names{"best", "last", "step-00000001", "step-00000002"});
  run.open(2).save(3, save_whole, {3});
  CHECK(run.left() == Names{"best", "last", "step-00000003"});
}

TEST_CASE("A killed save leaves `best` at a whole checkpoint, which goes on to be it") {
  // Killed between the two pointers: `best` is new, `last` is old.
  Run run(1);
  run.open().save(1, save_whole, {1}, true);
  save_whole((run.config.dir / "step-00000002").string());
  write_file(run.config.dir / "best", "step-00000002\n");
  Checkpoints checkpoints = run.open(1);
  CHECK(checkpoint_candidates(run.config.dir / "best") == std::vector<fs::path>{run.config.dir / "step-00000002"});
  checkpoints.save(2, save_whole, {2});
  CHECK(run.left() == Names{"best", "last", "step-00000002"});
}

TEST_CASE("A folder that somebody has called best is left alone by a run without a monitor") {
  Run run(1);
  save_whole((run.config.dir / "best").string());
  run.open().save(1, save_whole);
  CHECK(run.left() == Names{"best", "last", "step-00000001"});
  CHECK(checkpoint_candidates(run.config.dir / "best") == std::vector<fs::path>{run.config.dir / "best"});
}

TEST_CASE("A folder in the place of `last` or `best` is told before anything is trained") {
  Run run(1);
  run.config.monitor = Monitor{};
  const std::string name = GENERATE("last", "best");
  fs::create_directories(run.config.dir / name);
  const Error error = error_of([&] { run.open(); });
  CHECK(error.code == STG_FAILED_PRECONDITION);
  CHECK(error.message == Contains{(run.config.dir / name).string() + " is a folder"});
  CHECK(error.message == Contains{"/checkpoint/dir"});
}

TEST_CASE("A file that names no checkpoint is none") {
  const TemporaryFolder folder;
  write_file(folder / "best", "nothing\n");
  CHECK(error_of([&] { checkpoint_candidates(folder / "best"); }).message ==
        (folder / "best").string() + " is a file that names no checkpoint");
}

TEST_CASE("A save that fails leaves the one before, and `last` points to that") {
  Run run(1);
  Checkpoints checkpoints = run.open();
  checkpoints.save(1, save_whole);
  CHECK(error_of([&] {
          checkpoints.save(2, [](const std::string&) { throw Error(STG_RESOURCE_EXHAUSTED, "disk full"); });
        }).message == "disk full");
  CHECK(run.left() == Names{"last", "step-00000001"});
  CHECK(read_file(run.config.dir / "last") == "step-00000001\n");
}

TEST_CASE(
    "A checkpoint that can't be read is not counted and not removed, a killed save's leftovers are gone after the next save") {
  Run run(2);
  const Unprivileged reader(run.folder.path);
  for (const char* name : {"step-00000010", "step-00000020", "step-00000030"}) save_whole((run.config.dir / name).string());
  damage(run.config.dir / "step-00000030");
  // A tensor of a type that only another version knows, and a folder of somebody else.
  save_whole((run.config.dir / "step-00000007").string());
  const fs::path other = run.config.dir / "step-00000007/model.safetensors";
  std::string content = read_file(other);
  content.replace(content.find("\"F32\""), 5, "\"F8X\"");
  write_file(other, content);
  save_whole((run.config.dir / "step-00000008").string());
  chmod((run.config.dir / "step-00000008").c_str(), 0);
  write_file(run.config.dir / ".step-00000025.tmp-99999-1/model.safetensors", "half");
  Checkpoints checkpoints = run.open(20);
  REQUIRE(run.warnings.size() == 3);
  const char* const unreadable[] = {"step-00000007", "step-00000008", "step-00000030"};
  for (size_t i = 0; i < 3; ++i) {
    CHECK(run.warnings[i] == Contains{std::string(unreadable[i]) + " can't be read ("});
    CHECK(run.warnings[i] == Contains{"it stays, and keep_last doesn't count it"});
  }
  checkpoints.save(21, save_whole);
  CHECK(run.left() == Names{"last", "step-00000007", "step-00000008", "step-00000020", "step-00000021", "step-00000030"});
}

TEST_CASE("An old checkpoint that can't be removed is told, and the run goes on") {
  Run run(1);
  const Unprivileged owner(run.folder.path);
  Checkpoints checkpoints = run.open();
  checkpoints.save(1, save_whole);
  write_file(run.config.dir / "step-00000001/locked/file", "");
  chmod((run.config.dir / "step-00000001/locked").c_str(), 0555);
  checkpoints.save(2, save_whole);
  REQUIRE(run.warnings.size() == 1);
  CHECK(run.warnings[0] == Contains{"can't remove "});
  CHECK(run.warnings[0] == Contains{"step-00000001"});
  CHECK(read_file(run.config.dir / "last") == "step-00000002\n");
  checkpoints.save(3, save_whole);
  CHECK(checkpoints.newest() == run.config.dir / "step-00000003");
  CHECK(!fs::exists(run.config.dir / "step-00000002"));
  for (const auto& entry : fs::recursive_directory_iterator(run.config.dir)) {
    if (entry.is_directory()) fs::permissions(entry.path(), fs::perms::owner_all, fs::perm_options::add);
  }
}

TEST_CASE("Another run's checkpoints are neither counted nor removed") {
  Run run(1);
  for (const char* name : {"step-00000005", "step-00000400"}) save_whole((run.config.dir / name).string());
  Checkpoints checkpoints = run.open(5);
  REQUIRE(run.warnings.size() == 1);
  CHECK(run.warnings[0] == Contains{"holds 1 checkpoint that this run does not continue"});
  checkpoints.save(6, save_whole);
  CHECK(run.left() == Names{"last", "step-00000006", "step-00000400"});
}

TEST_CASE("A run's folder gives the checkpoint that `last` names, then the others from the highest number down") {
  const TemporaryFolder folder;
  for (const char* name : {"step-00000003", "step-00000010", "step-100000000"}) fs::create_directory(folder / name);
  using Paths = std::vector<fs::path>;
  CHECK(checkpoint_candidates(folder.path) ==
        Paths{folder / "step-100000000", folder / "step-00000010", folder / "step-00000003"});
  write_file(folder / "last", "step-00000010\n");
  CHECK(checkpoint_candidates(folder.path) ==
        Paths{folder / "step-00000010", folder / "step-100000000", folder / "step-00000003"});
  write_file(folder / "step-00000003/x", "");
  CHECK(checkpoint_candidates(folder / "step-00000003") == Paths{folder / "step-00000003"});
  CHECK(checkpoint_candidates(folder / "step-00000003/") == Paths{folder / "step-00000003"});
}

TEST_CASE("A folder that isn't there, is empty, or whose `last` names nothing, is told with its absolute path") {
  const TemporaryFolder folder;
  const Error none = error_of([&] { checkpoint_candidates(folder / "none"); });
  CHECK(none.code == STG_NOT_FOUND);
  CHECK(none.message == "there is no checkpoint folder " + (folder / "none").string());
  CHECK(error_of([&] { checkpoint_candidates(folder.path); }).message ==
        folder.path.string() + " holds no checkpoint: it is empty");
  write_file(folder / "last", "step-00000010\n");
  CHECK(error_of([&] { checkpoint_candidates(folder.path); }).message ==
        folder.path.string() + " holds no checkpoint; its file \"last\" names step-00000010");
}

TEST_CASE("A checkpoint's damage is told by its files") {
  const TemporaryFolder folder;
  save_whole((folder / "a").string());
  CHECK(damage_of(folder / "a") == "");
  damage(folder / "a");
  CHECK(damage_of(folder / "a") == Contains{"model.safetensors"});
  fs::create_directory(folder / "b");
  CHECK(damage_of(folder / "b") == (folder / "b").string() + " is empty");
}

TEST_CASE("A second run in the same folder is told while the first one lives") {
  Run run(1);
  fs::create_directories(run.config.dir);
  Checkpoints first = run.open();
  CHECK(run.warnings.empty());
  static_cast<void>(run.open());
  REQUIRE(run.warnings.size() == 1);
  CHECK(run.warnings[0] == Contains{"another run writes its checkpoints to " + run.config.dir.string()});
  first.finish();
  static_cast<void>(run.open());
  CHECK(run.warnings.size() == 1);
}

TEST_CASE("A folder with a checkpoint's name that doesn't look like one is told before anything is trained") {
  Run run(1);
  write_file(run.config.dir / "step-00000005/notes.txt", "mine");
  static_cast<void>(run.open());
  REQUIRE(run.warnings.size() == 2);
  CHECK(run.warnings[0] == Contains{"step-00000005 doesn't look like a checkpoint"});
}
