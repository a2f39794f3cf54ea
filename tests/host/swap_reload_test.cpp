// SPDX-License-Identifier: Apache-2.0
//
// A run that is told to read its config again: by a request, and by SIGUSR1 to the command line.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "run.hpp"
#include "swap_run.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

/// A fit from the command line whose model stops it in the step after 4 updates; then `meanwhile` is done, SIGUSR1 sent, and it goes on.
Finished fit_signalled(const Run& run, const std::vector<std::string>& words, const std::function<void()>& meanwhile) {
  write_file(run.folder / "c.json", run.config.dump());
  const std::string out = run.folder / "out", err = run.folder / "err", config = run.folder / "c.json";
  std::vector<std::string> all = {TEST_CLI, "fit", config, "--json"};
  all.insert(all.end(), words.begin(), words.end());
  const pid_t child = fork();
  if (child == 0) {
    setenv("STRATAGEM_PLUGIN_PATH", TEST_PLUGINS "/toy", 1);
    dup2(open(out.c_str(), O_CREAT | O_WRONLY, 0600), STDOUT_FILENO);
    dup2(open(err.c_str(), O_CREAT | O_WRONLY, 0600), STDERR_FILENO);
    std::vector<char*> argv;
    for (std::string& word : all) argv.push_back(word.data());
    argv.push_back(nullptr);
    execv(TEST_CLI, argv.data());
    _exit(127);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, WUNTRACED) == child);
  if (WIFSTOPPED(status)) {
    meanwhile();
    kill(child, SIGUSR1);
    kill(child, SIGCONT);
    REQUIRE(waitpid(child, &status, 0) == child);
  }
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(out), read_file(err)};
}

struct StoppingRun : Run {
  StoppingRun() : Run("single_device") {
    config["model"]["options"]["raise_at"] = {{"step", 4}, {"signal", SIGSTOP}};
    config["trainer"] = {{"log_every_n_steps", 1}};
  }
};

}  // namespace

TEST_CASE("SIGUSR1 has a fit read its config again and swap to the strategy in it, with --set on top") {
  const StoppingRun run;
  const Finished finished = fit_signalled(run, {"--set", "strategy.accelerator=cpu"}, [&] {
    Json changed = run.config;
    changed["strategy"] = {{"name", "data_parallel"}, {"devices", 2}};
    write_file(run.folder / "c.json", "// another strategy\n" + changed.dump());
  });
  INFO(finished.err);
  REQUIRE(finished.code == 0);
  CHECK(finished.json()["strategy"] == "data_parallel");
  CHECK(finished.json()["devices"].size() == 2);
  REQUIRE(run.metrics("swap").size() == 1);
  CHECK(run.metrics("swap")[0]["step"] == 5);
  CHECK(run.metrics("swap")[0]["strategy"] == Json{{"name", "data_parallel"}, {"devices", 2}, {"accelerator", "cpu"}});
  CHECK(finished.err ==
        Contains{"before update 6: strategy \"data_parallel\" on cpu:0, cpu:1 in the place of \"single_device\""});
  Run same("single_device");
  same.config["trainer"] = run.config["trainer"];
  REQUIRE(same.fit().code == 0);
  CHECK(run.metrics("fit") == same.metrics("fit"));
  CHECK(run.position("step-00000010").at("config").at("strategy").at("name") == "data_parallel");
}

TEST_CASE("Other changes in a config that is read again are listed and left") {
  const StoppingRun run;
  const bool also_strategy = GENERATE(false, true);
  const Finished finished = fit_signalled(run, {}, [&] {
    Json changed = run.config;
    changed["optimizer"]["lr"] = 100;
    changed["trainer"]["max_steps"] = 6;
    changed["swap"] = Json::array({swap_at(7, strategy("data_parallel", 3))});
    if (also_strategy) changed["strategy"]["name"] = "data_parallel";
    write_file(run.folder / "c.json", changed.dump());
  });
  INFO(finished.err);
  REQUIRE(finished.code == 0);
  CHECK(finished.err == Contains{"/c.json: a run that goes on takes another \"strategy\" only; left as they were: /optimizer/lr, "
                                 "/swap, /trainer/max_steps"});
  CHECK(finished.json()["steps"] == 10);
  CHECK(finished.json()["strategy"] == (also_strategy ? "data_parallel" : "single_device"));
  CHECK(run.values("fit", "lr") == std::vector<double>(10, 1));
}

TEST_CASE("A config that can't be read again, or is wrong, changes nothing") {
  const StoppingRun run;
  struct Case {
    std::string content;
    std::string reason;
  };
  Json wrong = run.config;
  wrong["strategy"] = {{"name", "data_parallel"}, {"devices", -1}};
  Json unknown = run.config;
  unknown["strategy"]["name"] = "data_paralel";
  const Case cases[] = {{run.config.dump().substr(0, 40), "changes nothing: "},
                        {"", "changes nothing: "},
                        {"gone", "changes nothing: config: can't read "},
                        {wrong.dump(), "/strategy/devices: -1 is not allowed"},
                        {unknown.dump(), "before update 6 failed; the strategy \"single_device\" goes on: "}};
  const Case& broken = cases[GENERATE(0, 1, 2, 3, 4)];
  const Finished finished = fit_signalled(run, {}, [&] {
    fs::remove(run.folder / "c.json");
    if (broken.content != "gone") write_file(run.folder / "c.json", broken.content);
  });
  INFO(finished.err);
  REQUIRE(finished.code == 0);
  CHECK(finished.err == Contains{broken.reason});
  CHECK(finished.json()["strategy"] == "single_device");
  CHECK(run.metrics("swap").empty());
  Run same("single_device");
  same.config["trainer"] = run.config["trainer"];
  REQUIRE(same.fit().code == 0);
  CHECK(run.metrics("fit") == same.metrics("fit"));
}

TEST_CASE("A session whose config is a text has no file to read again, and one that is as it was swaps nothing") {
  const TemporaryFolder folder;
  const Json config = swap_config(folder);
  SwapRun run(folder, config);
  run.session->step(3);
  run.requests.reload = true;
  run.session->step(1);
  CHECK(run.told.empty());
  CHECK(run.warnings.empty());
  Requests requests;
  SessionRequest request;
  request.config = read_config_text(config.dump(), folder.path, {});
  request.events.requests = &requests;
  std::string warning;
  request.events.log = [&](uint32_t level, const std::string& text) {
    if (level == STG_LOG_WARNING) warning = text;
  };
  Session session(std::move(request));
  requests.reload = true;
  session.step(1);
  CHECK(warning == Contains{"it was given as a text, not as a file"});
}

TEST_CASE("A config file that has become a pipe is not waited for") {
  const TemporaryFolder folder;
  SwapRun run(folder, swap_config(folder));
  run.session->step(3);
  fs::remove(folder / "c.json");
  REQUIRE(mkfifo((folder / "c.json").c_str(), 0600) == 0);
  run.requests.reload = true;
  run.session->step(1);
  REQUIRE(run.warnings.size() == 1);
  CHECK(run.warnings[0] == Contains{"changes nothing: "});
  CHECK(run.warnings[0] == Contains{"/c.json is no regular file"});
}

TEST_CASE("A resume after a reload goes on under the file's strategy") {
  const TemporaryFolder folder;
  Json config = swap_config(folder);
  SwapRun first(folder, config);
  first.session->step(4);
  config["strategy"] = strategy("data_parallel", 2);
  write_file(folder / "c.json", config.dump());
  first.requests.reload = true;
  first.session->step(3);
  first.requests.stop = true;
  first.run();
  CHECK(first.result["strategy"] == "data_parallel");
  SwapRun second(folder, config, first.result["checkpoint"]);
  second.run();
  CHECK(second.result["strategy"] == "data_parallel");
  CHECK(second.told.empty());
}

TEST_CASE("The config's swaps come at ascending steps, each a strategy") {
  Run run("single_device");
  const auto error_with = [&](const Json& swaps) {
    run.config["swap"] = swaps;
    const Finished finished = run.fit();
    CHECK(finished.code == 2);
    return finished.err;
  };
  const Json to = strategy("data_parallel", 2);
  CHECK(error_with(Json::array({swap_at(5, to), swap_at(3, to)})) ==
        Contains{"/swap/1/at_step: 3 must be after the swap before it, at 5"});
  CHECK(error_with(Json::array({swap_at(5, to), swap_at(5, to)})) == Contains{"/swap/1/at_step: 5 must be after"});
  CHECK(error_with(Json::array({swap_at(0, to)})) == Contains{"/swap/0/at_step: 0 is not allowed"});
  CHECK(error_with(Json::array({{{"at_step", 1}}})) == Contains{"/swap/0/strategy: this key, an object, is required"});
  CHECK(error_with(Json::array({swap_at(1, {{"name", "x"}, {"device", 1}})})) ==
        Contains{"/swap/0/strategy/device: unknown key"});
  run.config["trainer"]["max_steps"] = 6;
  run.config["swap"] = Json::array({swap_at(6, to)});
  const Finished late = run.fit();
  CHECK(late.code == 0);
  CHECK(late.err == Contains{"/swap/0/at_step is 6, which never comes: the run ends after 6 updates (/trainer/max_steps)"});
  run.config["swap"] = Json::array({swap_at(5, strategy("data_paralel"))});
  const Finished finished = run.fit();
  CHECK(finished.code == 0);
  CHECK(finished.err ==
        Contains{"/swap/0/strategy: as things are, the swap at step 5 will leave the strategy before it in place"});
}

TEST_CASE("A run that is killed after a swap resumes to the same end, lines of its swaps included") {
  const auto settle = [](Run& run) {
    run.config["trainer"] = {{"log_every_n_steps", 1}};
    run.config["checkpoint"]["every_n_steps"] = 2;
    run.config["swap"] = Json::array({swap_at(4, strategy("data_parallel", 2)), swap_at(7, strategy("single_device"))});
  };
  Run run("single_device"), whole("single_device");
  settle(run);
  settle(whole);
  REQUIRE(whole.fit().code == 0);
  const int step = GENERATE(4, 5, 6, 8);
  const std::string kill = "model.options.raise_at=" + Json{{"step", step}, {"signal", SIGKILL}}.dump();
  CHECK(run.fit({kill}).code == 128 + SIGKILL);
  REQUIRE(run.resume().code == 0);
  for (const char* stage : {"fit", "epoch"}) CHECK(run.metrics(stage) == whole.metrics(stage));
  const auto swaps = [](const Run& of) {
    std::vector<Json> lines = of.metrics("swap");
    for (Json& line : lines) line.erase("seconds");
    return lines;
  };
  CHECK(swaps(run) == swaps(whole));
  CHECK(swaps(run).size() == 2);
  CHECK(read_file(run.folder / "run/step-00000010/weights.safetensors") ==
        read_file(whole.folder / "run/step-00000010/weights.safetensors"));
}
