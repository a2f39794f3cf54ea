// SPDX-License-Identifier: Apache-2.0
//
// Early stopping and the best checkpoint, under both strategies: one update per epoch, and the toy's "score" says what validation
// gives after each; the first score is that of the sanity validation.
#include <algorithm>
#include <csignal>
#include <fstream>

#include "run.hpp"

using namespace stratagem::test;

namespace {

using Names = std::vector<std::string>;

std::string any_strategy() { return GENERATE("single_device", "data_parallel"); }

/// A run whose validations give these scores.
struct Scored : Run {
  Scored(const std::string& strategy, const Json& scores) : Run(strategy, {1}) {
    config["data"]["validation"] = config["data"]["train"];
    config["model"]["options"]["scores"] = scores;
    config["trainer"] = {{"max_epochs", 20}, {"log_every_n_steps", 1}};
  }
};

struct Stopping : Scored {
  Stopping(const std::string& strategy, const Json& scores, int64_t patience) : Scored(strategy, scores) {
    config["early_stopping"] = {{"monitor", "score"}, {"patience", patience}};
  }
};

struct Best : Scored {
  Best(const std::string& strategy, const Json& scores) : Scored(strategy, scores) {
    config["checkpoint"]["monitor"] = "score";
    config["trainer"]["max_epochs"] = scores.size() - 1;
  }
};

std::string kill_at(int64_t step) { return "model.options.raise_at=" + Json{{"step", step}, {"signal", SIGKILL}}.dump(); }

/// All that a folder holds, by name.
std::map<std::string, std::string> contents(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files[entry.path().string()] = read_file(entry.path());
  }
  return files;
}

}  // namespace

TEST_CASE("Training stops at the patience-th validation in a row without an improvement") {
  struct Row {
    Json scores;
    int64_t patience;
    int64_t steps;
    double best;
  };
  const Row row = GENERATE(Row{{0, 1.0, 0.9, 0.95, 0.92, 0.8}, 2, 4, 0.9}, Row{{0, 1.0, 0.9, 0.95, 0.92, 0.8}, 1, 3, 0.9},
                           Row{{0, 1.0}, 1, 2, 1.0}, Row{{0, 1.0, 0.9, 0.95, 0.8, 0.9, 0.7, 0.7}, 2, 8, 0.7});
  const Stopping run(any_strategy(), row.scores, row.patience);
  const Finished fit = run.fit();
  INFO(fit.err);
  REQUIRE(fit.code == 0);
  CHECK(fit.json()["steps"] == row.steps);
  std::ostringstream reason;
  reason << "/early_stopping/patience (" << row.patience << ") is reached: \"score\" was no better than " << Json(row.best)
         << " in the last " << row.patience << (row.patience == 1 ? " validation" : " validations");
  CHECK(fit.json()["ended_by"] == reason.str());
  CHECK(fit.err == "stopping after update " + std::to_string(row.steps) + ": " + reason.str() + "\n");
  CHECK(run.metrics("validate").size() == static_cast<size_t>(row.steps));
  const std::string last = run.checkpoints().back();
  CHECK(run.position(last)["early_stopping"]["best"] == row.best);
}

TEST_CASE("Not a number is no improvement, which is said, and never the best") {
  const Stopping run(any_strategy(), Json{0, 0.5, nullptr, nullptr, 0.1}, 2);
  const Finished fit = run.fit({"checkpoint.monitor=score"});
  REQUIRE(fit.code == 0);
  CHECK(fit.json()["steps"] == 3);
  for (const char* step : {"2", "3"})
    CHECK(fit.err == Contains{std::string("warning: \"score\" is nan after update ") + step +
                              "; early stopping takes it as no improvement"});
  CHECK(fit.json()["best"]["value"] == 0.5);
  CHECK(fit.json()["best"]["step"] == 1);
  CHECK(fit.json()["validation"]["score"].is_null());
  CHECK(run.position("step-00000003")["early_stopping"]["best"] == 0.5);
}

TEST_CASE("Where no validation gives a finite number there is no best, as null in every file") {
  const Stopping run(any_strategy(), Json::array({nullptr}), 2);
  const Finished fit = run.fit({"checkpoint.monitor=score", "checkpoint.every_n_steps=1"});
  REQUIRE(fit.code == 0);
  CHECK(fit.json()["steps"] == 2);
  CHECK(fit.json()["best"].is_null());
  CHECK(fit.json()["ended_by"].get<std::string>() == Contains{"\"score\" was not a finite number in the last 2 validations"});
  CHECK(run.position("step-00000002")["early_stopping"]["best"].is_null());
  CHECK(run.position("step-00000002")["best"]["checkpoints"] == Json::array());
  CHECK(run.metrics("validate").at(0)["score"].is_null());
  CHECK(run.checkpoints() == Names{"last", "step-00000001", "step-00000002"});
}

TEST_CASE("Resuming a run that has stopped early does nothing, and says why") {
  const Stopping run(any_strategy(), Json{0, 1.0, 0.9, 0.95, 0.92, 0.8}, 2);
  REQUIRE(run.fit({"checkpoint.monitor=score"}).code == 0);
  const auto before = contents(run.folder / "run");
  run.trace();
  const Finished again = run.resume({"checkpoint.monitor=score"});
  CHECK(again.code == 0);
  CHECK(again.err == Contains{"nothing to do: /early_stopping/patience (2) is reached"});
  CHECK(again.json()["nothing_to_do"] == again.json()["ended_by"]);
  CHECK(again.json()["best"]["checkpoint"] == (run.folder / "run/step-00000002").string());
  CHECK(run.trace().empty());
  CHECK(contents(run.folder / "run") == before);
  const Finished raised = run.resume({"checkpoint.monitor=score", "early_stopping.patience=3", "trainer.max_epochs=5"});
  CHECK(raised.json()["steps"] == 5);
  CHECK(raised.json()["best"]["value"] == 0.8);
}

TEST_CASE("A killed run stops where the unbroken one does, and has the same best") {
  const int64_t step = GENERATE(2, 6);
  const Stopping run(any_strategy(), Json{0, 1.0, 0.9, 0.95, 0.8, 0.9, 0.85, 0.81, 0.7}, 3);
  const Names settings = {"checkpoint.monitor=score", "checkpoint.every_n_steps=1", "checkpoint.keep_last=1"};
  REQUIRE(run.fit(settings + Names{kill_at(step)}).code == 128 + SIGKILL);
  const Finished resumed = run.resume(settings);
  INFO(resumed.err);
  REQUIRE(resumed.code == 0);
  CHECK(resumed.json()["steps"] == 7);
  CHECK(resumed.json()["best"]["value"] == 0.8);
  CHECK(run.checkpoints() == Names{"best", "last", "step-00000004", "step-00000007"});
  CHECK(read_file(run.folder / "run/best") == "step-00000004\n");
}

TEST_CASE("Another strategy in mid-run goes on with what early stopping and the best have seen") {
  const auto [from, to] = GENERATE(std::pair{"single_device", "data_parallel"}, std::pair{"data_parallel", "single_device"});
  Stopping run(from, Json{0, 1.0, 0.9, 0.95, 0.92, 0.8}, 2);
  REQUIRE(run.fit({"checkpoint.monitor=score", "trainer.max_epochs=3"}).json()["steps"] == 3);
  run.config["strategy"] = {{"name", to}, {"accelerator", "cpu"}};
  const Json result = run.resume({"checkpoint.monitor=score"}).json();
  CHECK(result["steps"] == 4);
  CHECK(result["best"]["step"] == 2);
}

TEST_CASE("The best checkpoint and the newest stay, whatever keep_last says, and `best` names the best") {
  const Best run(any_strategy(), Json{9, 0.5, 0.3, 0.4, 0.2, 0.6, 0.7});
  const Finished fit = run.fit({"checkpoint.every_n_steps=1", "checkpoint.keep_last=1"});
  INFO(fit.err);
  REQUIRE(fit.code == 0);
  CHECK(run.checkpoints() == Names{"best", "last", "step-00000004", "step-00000006"});
  CHECK(read_file(run.folder / "run/best") == "step-00000004\n");
  CHECK(read_file(run.folder / "run/last") == "step-00000006\n");
  const Json result = fit.json();
  CHECK(result["best"] ==
        Json{{"checkpoint", (run.folder / "run/step-00000004").string()}, {"step", 4}, {"monitor", "score"}, {"value", 0.2}});
  CHECK(result["checkpoint"] == (run.folder / "run/step-00000006").string());
}

TEST_CASE("A checkpoint that was saved for being the best goes when it is the best no more") {
  const Best run(any_strategy(), Json{9, 0.5, 0.3, 0.4, 0.2, 0.6, 0.7});
  REQUIRE(run.fit().code == 0);
  CHECK(run.checkpoints() == Names{"best", "last", "step-00000004", "step-00000006"});
  // With `every_n_steps`, and without keep_last, those of the interval stay.
  REQUIRE(run.fit({"checkpoint.dir=b", "checkpoint.every_n_steps=3"}).code == 0);
  CHECK(fs::exists(run.folder / "b/step-00000003"));
  CHECK(fs::exists(run.folder / "b/step-00000004"));
  CHECK(!fs::exists(run.folder / "b/step-00000002"));
}

TEST_CASE("The end of a run stays, though it was saved for being the best, and keep_last counts it") {
  const Best run("single_device", Json{9, 0.5, 0.3});
  REQUIRE(run.fit({"checkpoint.keep_last=1"}).code == 0);
  CHECK(run.checkpoints() == Names{"best", "last", "step-00000002"});
  REQUIRE(run.resume({"checkpoint.keep_last=1", "model.options.scores=[9,0.5,0.3,0.4,0.1]", "trainer.max_epochs=4"}).code == 0);
  CHECK(run.checkpoints() == Names{"best", "last", "step-00000004"});
}

TEST_CASE("save_top_k keeps so many of the best, of equal ones the older, and mode says what is better") {
  const Best run("single_device", Json{9, 0.5, 0.3, 0.4, 0.3, 0.6, 0.55});
  REQUIRE(run.fit({"checkpoint.save_top_k=2"}).code == 0);
  CHECK(run.checkpoints() == Names{"best", "last", "step-00000002", "step-00000004", "step-00000006"});
  CHECK(read_file(run.folder / "run/best") == "step-00000002\n");
  REQUIRE(run.fit({"checkpoint.dir=b", "checkpoint.mode=max"}).code == 0);
  CHECK(read_file(run.folder / "b/best") == "step-00000005\n");
  REQUIRE(run.fit({"checkpoint.dir=c", "checkpoint.save_top_k=-1"}).code == 0);
  for (int step = 1; step <= 6; ++step) CHECK(fs::exists(run.folder / "c" / ("step-0000000" + std::to_string(step))));
}

TEST_CASE("validate, test, predict and resume take DIR/best for the best checkpoint") {
  Best run(any_strategy(), Json{9, 0.5, 0.3, 0.4});
  run.config["data"]["test"] = run.config["data"]["predict"] = run.config["data"]["train"];
  REQUIRE(run.fit().code == 0);
  const std::string best = (run.folder / "run/best").string();
  const Json validated = run.command("validate", {}, {"--json", "--checkpoint", best}).json();
  CHECK(validated["checkpoint"] == (run.folder / "run/step-00000002").string());
  CHECK(validated["validation"]["w"] == -2);
  CHECK(run.command("test", {}, {"--json", "--checkpoint", best}).json()["test"]["w"] == -2);
  const std::string file = (run.folder / "p.npz").string();
  CHECK(run.command("predict", {}, {"--json", "--checkpoint", best, "--output", file}).code == 0);
  run.trace();
  const Finished resumed = run.fit({}, {"--json", "--resume", best});
  CHECK(resumed.json()["steps"] == 3);
  CHECK(run.trace() == Names{"1"});
  fs::remove_all(run.folder / "run/step-00000002");
  const Finished gone = run.command("validate", {}, {"--checkpoint", best});
  CHECK(gone.code == 2);
  CHECK(gone.err == Contains{best + " names step-00000002, which is not there"});
}

TEST_CASE("Any process's early stopping ends a run, and a checkpoint is one of the best where all say so") {
  Stopping run("bare", Json{0, 0.5, 0.4, 0.3}, 1);  // better each time
  run.config["strategy"]["path"] = TEST_BARE_STRATEGY;
  const Names settings = {"checkpoint.monitor=score", "trainer.max_epochs=3", "checkpoint.every_n_steps=1"};
  const auto result = [&](const std::string& options) {
    fs::remove_all(run.folder / "run");
    return run.fit(settings + Names{"strategy.options=" + options}).json();
  };
  CHECK(result("{}")["steps"] == 3);
  CHECK(result("{}")["best"]["step"] == 3);
  const Json stopped = result(R"({"any": true})");
  CHECK(stopped["steps"] == 1);
  CHECK(stopped["ended_by"] == "/early_stopping: another process decided to stop");
  CHECK(stopped["best"]["step"] == 1);
  const Json none = result(R"({"all": false})");
  CHECK(none["steps"] == 3);
  CHECK(none["best"].is_null());
}

TEST_CASE("A person is told the best and what ended the run") {
  const Stopping run("single_device", Json{0, 0.5, 0.6}, 1);
  const Finished fit = run.fit({"checkpoint.monitor=score"}, {});
  CHECK(fit.out == Contains{"\nbest        " + (run.folder / "run/step-00000001").string() + " (score 0.5)\nended by    " +
                            "/early_stopping/patience (1) is reached: \"score\" was no better than 0.5"});
}

TEST_CASE("A monitor that the model doesn't give is told before training, with the nearest and the known names") {
  const std::string key = GENERATE("early_stopping.monitor", "checkpoint.monitor");
  const Scored run("single_device", Json{0, 1});
  const Finished fit = run.fit({key + "=scroe"});
  CHECK(fit.code == 1);
  const std::string pointer = "/" + key.substr(0, key.find('.')) + "/monitor";
  CHECK(fit.err == Contains{pointer + ": the model's validation gives no \"scroe\"; did you mean \"score\"? Available: loss, "
                                      "mean_x, score, train_loss, w"});
  CHECK(run.trace().empty());
  CHECK(run.checkpoints().empty());
}

TEST_CASE("Without a sanity validation the first validation tells a wrong monitor, and the training before it is saved") {
  const Scored run("single_device", Json{0, 1.0, 0.9});
  const Names settings = {"trainer.num_sanity_val_steps=0", "trainer.max_epochs=2"};
  const Finished fit = run.fit(settings + Names{"checkpoint.monitor=scroe"});
  CHECK(fit.code == 1);
  CHECK(fit.err == Contains{"did you mean \"score\"?"});
  run.trace();
  const Finished mended = run.resume(settings + Names{"checkpoint.monitor=score"});
  CHECK(mended.err == Contains{"/checkpoint/monitor (min) is \"score\" in the config and \"scroe\" (min) in the checkpoint"});
  CHECK(mended.json()["steps"] == 2);
  CHECK(run.trace().size() == 1);
  CHECK(run.values("validate", "score") == std::vector<double>{1.0, 0.9});
}

TEST_CASE("Another monitor or mode begins anew, and that is told") {
  const Stopping run("single_device", Json{0, 1.0, 0.9, 0.95}, 2);
  REQUIRE(run.fit({"trainer.max_epochs=3"}).json()["steps"] == 3);
  const Finished resumed = run.resume({"early_stopping.mode=max"});
  CHECK(resumed.err == Contains{"/early_stopping/monitor (max) is \"score\" in the config and \"score\" (min) in the checkpoint; "
                                "what was best so far doesn't count"});
  CHECK(resumed.json()["steps"] == 6);  // the 4th is the first
}

TEST_CASE("What early stopping and the best have seen is forgotten where they are left out, which is told") {
  const Stopping run("single_device", Json{0, 1.0, 0.9, 0.95, 0.96, 0.97, 0.98}, 3);
  REQUIRE(run.fit({"trainer.max_epochs=3", "checkpoint.monitor=score"}).json()["steps"] == 3);
  const Finished without = run.resume({"trainer.max_epochs=4", "early_stopping=null"});
  INFO(without.err);
  CHECK(without.json()["steps"] == 4);
  CHECK(without.err ==
        Contains{"warning: /early_stopping/monitor is \"score\" in the checkpoint and left out of the config; what "
                 "early stopping has seen is forgotten, and where it comes back it begins anew\n"});
  CHECK(without.err ==
        Contains{"warning: /checkpoint/monitor is \"score\" in the checkpoint and left out of the config; which are "
                 "the best so far is forgotten, they stay as another run's would\n"});
  const Finished again = run.resume({"trainer.max_epochs=5", "early_stopping=null"});
  CHECK(again.err == Contains{"resuming"});
  CHECK(again.err.find("forgotten") == std::string::npos);
  CHECK(run.resume({"checkpoint.monitor=score"}).json()["steps"] == 9);  // 0.98 is the first and best: the third miss is at 9
}

TEST_CASE("Without the monitor, or under another, the best of before stays, whatever keep_last says") {
  const std::string monitor = GENERATE("null", "w");
  const Best run("single_device", Json{9, 0.5, 0.3, 0.4, 0.35, 0.6});
  REQUIRE(run.fit({"trainer.max_epochs=3", "checkpoint.keep_last=1"}).code == 0);
  REQUIRE(run.checkpoints() == std::vector<std::string>{"best", "last", "step-00000002", "step-00000003"});
  for (const char* max_epochs : {"4", "5"}) {
    REQUIRE(run.resume({stratagem::concat("trainer.max_epochs=", max_epochs), "checkpoint.keep_last=1",
                        "checkpoint.monitor=" + monitor})
                .code == 0);
    CHECK(fs::is_directory(run.folder / "run/step-00000002"));
  }
  CHECK(!fs::exists(run.folder / "run/step-00000003"));
  if (monitor == "null") CHECK(read_file(run.folder / "run/best") == "step-00000002\n");
}

TEST_CASE(
    "A resumed run leaves the checkpoints of a branch that it doesn't continue, and lets go of those that were for being best") {
  const std::vector<std::string> settings = {"checkpoint.every_n_steps=2"};
  const Json scores{9, 0.5, 0.4, 0.3, 0.5, 0.5, 0.5, 0.5, 0.5, 0.2, 0.5};
  const Best unbroken("single_device", scores);
  REQUIRE(unbroken.fit(settings).code == 0);
  const Best run("single_device", scores);
  for (const char* max_epochs : {"5", "7"}) {
    const std::vector<std::string> more =
        settings + std::vector<std::string>{stratagem::concat("trainer.max_epochs=", max_epochs)};
    REQUIRE((max_epochs[0] == '5' ? run.fit(more) : run.resume(more)).code == 0);
  }
  REQUIRE(run.resume(settings).code == 0);
  auto expected = unbroken.checkpoints() + std::vector<std::string>{"step-00000005", "step-00000007"};  // the ends of runs
  std::sort(expected.begin(), expected.end());
  CHECK(run.checkpoints() == expected);

  const auto resume = [&](const char* from, const char* max_epochs) {
    return run.command(
        "fit",
        settings + std::vector<std::string>{stratagem::concat("trainer.max_epochs=", max_epochs), "checkpoint.keep_last=1"},
        {"--resume", (run.folder / from).string(), "--json"});
  };
  REQUIRE(resume("run/step-00000002", "3").code == 0);
  REQUIRE(resume("run", "8").code == 0);
  REQUIRE(resume("run", "11").code == 0);
  CHECK(fs::is_directory(run.folder / "run/step-00000007"));
  CHECK(fs::is_directory(run.folder / "run/step-00000005"));
  CHECK(!fs::exists(run.folder / "run/step-00000008"));
}

TEST_CASE("A best checkpoint that is gone is told, and the best is chosen without it") {
  const Best run("single_device", Json{9, 0.5, 0.3, 0.4, 0.35});
  REQUIRE(run.fit({"trainer.max_epochs=3"}).code == 0);
  fs::remove_all(run.folder / "run/step-00000002");
  const Finished resumed = run.resume();
  CHECK(resumed.err ==
        Contains{"one of the best checkpoints so far, step-00000002 (score 0.3), is not in " + (run.folder / "run").string()});
  CHECK(resumed.json()["best"]["step"] == 4);
}

TEST_CASE("A best checkpoint that can't be read, or is another run's, is told as such, and stays") {
  const bool is_damaged = GENERATE(true, false);
  const Best run("single_device", Json{9, 0.5, 0.3, 0.4, 0.35});
  REQUIRE(run.fit({"trainer.max_epochs=3"}).code == 0);
  const Names there = is_damaged ? Names{} : Names{"checkpoint.dir=there"};
  const fs::path best = run.folder / (is_damaged ? "run" : "there") / "step-00000002";
  if (is_damaged) {
    fs::resize_file(best / "weights.safetensors", 20);
  } else {
    REQUIRE(run.fit({"trainer.max_epochs=3", "checkpoint.dir=there"}).code == 0);
  }
  const Finished resumed = run.resume(there);
  INFO(resumed.err);
  const std::string start = "one of the best checkpoints so far, step-00000002 (score 0.3), ";
  if (is_damaged) {
    CHECK(resumed.err == Contains{start + "can't be read (" + (best / "weights.safetensors").string()});
  } else {
    CHECK(resumed.err ==
          Contains{start + "is another run's in " + best.parent_path().string() + "; the best are chosen without it"});
  }
  CHECK(resumed.json()["best"]["step"] == 4);
  CHECK(fs::is_directory(best));
}

TEST_CASE("Without validation train_loss can be monitored, and it is the mean of the epoch") {
  Run run(any_strategy(), {1, 3});  // losses 0, -3 and so on: better in each epoch
  const Finished fit = run.fit({"checkpoint.monitor=train_loss", "trainer.max_epochs=3", "early_stopping.monitor=train_loss",
                                "early_stopping.mode=max", "early_stopping.patience=2"});
  INFO(fit.err);
  REQUIRE(fit.code == 0);
  CHECK(fit.json()["steps"] == 6);
  CHECK(fit.json()["best"]["step"] == 6);
  CHECK(fit.json()["best"]["value"] == run.values("epoch", "train_loss").back());
  CHECK(fit.json()["ended_by"].get<std::string>() == Contains{"/early_stopping/patience (2) is reached: \"train_loss\""});
  const Finished wrong = run.fit({"checkpoint.monitor=loss"});
  CHECK(wrong.code == 2);
  CHECK(wrong.err == Contains{"/checkpoint/monitor: \"loss\" must be a metric of validation, and there is no /data/validation"});
}

TEST_CASE("A save of the best that fails leaves the one before, and `best` names that") {
  const Best run("single_device", Json{9, 0.5, 0.3});
  REQUIRE(run.fit({"trainer.max_epochs=1"}).code == 0);
  const Finished full =
      run.command("fit", {"metrics=null"}, {"--resume", (run.folder / "run").string()}, {.max_file_bytes = 700});
  CHECK(full.code == 1);
  CHECK(full.err == Contains{"File too large"});
  CHECK(run.checkpoints() == Names{"best", "last", "step-00000001"});
  CHECK(read_file(run.folder / "run/best") == "step-00000001\n");
  CHECK(run.resume().json()["best"]["step"] == 2);
}

TEST_CASE("A new run in the folder of another has no best before its own") {
  const Best run("single_device", Json{9, 0.5, 0.3});
  REQUIRE(run.fit().code == 0);
  REQUIRE(run.fit({"model.options.scores=[null]"}).code == 0);
  CHECK(!fs::exists(run.folder / "run/best"));
}
