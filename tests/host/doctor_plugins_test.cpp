// SPDX-License-Identifier: Apache-2.0
//
// stratagem doctor about plugin folders and LibTorch, each fault made of files.
#include "doctor.hpp"
#include "libstratagem/doctor/doctor.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

void copy_plugin(const fs::path& file, const fs::path& to) {
  fs::create_directories(to.parent_path());
  fs::copy_file(file, to);
  chmod(to.c_str(), 0755);
}

}  // namespace

TEST_CASE("doctor tells the plugin folders and how many plugins each has") {
  const TemporaryFolder folder;
  copy_plugin(TEST_BARE_STRATEGY, folder / "a/bare.so");
  copy_plugin(TEST_PLUGINS "/toy/toy_model.so", folder / "a/toy.so");
  const Check check = check_plugin_folders(Catalogue({folder / "a"}), {});
  CHECK(is_fine(check));
  CHECK(check.found == Contains{(folder / "a").string() + " (config): 2 plugins"});
}

TEST_CASE("doctor tells a plugin folder that is missing, refused or unreadable") {
  const TemporaryFolder folder;
  copy_plugin(TEST_BARE_STRATEGY, folder / "good/bare.so");
  check_complaint(check_plugin_folders(Catalogue({folder / "good", folder / "none"}), {}), Health::warning,
                  {(folder / "none").string() + " (config) is not searched: there is no such folder",
                   "take it out of the config's plugin_path"});
  copy_plugin(TEST_BARE_STRATEGY, folder / "open/bare.so");
  chmod((folder / "open").c_str(), 0777);
  check_complaint(check_plugin_folders(Catalogue({folder / "good", folder / "open"}), {}), Health::warning,
                  {"others can write to it (mode 777); chmod go-w"});
  const Unprivileged nobody(folder.path);
  fs::create_directory(folder / "closed");
  chmod((folder / "closed").c_str(), 0);
  const std::string said = complaints(check_plugin_folders(Catalogue({folder / "closed"}), {}));
  CHECK(said == Contains{"the folder " + (folder / "closed").string() + " (config) can't be read: Permission denied"});
  chmod((folder / "closed").c_str(), 0700);
}

TEST_CASE("doctor tells a file that looks like a plugin and can't be used") {
  const TemporaryFolder folder;
  copy_plugin(TEST_BARE_STRATEGY, folder / "bare.so");
  copy_plugin(TEST_PLUGINS "/bad/other_major.so", folder / "other_major.so");
  check_complaint(check_plugin_folders(Catalogue({folder.path}), {}), Health::warning,
                  {(folder / "other_major.so").string() + " can't be used: built for ABI 2.3"});
}

TEST_CASE("doctor finds a fault where a config's plugins are not to be had") {
  const TemporaryFolder folder;
  copy_plugin(TEST_BARE_STRATEGY, folder / "bare.so");
  Wanted wanted;
  wanted.strategy = "bared";
  check_complaint(check_plugin_folders(Catalogue({folder.path}), wanted), Health::fault,
                  {"the config wants the strategy \"bared\": there is no strategy \"bared\"; did you mean \"bare\"?"});
  wanted = {};
  wanted.plugin_files = {folder / "none.so"};
  check_complaint(check_plugin_folders(Catalogue({folder.path}), wanted), Health::fault,
                  {"the config names a plugin that can't be used: ", (folder / "none.so").string()});
}

TEST_CASE("doctor tells the LibTorch that plugins would load") {
  const TemporaryFolder folder;
  const FakeTorch torch(folder / "a");
  const std::vector<LibTorchCopy> copies = torch.copies();
  REQUIRE(copies.size() == 1);
  CHECK(copies[0].cpu == folder / "a/lib/libtorch_cpu.so");
  CHECK(copies[0].cuda == folder / "a/lib/libtorch_cuda.so");
  CHECK(copies[0].version == "2.15.0+cu132");
  CHECK(copies[0].cudart == "libcudart.so.13");
  const Check check = check_libtorch_copies(copies, torch.places);
  CHECK(is_fine(check));
  CHECK(check.found == "LibTorch 2.15.0+cu132, " + (folder / "a/lib/libtorch_cpu.so").string() + ", for 1 plugin");
  CHECK(check_libtorch_copies({}, torch.places).health() == Health::skipped);
}

TEST_CASE("LD_LIBRARY_PATH comes before a plugin's run path, and the loader's cache after both") {
  const TemporaryFolder folder;
  const FakeTorch own(folder / "own"), named(folder / "named"), cached(folder / "cached");
  LoaderPlaces places = own.places;
  places.cache = folder / "cache";
  write_file(places.cache, std::string("glibc-ld.so.cache1.1\0libtorch_cpu.so\0", 37) + (folder / "cached/lib").string() +
                               std::string("/libtorch_cpu.so\0more", 21));
  CHECK(own.copies(places)[0].cpu == folder / "own/lib/libtorch_cpu.so");
  places.library_path = (folder / "none").string() + ":" + (folder / "named/lib").string();
  CHECK(own.copies(places)[0].cpu == folder / "named/lib/libtorch_cpu.so");
  places.library_path = "";
  fs::remove(folder / "own/lib/libtorch_cpu.so");
  CHECK(own.copies(places)[0].cpu == folder / "cached/lib/libtorch_cpu.so");
}

TEST_CASE("doctor finds a fault where a plugin's LibTorch is not found, and says where it was looked for") {
  const TemporaryFolder folder;
  const FakeTorch torch(folder / "a");
  fs::remove(folder / "a/lib/libtorch_cpu.so");
  check_complaint(check_libtorch_copies(torch.copies(), torch.places), Health::fault,
                  {(folder / "a/plugin.so").string() + " needs libtorch_cpu.so of LibTorch 2.15.0, which is not found",
                   "LD_LIBRARY_PATH is not set, the plugin's run path " + (folder / "a/lib").string(), "install LibTorch 2.15"});
  write_file(folder / "a/lib/libtorch_cpu.so", "not a library");
  CHECK(check_libtorch_copies(torch.copies(), torch.places).health() == Health::fault);
}

TEST_CASE("doctor finds a fault where a plugin was built with another LibTorch than it would load") {
  const TemporaryFolder folder;
  const FakeTorch torch(folder / "a", "2.12.1", {{"libtorch", "2.15.0"}});
  check_complaint(check_libtorch_copies(torch.copies(), torch.places), Health::fault,
                  {"plugin.so was built with LibTorch 2.15.0, but would load 2.12.1", "build the plugin with LibTorch 2.12"});
}

TEST_CASE("doctor warns of a LibTorch that is older or newer than those of the tests") {
  const TemporaryFolder folder;
  for (const std::string version : {"2.10.1", "2.16.0+cu130", "1.13.1", "3.0.0"}) {
    const FakeTorch torch(folder / version, version, {{"libtorch", version}});
    check_complaint(check_libtorch_copies(torch.copies(), torch.places), Health::warning,
                    {"LibTorch " + version, "outside of what Stratagem is tested with, 2.11 to 2.15"});
  }
  for (const std::string version : {"2.11.0+cu130", "2.15.9", "2.13.0a0+git1"}) {
    const FakeTorch torch(folder / version, version, {{"libtorch", version}});
    CHECK(is_fine(check_libtorch_copies(torch.copies(), torch.places)));
  }
}

TEST_CASE("doctor warns of plugins that would load different copies of LibTorch") {
  const TemporaryFolder folder;
  const FakeTorch first(folder / "a"), second(folder / "b", "2.14.0", {{"libtorch", "2.14.0"}});
  const auto copies = find_libtorch({first.plugin, second.plugin, first.plugin}, first.places);
  REQUIRE(copies.size() == 2);
  const Check check = check_libtorch_copies(copies, first.places);
  check_complaint(check, Health::warning,
                  {"would load 2 copies of LibTorch", (folder / "a/lib/libtorch_cpu.so").string() + ", for 2 plugins",
                   "2.14.0, " + (folder / "b/lib/libtorch_cpu.so").string() + ", for 1 plugin"});
}

TEST_CASE("doctor looks at the plugins that a run would use, not at those that are shadowed or refused") {
  const TemporaryFolder folder;
  for (const char* name : {"a", "b"}) copy_plugin(TEST_PLUGINS "/toy/toy_model.so", folder / name / "toy.so");
  copy_plugin(TEST_PLUGINS "/bad/other_major.so", folder / "b/other_major.so");
  copy_plugin(TEST_BARE_STRATEGY, folder / "own/bare.so");
  Wanted wanted;
  wanted.plugin_files = {folder / "own/bare.so", folder / "none.so"};
  std::vector<std::string> used;
  for (const PluginFile& file : find_plugins(Catalogue({folder / "a", folder / "b"}), wanted)) {
    if (file.path.string().rfind(folder.path.string(), 0) == 0) used.push_back(file.path.string());
  }
  CHECK(used == std::vector<std::string>{(folder / "a/toy.so").string(), (folder / "own/bare.so").string()});
}

TEST_CASE("The status of a report is the worst of its checks, and of a check that of its problems") {
  Check fine("one"), skipped("two"), bad("three");
  skipped.is_skipped = true;
  CHECK(to_json(std::vector<Check>{fine, skipped})["status"] == "ok");
  bad.warn("it leaks", "mend it");
  CHECK(to_json(std::vector<Check>{fine, bad})["status"] == "warning");
  bad.fault("it sinks", "swim");
  bad.found = "a boat";
  const Json report = to_json(std::vector<Check>{skipped, bad});
  CHECK(report == Json::parse(R"({"schema_version": 1, "status": "fault", "checks": [
    {"id": "two", "status": "skipped", "found": "", "problems": []},
    {"id": "three", "status": "fault", "found": "a boat", "problems": [
      {"status": "warning", "wrong": "it leaks", "remedy": "mend it"}, {"status": "fault", "wrong": "it sinks", "remedy": "swim"}]}]})"));
}
