// SPDX-License-Identifier: Apache-2.0
//
// What is said about a wrong config: the place, the value, what is wanted, the nearest and the available names; all at once.
#include "libstratagem/config/config.hpp"

#include "libstratagem/config/overrides.hpp"
#include "libstratagem/config/overwrites.hpp"
#include "support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

/// A config with nothing wrong, and its data.
struct Good {
  Good() {
    write_samples(folder / "x.npy", {1, 2, 3});
    json = Json::parse(R"({
      "strategy": {"name": "single_device"}, "model": {"kind": "library", "name": "toy"}, "optimizer": {"name": "sgd", "lr": 0.1},
      "data": {"train": {"format": "npy", "inputs": "x.npy"}}})");
  }
  TemporaryFolder folder;
  Json json;

  Config read(Problems& problems, const std::vector<std::string>& overrides = {}, Command command = Command::fit) const {
    return check_config(read_config_text(json.dump(), folder.path, overrides), command, problems);
  }
  /// The config, which must have nothing wrong.
  Config read(const std::vector<std::string>& overrides = {}) const {
    Problems problems;
    Config config = read(problems, overrides);
    CHECK_NOTHROW(problems.raise("config"));
    return config;
  }
};

/// The problems of a config that is good but for one override, as "pointer: text" lines.
std::string problems_with(const std::string& override_text, Command command = Command::fit) {
  const Good good;
  Problems problems;
  good.read(problems, {override_text}, command);
  std::string lines;
  for (const Problem& problem : problems.all()) lines += problem.pointer + ": " + problem.text + "\n";
  return lines;
}

}  // namespace

TEST_CASE("A wrong value is answered with its pointer, itself, and what is wanted") {
  struct Row {
    const char* override_text;
    const char* problem;
  };
  const Row rows[] = {
      {"optimizer.lr=\"1e-3\"", "/optimizer/lr: \"1e-3\" is not allowed; wanted: a number, at least 0\n"},
      {"optimizer.name=adamm",
       "/optimizer/name: \"adamm\" is not allowed; wanted: \"sgd\", \"adam\", \"adamw\", \"rmsprop\" or \"adagrad\"; did you "
       "mean \"adam\"?\n"},
      {"optimizer.betas=[0.9]",
       "/optimizer/betas: [0.9] is not allowed; wanted: a list (each: a number, at least 0, at most 1), at least 2 long, at most "
       "2 long\n"},
      {"seed=-1", "/seed: -1 is not allowed; wanted: a whole number, at least 0\n"},
      {"seed=9223372036854775808",
       "/seed: 9223372036854775808 is not allowed; wanted: a whole number, at least 0, at most 9223372036854775807\n"},
      {"data.train.batch_size=18446744073709551615",
       "/data/train/batch_size: 18446744073709551615 is not allowed; wanted: a whole number, at least 1, at most "
       "9223372036854775807\n"},
      {"threads=65536", "/threads: 65536 is not allowed; wanted: a whole number, at least 1, at most 1024\n"},
      {"seed=1.5", "/seed: 1.5 is not allowed; wanted: a whole number, at least 0\n"},
      {"deterministic=1", "/deterministic: 1 is not allowed; wanted: true or false\n"},
      {"precision=8-true",
       "/precision: \"8-true\" is not allowed; wanted: \"32-true\", \"64-true\", \"16-mixed\" or \"bf16-mixed\"; did you mean "
       "\"32-true\"?\n"},
      {"trainer.max_steps=0", "/trainer/max_steps: 0 is not allowed; wanted: -1 or a whole number, at least 1\n"},
      {"trainer.max_steps=1e3", "/trainer/max_steps: 1000.0 is not allowed; wanted: -1 or a whole number, at least 1\n"},
      {"trainer.max_epochs=-1",
       "/trainer/max_epochs: -1 here, and neither /trainer/max_steps nor /trainer/max_time: training would never end; set one of "
       "them\n"},
      {"trainer.max_time=0",
       "/trainer/max_time: 0 is not allowed; wanted: a number, above 0 or a text, matching "
       "\"^[0-9]{1,6}:[0-9]{2}:[0-9]{2}:[0-9]{2}$\"\n"},
      {"trainer.max_time=1:30:00",
       "/trainer/max_time: \"1:30:00\" is not allowed; wanted: a number, above 0 or a text, matching "
       "\"^[0-9]{1,6}:[0-9]{2}:[0-9]{2}:[0-9]{2}$\"\n"},
      {"trainer.max_time=00:00:00:00", "/trainer/max_time: \"00:00:00:00\" is no time at all; leave it out to have no limit\n"},
      {"trainer.max_time=00:00:60:00",
       "/trainer/max_time: \"00:00:60:00\" has more than 23 hours, 59 minutes or 59 seconds in their places; carry them over, or "
       "give the time in seconds: 3600.0\n"},
      {"trainer.val_check_interval=0.25",
       "/trainer/val_check_interval: 0.25 is not allowed; wanted: a whole number, at least 1\n"},
      {"trainer={\"val_check_interval\":5,\"check_val_every_n_epoch\":2}",
       "/trainer/check_val_every_n_epoch: validation is counted in epochs by this, in updates by /trainer/val_check_interval; "
       "give "
       "one of them\n"},
      {"trainer.num_sanity_val_steps=-2",
       "/trainer/num_sanity_val_steps: -2 is not allowed; wanted: -1 or a whole number, at least 0\n"},
      {"trainer.limit_train_batches=0",
       "/trainer/limit_train_batches: 0 is not allowed; wanted: a whole number, at least 1 or a number, above 0, at most 1\n"},
      {"trainer.limit_val_batches=1.5",
       "/trainer/limit_val_batches: 1.5 is not allowed; wanted: a whole number, at least 1 or a number, above 0, at most 1\n"},
      {"trainer.overfit_batches=\"3\"",
       "/trainer/overfit_batches: \"3\" is not allowed; wanted: a whole number, at least 1 or a number, above 0, at most 1\n"},
      {"trainer={\"overfit_batches\":1,\"limit_train_batches\":1}",
       "/trainer/limit_train_batches: /trainer/overfit_batches says which batches are used; give one of them\n"},
      {"early_stopping={}", "/early_stopping/monitor: this key, a text, is required\n"},
      {"early_stopping.monitor=loss",
       "/early_stopping/monitor: \"loss\" must be a metric of validation, and there is no /data/validation; without it "
       "\"train_loss\" can be monitored\n"},
      {"early_stopping={\"monitor\":\"train_loss\",\"patience\":0}",
       "/early_stopping/patience: 0 is not allowed; wanted: a whole number, at least 1\n"},
      {"early_stopping={\"monitor\":\"train_loss\",\"mode\":\"maximum\"}",
       "/early_stopping/mode: \"maximum\" is not allowed; wanted: \"min\" or \"max\"\n"},
      {"checkpoint={\"dir\":\"r\",\"save_top_k\":2}",
       "/checkpoint/save_top_k: belongs to /checkpoint/monitor, which is not given\n"},
      {"checkpoint={\"dir\":\"r\",\"monitor\":\"train_loss\",\"save_top_k\":0}",
       "/checkpoint/save_top_k: 0 is not allowed; wanted: -1 or a whole number, at least 1\n"},
      {"strategy.devices=[0,-1]",
       "/strategy/devices: [0,-1] is not allowed; wanted: a whole number, at least 1, \"auto\" or a list (each: a whole number, "
       "at least "
       "0), at least 1 long\n"},
      {"strategy=5", "/strategy: 5 is not allowed; wanted: an object\n"},
      {"scheduler.name=cosin",
       "/scheduler/name: \"cosin\" is not allowed; wanted: \"constant\", \"step\", \"cosine\" or \"one_cycle\"; did you mean "
       "\"cosine\"?\n"},
      {"scheduler.name=step", "/scheduler/step_size: this key, a whole number, is required by the scheduler \"step\"\n"},
      {"scheduler={\"name\":\"constant\",\"gamma\":0.5}",
       "/scheduler/gamma: belongs to the scheduler \"step\", not to \"constant\"\n"},
      {"scheduler={\"name\":\"constant\",\"total_steps\":5}",
       "/scheduler/total_steps: belongs to the scheduler \"cosine\" or \"one_cycle\", not to \"constant\"\n"},
      {"data.train.batch_size=0", "/data/train/batch_size: 0 is not allowed; wanted: a whole number, at least 1\n"},
      {"data.train.inputs={\"path\":\"x.npy\",\"name\":\"x\"}",
       "/data/train/inputs/name: belongs to npz and safetensors, not to npy\n"},
      {"data.train.inputs={\"path\":\"x.npy\",\"columns\":[\"x\"]}", "/data/train/inputs/columns: belongs to csv, not to npy\n"},
      {"data.train.inputs={}", "/data/train/inputs/path: this key, a text, is required\n"},
      {"data.train.targets=3",
       "/data/train/targets: 3 is not allowed; wanted: a text or an object, at least 1 characters long\n"},
      {"checkpoint.keep_last=2", "/checkpoint/dir: this key, a text, is required\n"},
      {"plugin_path=[\"a\",3]", "/plugin_path/1: 3 is not allowed; wanted: a text, at least 1 characters long\n"},
  };
  for (const Row& row : rows) {
    INFO(row.override_text);
    CHECK(problems_with(row.override_text) == row.problem);
  }
}

TEST_CASE("An unknown key is answered with the nearest and the known ones") {
  CHECK(
      problems_with("optimzer.lr=1") ==
      "/optimzer: unknown key; did you mean \"optimizer\"? Available: $schema, checkpoint, data, deterministic, early_stopping, "
      "metrics, model, optimizer, plugin_path, precision, scheduler, seed, strategy, swap, threads, trainer\n");
  CHECK(problems_with("strategy.device=2") ==
        "/strategy/device: unknown key; did you mean \"devices\"? Available: accelerator, devices, name, options, path\n");
  CHECK(problems_with("early_stopping={\"monitor\":\"train_loss\",\"patient\":1}") ==
        "/early_stopping/patient: unknown key; did you mean \"patience\"? Available: min_delta, mode, monitor, patience, "
        "stopping_threshold\n");
  CHECK(problems_with("data.train.zzzzzzzzzzz=2") ==
        "/data/train/zzzzzzzzzzz: unknown key; Available: batch_size, format, inputs, limit, shuffle, source, targets\n");
}

TEST_CASE("A missing part is named, as the command needs it") {
  CHECK(problems_with("strategy=null") == "/strategy: this key, an object, is required\n");
  CHECK(problems_with("model.name=null") == "/model/name: this key or /model/path is required: which model\n");
  CHECK(problems_with("optimizer=null") == "/optimizer: this key is required to fit, as in {\"name\": \"sgd\", \"lr\": 0.01}\n");
  CHECK(problems_with("data.train=null") == "/data/train: this key is required to fit\n");
  CHECK(problems_with("optimizer=null", Command::validate) == "/data/validation: this key is required to validate\n");
  CHECK(problems_with("optimizer=null", Command::test) == "/data/test: this key is required to test\n");
}

TEST_CASE("A schedule over the run's length is refused where time alone ends the run") {
  const std::string scheduler = GENERATE("cosine", "one_cycle");
  const Good good;
  const auto problems_of = [&](const std::vector<std::string>& more) {
    Problems problems;
    std::vector<std::string> overrides = {"scheduler.name=" + scheduler, "trainer.max_time=60"};
    overrides.insert(overrides.end(), more.begin(), more.end());
    good.read(problems, overrides);
    return problems.all();
  };
  const auto problems = problems_of({});
  REQUIRE(problems.size() == 1);
  CHECK(problems[0].pointer == "/scheduler/total_steps");
  CHECK(problems[0].text == Contains{scheduler});
  CHECK(problems[0].text == Contains{"give it, or set /trainer/max_steps or /trainer/max_epochs"});
  for (const char* length : {"scheduler.total_steps=9", "trainer.max_steps=9", "trainer.max_epochs=2"})
    CHECK(problems_of({length}).empty());
}

TEST_CASE("All that is wrong is told at once, each place once") {
  const Good good;
  Problems problems;
  good.read(problems, {"optimizer.lr=x", "sede=1", "trainer.max_step=3", "model.kind=file", "data.train.inputs=nothing.npy"});
  std::vector<std::string> places;
  for (const Problem& problem : problems.all()) places.push_back(problem.pointer);
  std::sort(places.begin(), places.end());
  CHECK(places == std::vector<std::string>{"/data/train/inputs", "/model/kind", "/optimizer/lr", "/sede", "/trainer/max_step"});
  const Error error = error_of([&] { problems.raise("the config"); });
  CHECK(error.code == STG_INVALID_ARGUMENT);
  CHECK(error.message == Contains{"the config:\n  /"});
  for (const std::string& place : places) CHECK(error.message == Contains{"\n  " + place + ": "});
}

TEST_CASE("A time is seconds, or days, hours, minutes and seconds") {
  const Good good;
  CHECK(good.read({"trainer.max_time=90.5"}).trainer.max_time_s == 90.5);
  CHECK(good.read({"trainer.max_time=01:02:03:04"}).trainer.max_time_s == 86400 + 2 * 3600 + 3 * 60 + 4);
  CHECK(good.read({"trainer.max_time=999999:23:59:59"}).trainer.max_time_s == 1e6 * 86400 - 1);
  for (const char* time : {"00:24:00:00", "00:00:60:00", "00:00:00:60", "99:99:99:99"}) {
    Problems problems;
    good.read(problems, {std::string("trainer.max_time=") + time});
    REQUIRE(problems.all().size() == 1);
    CHECK(problems.all()[0].pointer == "/trainer/max_time");
    CHECK(problems.all()[0].text == Contains{std::string("\"") + time + "\" has more than 23 hours, 59 minutes or 59 seconds"});
  }
  CHECK(good.read({"trainer.max_time=90.5"}).trainer.max_epochs == no_limit);
  CHECK(!good.read({"trainer.max_time=null"}).trainer.max_time_s);
}

TEST_CASE("Batches are a number, or with a decimal point a share") {
  const Good good;
  const auto limit = [&](const std::string& value) {
    return good.read({"trainer.limit_train_batches=" + value}).trainer.limit_train_batches.of(10);
  };
  CHECK(limit("1") == 1);
  CHECK(limit("1.0") == 10);
  CHECK(limit("0.5") == 5);
  CHECK(limit("1e-1") == 1);
  CHECK(limit("null") == 10);
}

TEST_CASE("Null counts as absent, in the file and on the command line") {
  Good good;
  good.json["scheduler"] = nullptr;
  good.json["trainer"] = {{"max_steps", nullptr}, {"max_epochs", nullptr}};
  good.json["checkpoint"] = {{"dir", "run"}, {"monitor", nullptr}, {"save_top_k", nullptr}};
  const Config config = good.read({"seed=null", "early_stopping=null", "trainer.val_check_interval=null",
                                   "trainer.overfit_batches=null", "trainer.num_sanity_val_steps=null"});
  CHECK(!config.early_stopping);
  CHECK(!config.checkpoint->monitor);
  CHECK(!config.trainer.val_check_interval);
  CHECK(!config.trainer.overfits);
  CHECK(config.trainer.num_sanity_val_steps == 2);
  CHECK(config.scheduler.name == "constant");
  CHECK(config.trainer.max_steps == no_limit);
  CHECK(config.trainer.max_epochs == 1);
  CHECK(config.seed == 0);
  CHECK(!config.json.contains("scheduler"));
  CHECK(good.read({"scheduler.name=cosine", "scheduler=null"}).scheduler.name == "constant");
}

TEST_CASE("The command line wins over the file, and the last --set over those before") {
  Good good;
  good.json["seed"] = 1;
  CHECK(good.read().seed == 1);
  CHECK(good.read({"seed=5"}).seed == 5);
  CHECK(good.read({"seed=5", "seed=6"}).seed == 6);
}

TEST_CASE("An override's value is JSON where it is valid JSON, else a text") {
  const Good good;
  CHECK(good.read({"optimizer.lr=1e-3"}).lr == 0.001);
  CHECK(good.read({"strategy.devices=[1,0]"}).json["strategy"]["devices"] == Json({1, 0}));
  CHECK(good.read({"strategy.name=data_parallel"}).strategy.name == "data_parallel");
  CHECK(good.read({"strategy.name=\"true\""}).strategy.name == "true");
  CHECK(good.read({"strategy.options.a.b=a=b"}).strategy.options == Json{{"a", {{"b", "a=b"}}}});
}

TEST_CASE("A malformed --set is shown with the way it is written") {
  for (const char* text : {"seed", "=1"}) {
    Json json = Json::object();
    CHECK(error_of([&] { apply_overrides(json, {text}); }).message == Contains{"write it as key.key=value"});
  }
  Json json = {{"seed", 1}};
  CHECK(error_of([&] { apply_overrides(json, {"a..b=1"}); }).message == Contains{"an empty key in \"a..b\""});
  CHECK(error_of([&] { apply_overrides(json, {"seed.x=1"}); }).message == Contains{"\"seed\" is 1, which has no keys"});
}

TEST_CASE("A text that is not UTF-8 is refused, in a file and with --set, before anything is trained that could not be saved") {
  Json json = Json::object();
  const Error override_error = error_of([&] { apply_overrides(json, {"metrics.path=m\xFF.jsonl"}); });
  CHECK(override_error.code == STG_INVALID_ARGUMENT);
  CHECK(override_error.message == Contains{"the override \"metrics.path=m"});
  CHECK(override_error.message == Contains{"is not UTF-8"});
  const Error file = error_of([] { read_config_text("{\"metrics\": \"m\xFF\"}", "/", {}); });
  CHECK(file.code == STG_INVALID_ARGUMENT);
  CHECK(file.message == Contains{"UTF-8"});
}

TEST_CASE("Comments are allowed, and a key that stands twice is refused with its pointer") {
  const Json json = read_config_text("{ /* one */ \"seed\": 1 // two\n }", "/", {}).json;
  CHECK(json == Json{{"seed", 1}});
  const Error twice = error_of([] { read_config_text(R"({"seed": 1, "seed": 2})", "/", {}); });
  CHECK(twice.code == STG_INVALID_ARGUMENT);
  CHECK(twice.message == Contains{"/seed"});
  CHECK(error_of([] { read_config_text(R"({"a": [{"b": 1, "b": 1}]})", "/", {}); }).message == Contains{"/a/0/b"});
}

TEST_CASE("A text that is no JSON is told with line and column") {
  const Error error = error_of([] { read_config_text("{\n  \"seed\": 1,\n  \"x\" 2\n}", "/", {}); });
  CHECK(error.code == STG_INVALID_ARGUMENT);
  CHECK(error.message == Contains{"line 3"});
  CHECK(error_of([] { read_config_text("[1]", "/", {}); }).message == Contains{"a config is a JSON object, not [1]"});
}

TEST_CASE("Paths are relative to the config's folder, data paths to data.root") {
  Good good;
  write_samples(good.folder / "data/y.npy", {1, 2, 3});
  good.json["checkpoint"] = {{"dir", "runs/../a"}};
  good.json["metrics"] = {{"path", "/m.jsonl"}};
  good.json["plugin_path"] = {"p"};
  good.json["model"] = {{"kind", "library"}, {"name", "./lib/my.so"}};
  good.json["data"]["root"] = "data";
  good.json["data"]["train"]["inputs"] = "y.npy";
  const Config config = good.read();
  CHECK(config.checkpoint->dir == good.folder / "a");
  CHECK(*config.metrics == "/m.jsonl");
  CHECK(config.plugin_path == std::vector<fs::path>{good.folder / "p"});
  CHECK(config.model.path == good.folder / "lib/my.so");
  CHECK(config.model.name.empty());
  CHECK(config.train->inputs.path == good.folder / "data/y.npy");
}

TEST_CASE("A TorchScript file is handed to the plugin of that name, by its absolute path") {
  Good good;
  write_file(good.folder / "m.pt", "");
  good.json["model"] = {{"kind", "torchscript"}, {"path", "m.pt"}, {"options", {{"loss", "mse_loss"}}}};
  const Config config = good.read();
  CHECK(config.model.name == "torchscript");
  CHECK(!config.model.path);
  CHECK(config.model.options == Json{{"loss", "mse_loss"}, {"path", (good.folder / "m.pt").string()}});
  CHECK(problems_with(R"(model={"kind":"torchscript"})") == "/model/path: this key is required: the TorchScript file\n");
  CHECK(problems_with(R"(model={"kind":"torchscript","name":"m"})") ==
        "/model/name: belongs to the kind \"library\"; a TorchScript file is named by /model/path\n");
  CHECK(problems_with(R"(model={"kind":"torchscript","path":"none.pt"})") == Contains{"/model/path: can't read /"});
}

TEST_CASE("A path that begins with ~ is refused, and a missing file is told with its absolute path") {
  CHECK(problems_with("checkpoint.dir=~/r") ==
        "/checkpoint/dir: \"~/r\": \"~\" is not expanded here; write the whole path (or $HOME, unquoted, in a shell)\n");
  const Good good;
  Problems problems;
  good.read(problems, {"data.train.inputs=none.npy", "data.train.targets=."});
  REQUIRE(problems.all().size() == 2);
  CHECK(problems_with("data.train.inputs={\"path\":\"none.npy\"}") == Contains{"/data/train/inputs/path: can't read /"});
  CHECK(problems.all()[0].text == "can't read " + (good.folder / "none.npy").string() + ": No such file or directory");
  CHECK(problems.all()[1].text == Contains{" is a folder; a file is wanted"});
}

TEST_CASE("With max_steps alone, that is the only limit") {
  const Good good;
  CHECK(good.read({"trainer.max_steps=7"}).trainer.max_epochs == no_limit);
  CHECK(good.read({"trainer.max_steps=7", "trainer.max_epochs=2"}).trainer.max_epochs == 2);
}

TEST_CASE("A strategy is given the parts of the config that are its affair") {
  Good good;
  good.json["precision"] = "64-true";
  good.json["seed"] = 3;
  good.json["deterministic"] = true;
  good.json["threads"] = 5;
  good.json["strategy"] = {{"name", "s"}, {"accelerator", "cpu"}, {"devices", 2}, {"options", {{"a", 1}}}};
  CHECK(strategy_config(good.read()) == Json{{"precision", "64-true"},
                                             {"seed", 3},
                                             {"deterministic", true},
                                             {"threads", 5},
                                             {"accelerator", "cpu"},
                                             {"devices", 2},
                                             {"options", {{"a", 1}}},
                                             {"optimizer", {{"name", "sgd"}, {"lr", 0.1}}}});
}

TEST_CASE("What a strategy says about its part of the config is told with the config's pointer") {
  CHECK(with_config_pointer("/devices/0 is -1") == "/strategy/devices/0 is -1");
  CHECK(with_config_pointer("/options/split is 3") == "/strategy/options/split is 3");
  CHECK(with_config_pointer("/precision is 3") == "/precision is 3");
}

TEST_CASE("The example config is valid, and so is a copy of it") {
  const Json schema = Json::parse(config_schema_text());
  Problems problems;
  check_schema(schema, read_config_file(TEST_SOURCE "/host/examples/fashion.json", {}).json, "", "", problems);
  CHECK_NOTHROW(problems.raise("fashion.json"));
}

TEST_CASE("A plugin's own schema is checked at its place, and its owner named") {
  const Json schema = Json::parse(R"({"type": "object", "additionalProperties": false, "required": ["size"],
    "properties": {"size": {"type": "integer", "exclusiveMinimum": 0}, "mode": {"enum": ["fast", "slow", 3]}}})");
  Problems problems;
  check_schema(schema, {{"size", 0}, {"mode", "fats"}, {"sizes", 1}}, "/model/options", " by the model \"m\"", problems);
  std::map<std::string, std::string> found;
  for (const Problem& problem : problems.all()) found[problem.pointer] = problem.text;
  CHECK(found.at("/model/options/size") == "0 is not allowed by the model \"m\"; wanted: a whole number, above 0");
  CHECK(found.at("/model/options/mode") ==
        "\"fats\" is not allowed by the model \"m\"; wanted: \"fast\", \"slow\" or 3; did you mean \"fast\"?");
  CHECK(found.at("/model/options/sizes") == "unknown key by the model \"m\"; did you mean \"size\"? Available: mode, size");
  const Error invalid = error_of([&] { check_schema({{"type", 5}}, Json::object(), "", " by the model \"m\"", problems); });
  CHECK(invalid.code == STG_FAILED_PRECONDITION);
  CHECK(invalid.message == Contains{"the schema by the model \"m\" is not valid"});
}

TEST_CASE("A run doesn't write over what it reads, nor over what it writes elsewhere") {
  Good good;
  good.json["data"]["test"] = {{"format", "npy"}, {"inputs", "m.jsonl.previous"}, {"targets", "run/last"}};
  good.json["checkpoint"] = {{"dir", "ckpt"}};
  write_file(good.folder / "c.json", good.json.dump());
  write_file(good.folder / "old/state.json", "{}");
  write_file(good.folder / "old/weights.safetensors", "");
  fs::create_symlink(good.folder / "x.npy", good.folder / "link");
  const auto problem = [&](const std::string& override_text) {
    const ConfigText text = read_config_file(good.folder / "c.json", {override_text});
    Problems problems;
    check_overwrites(check_config(text, Command::fit, problems), Command::fit, {}, problems);
    REQUIRE(problems.all().size() <= 1);
    return problems.empty() ? "" : problems.all()[0].pointer + ": " + problems.all()[0].text;
  };
  const auto file = [&](const std::string& name) { return (good.folder / name).string(); };
  const std::string end = " and would be overwritten; give another path";
  CHECK(problem("metrics.path=other.jsonl") == "");
  CHECK(problem("metrics.path=x.npy") == "/metrics/path: " + file("x.npy") + " is the file of /data/train/inputs" + end);
  CHECK(problem("metrics.path=link") == "/metrics/path: " + file("link") + " is the file of /data/train/inputs" + end);
  CHECK(problem("metrics.path=./c.json") == "/metrics/path: " + file("c.json") + " is the config itself" + end);
  CHECK(problem("metrics.path=m.jsonl") ==
        "/metrics/path: " + file("m.jsonl.previous") + " is the file of /data/test/inputs" + end);
  CHECK(problem("checkpoint.dir=run") == "/checkpoint/dir: " + file("run/last") + " is the file of /data/test/targets" + end);
  CHECK(problem("metrics.path=ckpt/best") == Contains{"where the run keeps the name of its best checkpoint" + end});
  CHECK(problem("metrics.path=old/state.json") == Contains{file("old/state.json") + " lies in a checkpoint"});
  CHECK(problem(R"(model={"kind": "library", "path": "m.so"})") == "");
  CHECK(problem(R"(metrics.path=m.so)") == "");
  good.json["model"] = {{"kind", "library"}, {"path", "m.so"}};
  write_file(good.folder / "c.json", good.json.dump());
  CHECK(problem("metrics.path=m.so") == "/metrics/path: " + file("m.so") + " is the file of /model/path" + end);
  const Error error = error_of([&] {
    Problems problems;
    check_overwrites(check_config(read_config_file(good.folder / "c.json", {}), Command::predict, problems), Command::predict,
                     good.folder / "x.npy", problems);
  });
  CHECK(error.message == "predictions: " + file("x.npy") + " is the file of /data/train/inputs" + end);
}

TEST_CASE("A text with a zero byte in it is no JSON, and a path has none") {
  const std::string whole = R"({"seed": 1})";
  CHECK(error_of([&] { read_config_text(whole + '\0' + "garbage", "/", {}); }).message == Contains{"not JSON"});
  CHECK(problems_with(R"(metrics.path="m\u0000.jsonl")") ==
        Contains{"/metrics/path: \"m\\u0000.jsonl\": a path has no zero byte"});
}
