// SPDX-License-Identifier: Apache-2.0
//
// Where plugins are looked for, what is taken, and what is refused before it is opened.
#include "libstratagem/plugins/search.hpp"

#include <sys/stat.h>

#include <cstdlib>

#include "support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

/// STRATAGEM_PLUGIN_PATH for the life of this.
struct PluginPath {
  explicit PluginPath(const std::string& value) { setenv("STRATAGEM_PLUGIN_PATH", value.c_str(), 1); }
  ~PluginPath() { unsetenv("STRATAGEM_PLUGIN_PATH"); }
};

void copy_toy(const fs::path& to) {
  fs::create_directories(to.parent_path());
  fs::copy_file(TEST_PLUGINS "/toy/toy_model.so", to);
  chmod(to.c_str(), 0755);
}

}  // namespace

TEST_CASE("The config's folders come first, then the environment's, then the installation's, a later copy is shadowed") {
  const TemporaryFolder folder;
  for (const char* name : {"a", "b", "c"}) copy_toy(folder / name / "toy_model.so");
  const PluginPath variable((folder / "b").string() + ":" + (folder / "c").string());
  const Catalogue catalogue({folder / "a"});
  CHECK(catalogue.find(Offer::model, "toy").path == folder / "a/toy_model.so");
  std::vector<std::string> shadowed;
  for (const PluginFile& file : catalogue.files()) {
    if (file.path.string().rfind(folder.path.string(), 0) == 0)
      shadowed.push_back(file.path.parent_path().filename().string() + " " + file.shadowed);
  }
  const std::string winner = (folder / "a/toy_model.so").string();
  CHECK(shadowed == std::vector<std::string>{"a ", "b " + winner, "c " + winner});
  const Catalogue without({});
  CHECK(without.find(Offer::model, "toy").path == folder / "b/toy_model.so");
  CHECK(without.folders().at(0).origin == "STRATAGEM_PLUGIN_PATH");
  CHECK(without.folders().back().origin == "installation");
}

TEST_CASE("An unknown name is answered with the nearest, the available ones and the folders") {
  const TemporaryFolder folder;
  copy_toy(folder / "toy_model.so");
  const Error error = error_of([&] { Catalogue({folder.path}).find(Offer::model, "toi"); });
  CHECK(error.code == STG_NOT_FOUND);
  CHECK(error.message == Contains{"there is no model \"toi\"; did you mean \"toy\"? Available: "});
  CHECK(error.message == Contains{folder.path.string()});
}

TEST_CASE("The working directory is never searched, however it is named") {
  const TemporaryFolder folder;
  copy_toy(folder / "toy_model.so");
  const fs::path before = fs::current_path();
  fs::current_path(folder.path);
  {
    const PluginPath variable(".:");
    CHECK(error_of([] { Catalogue({}).find(Offer::model, "toy"); }).message ==
          Contains{"the working directory is never searched"});
  }
  CHECK(error_of([] { Catalogue({}).find(Offer::model, "toy"); }).code == STG_NOT_FOUND);
  fs::current_path(before);
}

TEST_CASE("A folder or file that others can write to is refused with the reason and the way out") {
  const TemporaryFolder folder;
  copy_toy(folder / "open/toy_model.so");
  chmod((folder / "open").c_str(), 0757);
  const Error error = error_of([&] { Catalogue({folder / "open"}).find(Offer::model, "toy"); });
  CHECK(error.code == STG_PERMISSION_DENIED);
  CHECK(error.message == Contains{(folder / "open/toy_model.so").string()});
  CHECK(error.message ==
        Contains{"the folder is refused: others can write to it (mode 757); chmod go-w " + (folder / "open").string()});
  chmod((folder / "open").c_str(), 0755);
  chmod((folder / "open/toy_model.so").c_str(), 0666);
  CHECK(error_of([&] { Catalogue({folder / "open"}).find(Offer::model, "toy"); }).message ==
        Contains{"others can write to it (mode 666)"});
  chmod((folder / "open/toy_model.so").c_str(), 0644);
  CHECK(Catalogue({folder / "open"}).find(Offer::model, "toy").problem == "");
}

TEST_CASE("A refused copy doesn't hide a good one in a later folder, and is told") {
  const TemporaryFolder folder;
  copy_toy(folder / "open/toy_model.so");
  copy_toy(folder / "good/toy_model.so");
  chmod((folder / "open").c_str(), 0777);
  const Catalogue by_folder({folder / "open", folder / "good"});
  CHECK(by_folder.find(Offer::model, "toy").path == folder / "good/toy_model.so");
  const std::vector<std::string> folders = by_folder.passed_over({{Offer::model, "toy"}});
  REQUIRE(folders.size() == 1);
  CHECK(folders[0] == Contains{"the folder " + (folder / "open").string() + " (config) is not searched: others can write to it"});

  chmod((folder / "open").c_str(), 0755);
  chmod((folder / "open/toy_model.so").c_str(), 0777);
  const Catalogue by_file({folder / "open", folder / "good"});
  CHECK(by_file.find(Offer::model, "toy").path == folder / "good/toy_model.so");
  const std::vector<std::string> files = by_file.passed_over({{Offer::model, "toy"}});
  REQUIRE(files.size() == 1);
  CHECK(files[0] ==
        Contains{"model \"toy\": passing over " + (folder / "open/toy_model.so").string() + ": others can write to it"});
  CHECK(by_file.passed_over({{Offer::model, "other"}, {Offer::strategy, ""}}).empty());
  CHECK(Catalogue({folder / "good", folder / "open"}).passed_over({{Offer::model, "toy"}}).empty());
}

TEST_CASE("A scan lists what looks like a plugin and isn't, and passes over libraries that plugins share") {
  const TemporaryFolder folder;
  write_file(folder / "text.so", "not ELF");
  fs::copy_file(TEST_PLUGINS "/bad/no_note.so", folder / "no_note.so");
  fs::copy_file(TEST_PLUGINS "/bad/other_major.so", folder / "other_major.so");
  write_file(folder / "readme.txt", "");
  const Catalogue catalogue({folder.path});
  std::map<std::string, std::string> problems;
  for (const PluginFile& file : catalogue.files()) {
    if (file.path.parent_path() == folder.path) problems[file.path.filename()] = file.problem;
  }
  REQUIRE(problems.size() == 2);
  CHECK(problems.at("text.so") == Contains{"not an ELF file"});
  CHECK(problems.at("other_major.so") == "built for ABI 2.3 to 2.5; this host speaks 1.0 to 1.0");
  CHECK(catalogue.available(Offer::strategy) == Catalogue({}).available(Offer::strategy));
  // Asked for by the name of the file, it was found, and can't be used.
  CHECK(error_of([&] { catalogue.find(Offer::strategy, "text"); }).code == STG_FAILED_PRECONDITION);
}

TEST_CASE("A folder that isn't there is told, not passed over") {
  const TemporaryFolder folder;
  const Error error = error_of([&] { Catalogue({folder / "none"}).find(Offer::model, "nothing"); });
  CHECK(error.message == Contains{(folder / "none").string() + " (refused: there is no such folder)"});
}
