// SPDX-License-Identifier: Apache-2.0
//
// The command line as a program: exit codes, what goes to stdout and to stderr. Nothing here needs LibTorch.
#include <sys/stat.h>

#include "support.hpp"

using namespace stratagem::test;

namespace {

/// A config file that is good but for the strategy, which these tests choose.
struct Config {
  Config() {
    write_samples(folder / "x.npy", {1, 2, 3});
    save(Json::parse(R"({
      "strategy": {"name": "none"}, "model": {"kind": "library", "path": "toy.so"}, "optimizer": {"name": "sgd", "lr": 0.1},
      "data": {"train": {"format": "npy", "inputs": "x.npy"}}})"));
    fs::copy_file(TEST_PLUGINS "/toy/toy_model.so", folder / "toy.so");
    chmod((folder / "toy.so").c_str(), 0755);
  }
  void save(const Json& json) const { write_file(folder / "c.json", json.dump()); }
  Finished fit(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words = {"fit", (folder / "c.json").string()};
    words.insert(words.end(), more.begin(), more.end());
    return run_stratagem(words);
  }
  TemporaryFolder folder;
};

}  // namespace

TEST_CASE("The option --version tells the version and the ABI's") {
  const Finished version = run_stratagem({"--version"});
  CHECK(version.code == 0);
  CHECK(version.out == "stratagem " STRATAGEM_VERSION " (ABI 1.0)\n");
}

TEST_CASE("A wrong command line ends with 2, and help with 0") {
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {}, {"train"}, {"fit"}, {"fit", "c.json", "--bogus"}, {"validate", "c.json"}, {"inspect"}, {"plugins", "a", "b"}}) {
    INFO(Json(words).dump());
    const Finished wrong = run_stratagem(words);
    CHECK(wrong.code == 2);
    CHECK(wrong.out.empty());
    CHECK(!wrong.err.empty());
  }
  for (const std::vector<std::string>& words : {std::vector<std::string>{"fit", "c.json", "--resume", ""},
                                                {"validate", "c.json", "--checkpoint", ""},
                                                {"test", "c.json", "--checkpoint", ""}}) {
    INFO(Json(words).dump());
    const Finished empty = run_stratagem(words);
    CHECK(empty.code == 2);
    CHECK(empty.err == Contains{"it is empty; name a folder"});
  }
  CHECK(run_stratagem({"--help"}).code == 0);
  CHECK(run_stratagem({"fit", "--help"}).out == Contains{"--resume"});
}

TEST_CASE("A config that is missing, no JSON, or wrong ends with 2 and all of its problems on stderr") {
  const Config config;
  CHECK(run_stratagem({"fit", "/nowhere/c.json"}).err ==
        "error: config: can't read /nowhere/c.json: No such file or directory\n");
  CHECK(run_stratagem({"fit", "/nowhere/c.json"}).code == 2);
  const Finished wrong = config.fit({"--set", "optimizer.lr=\"1e-3\"", "--set", "sede=1", "--set", "model.options.ww=1"});
  CHECK(wrong.code == 2);
  CHECK(wrong.out.empty());
  for (const char* part :
       {"/optimizer/lr: \"1e-3\"", "/sede: unknown key; did you mean \"seed\"?", "/strategy/name: there is no strategy \"none\"",
        "/model/options/ww: unknown key by the model \"toy\""}) {
    CHECK(wrong.err == Contains{part});
  }
  write_file(config.folder / "c.json", "{");
  CHECK(config.fit().code == 2);
  write_file(config.folder / "c.json", R"({"seed": 1, "seed": 2})");
  CHECK(config.fit().err == Contains{"/seed"});
  CHECK(config.fit().code == 2);
}

TEST_CASE("An override may stand before or after the config") {
  const Config config;
  const std::string path = (config.folder / "c.json").string();
  CHECK(run_stratagem({"fit", "--set", "seed=-5", path}).err == Contains{"/seed: -5"});
  CHECK(run_stratagem({"fit", path, "--set", "seed=-5"}).err == Contains{"/seed: -5"});
  CHECK(run_stratagem({"fit", "--set", "seed=-5", "--set", "seed=-6", path}).err == Contains{"/seed: -6"});
}

TEST_CASE("A plugin that was found and can't be loaded, or is refused, ends with 3") {
  const Config config;
  write_file(config.folder / "text.so", "x");
  for (const char* name : {"no_note", "other_major", "no_probe", "refuses", "missing_dependency"}) {
    fs::copy_file(fs::path(TEST_PLUGINS "/bad") / (std::string(name) + ".so"), config.folder / (std::string(name) + ".so"));
  }
  for (const char* name : {"text.so", "no_note.so", "other_major.so", "no_probe.so", "refuses.so", "missing_dependency.so"}) {
    INFO(name);
    const Finished refused = config.fit({"--set", std::string("strategy.name=./") + name});
    CHECK(refused.code == 3);
    CHECK(refused.err == Contains{(config.folder / name).string()});
  }
  const Finished missing = config.fit({"--set", "strategy.name=./missing_dependency.so"});
  CHECK(missing.err == Contains{"needs libdep.so"});
  chmod((config.folder / "no_probe.so").c_str(), 0777);
  CHECK(config.fit({"--set", "strategy.name=./no_probe.so"}).err == Contains{"others can write to it"});
}

TEST_CASE("A path that names no file ends with 2, with the absolute path") {
  const Config config;
  const Finished missing = config.fit({"--set", "strategy.name=./none.so"});
  CHECK(missing.code == 2);
  CHECK(missing.err == Contains{"/strategy/name: there is no file " + (config.folder / "none.so").string()});
  CHECK(config.fit({"--set", "strategy.path=none.so"}).err == Contains{"/strategy/path: there is no file "});
}

TEST_CASE("A refused plugin stands in one list with what else is wrong, as the config's mistake") {
  const Config config;
  fs::copy_file(TEST_PLUGINS "/bad/no_probe.so", config.folder / "no_probe.so");
  const Finished both = config.fit({"--set", "strategy.path=no_probe.so", "--set", "sede=1"});
  CHECK(both.code == 2);
  CHECK(both.err == Contains{"/sede: unknown key"});
  CHECK(both.err ==
        Contains{"/strategy/path: " + (config.folder / "no_probe.so").string() + " has a plugin's note, but no function"});
}

TEST_CASE("A plugin whose options schema is none ends with 3") {
  const Config config;
  fs::copy_file(TEST_PLUGINS "/bad/bad_schema.so", config.folder / "bad_schema.so");
  const Finished refused = config.fit({"--set", "strategy.name=./bad_schema.so"});
  CHECK(refused.code == 3);
  CHECK(refused.err == Contains{"the schema by the strategy \"bad\" is not valid"});
}

TEST_CASE("A result that can't be written ends with 1") {
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"plugins", "--json"}, {"schema"}, {"inspect", TEST_PLUGINS "/toy/toy_model.so"}}) {
    const Finished full = run_stratagem(words, "/", {}, {.out = "/dev/full"});
    CHECK(full.code == 1);
    CHECK(full.err == Contains{"can't write the result to stdout: No space left on device"});
  }
}

TEST_CASE("A plugin that is passed over for one behind it is told") {
  const Config config;
  for (const char* name : {"open", "good"}) {
    fs::create_directory(config.folder / name);
    fs::copy_file(TEST_PLUGINS "/toy/toy_model.so", config.folder / name / "toy.so");
  }
  chmod((config.folder / "open").c_str(), 0777);
  fs::copy_file(TEST_PLUGINS "/bad/none.so", config.folder / "strategy.so");
  const Finished fit = config.fit({"--set", "model.path=null", "--set", "model.name=toy", "--set", "strategy.name=./strategy.so",
                                   "--set", R"(plugin_path=["open", "good"])"});
  CHECK(fit.err ==
        Contains{"warning: the folder " + (config.folder / "open").string() + " (config) is not searched: others can"});
}

TEST_CASE("plugins lists what is found and where, what shadows what, and what can't be used") {
  const TemporaryFolder folder;
  for (const char* name : {"a", "b"}) {
    fs::create_directory(folder / name);
    fs::copy_file(TEST_PLUGINS "/toy/toy_model.so", folder / name / "toy.so");
  }
  write_file(folder / "b/text.so", "x");
  const std::map<std::string, std::string> environment = {
      {"STRATAGEM_PLUGIN_PATH", (folder / "b").string() + ":" + (folder / "a").string()}};
  const Json found = run_stratagem({"plugins", "--json"}, "/", environment).json();
  std::map<std::string, Json> by_path;
  for (const Json& plugin : found["plugins"]) by_path[plugin["path"]] = plugin;
  const Json first = by_path.at((folder / "b/toy.so").string());
  CHECK(first["models"] == Json{"toy"});
  CHECK(first["shadowed_by"].is_null());
  CHECK(first["problem"].is_null());
  CHECK(by_path.at((folder / "a/toy.so").string())["shadowed_by"] == (folder / "b/toy.so").string());
  CHECK(by_path.at((folder / "b/text.so").string())["problem"].get<std::string>() == Contains{"not an ELF file"});
  CHECK(found["folders"][0]["path"] == (folder / "b").string());
  const Finished text = run_stratagem({"plugins"}, "/", environment);
  CHECK(text.code == 0);
  CHECK(text.out == Contains{"shadowed by " + (folder / "b/toy.so").string()});
}

TEST_CASE("plugins searches a config's plugin_path, too") {
  const Config config;
  const fs::path toys = config.folder / "toys";
  fs::create_directory(toys);
  fs::copy_file(TEST_PLUGINS "/toy/toy_model.so", toys / "toy.so");
  config.save({{"plugin_path", {"toys"}}});
  CHECK(run_stratagem({"plugins", (config.folder / "c.json").string(), "--json"}).out == Contains{(toys / "toy.so").string()});
}

TEST_CASE("inspect prints the note of a file, and of one for another ABI, without loading it") {
  const Finished toy = run_stratagem({"inspect", TEST_PLUGINS "/toy/toy_model.so", "--json"});
  CHECK(toy.code == 0);
  CHECK(toy.json()["models"] == Json{"toy"});
  CHECK(run_stratagem({"inspect", TEST_PLUGINS "/bad/other_major.so", "--json"}).json()["abi"]["major"] == 2);
  const Finished none = run_stratagem({"inspect", TEST_PLUGINS "/bad/no_note.so"});
  CHECK(none.code == 2);
  CHECK(none.err == Contains{"without a note"});
  CHECK(run_stratagem({"inspect", "/nowhere.so"}).code == 2);
}

TEST_CASE("schema prints the config's schema, and a model's options") {
  const Finished schema = run_stratagem({"schema"});
  CHECK(Json::parse(schema.out)["title"] == "Stratagem config");
  const Finished options = run_stratagem({"schema", "--model", "toy"}, "/", {{"STRATAGEM_PLUGIN_PATH", TEST_PLUGINS "/toy"}});
  CHECK(Json::parse(options.out)["properties"].contains("raise_at"));
  CHECK(run_stratagem({"schema", "--model", "none"}).code == 2);
}

TEST_CASE("On a terminal errors are coloured, but not with NO_COLOR or on a dumb one, and never elsewhere") {
  const Config config;
  const std::vector<std::string> words = {"fit", (config.folder / "c.json").string()};
  using Environment = std::map<std::string, std::string>;
  const auto colours = [&](const Environment& environment, bool on_terminal) {
    const std::string err = run_stratagem(words, "/", environment, {.on_terminal = on_terminal}).err;
    CHECK(err == Contains{"there is no strategy"});
    return err.find("\033[") != std::string::npos;
  };
  CHECK(colours({{"TERM", "xterm"}}, true));
  CHECK(!colours({{"TERM", "xterm"}, {"NO_COLOR", "1"}}, true));
  CHECK(!colours({{"TERM", "dumb"}}, true));
  CHECK(!colours({{"TERM", "xterm"}}, false));
}

TEST_CASE("A plugin is opened by its absolute path, whatever LD_LIBRARY_PATH says") {
  const TemporaryFolder folder;
  for (const char* name : {"a", "b"}) fs::create_directory(folder / name);
  write_file(folder / "a/toy.so", "not this one");
  fs::copy_file(TEST_PLUGINS "/toy/toy_model.so", folder / "b/toy.so");
  const Finished schema =
      run_stratagem({"schema", "--model", "toy"}, folder / "a",
                    {{"STRATAGEM_PLUGIN_PATH", (folder / "b").string()}, {"LD_LIBRARY_PATH", (folder / "a").string()}});
  INFO(schema.err);
  CHECK(schema.code == 0);
}
