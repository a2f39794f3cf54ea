// SPDX-License-Identifier: Apache-2.0
//
// What is tried of validation before anything is trained, in new and in resumed runs, and with strategies that lack a part of it.
#include <csignal>

#include "run.hpp"

using namespace stratagem::test;

namespace {

using Names = std::vector<std::string>;

std::string any_strategy() { return GENERATE("single_device", "data_parallel"); }

struct Validated : Run {
  explicit Validated(const std::string& strategy, const std::string& path = {}) : Run(strategy, {1, 2, 3, 4}) {
    if (!path.empty()) config["strategy"]["path"] = path;
    if (!path.empty()) config["strategy"]["devices"] = 1;
    config["data"]["validation"] = config["data"]["train"];
    config["trainer"] = {{"log_every_n_steps", 1}};
  }
  std::map<std::string, std::string> contents() const {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(folder / "run")) {
      if (entry.is_regular_file()) files[entry.path().string()] = read_file(entry.path());
    }
    return files;
  }
};

}  // namespace

TEST_CASE("A monitor that a resumed run hasn't seen yet, and the model doesn't give, is told before it trains") {
  const std::string key = GENERATE("early_stopping.monitor", "checkpoint.monitor");
  const std::string steps = GENERATE("trainer.max_steps=2", "trainer.max_epochs=1");  // from within an epoch, and from its end
  const Validated run(any_strategy());
  REQUIRE(run.fit({steps}).code == 0);
  run.trace();
  const auto before = run.contents();
  const Finished resumed = run.resume({"trainer.max_epochs=2", key + "=mean_z"});
  CHECK(resumed.code == 1);
  CHECK(resumed.err == Contains{"/" + key.substr(0, key.find('.')) +
                                "/monitor: the model's validation gives no \"mean_z\"; "
                                "did you mean \"mean_x\"?"});
  CHECK(run.trace().empty());
  CHECK(run.contents() == before);
  CHECK(run.resume({"trainer.max_epochs=2", key + "=mean_x"}).json()["steps"] == 8);
}

TEST_CASE("What is tried before a resumed run leaves it bitwise as it would be without") {
  const Names settings = {"trainer.max_epochs=2", "model.options.draws=true", "optimizer.lr=0.1", "optimizer.momentum=0.9"};
  const std::string strategy = any_strategy();
  const Validated unbroken(strategy);
  REQUIRE(unbroken.fit(settings).code == 0);
  for (const char* tried : {"0", "1", "-1"}) {
    const Validated run(strategy);
    REQUIRE(run.fit(settings + Names{"trainer.max_steps=2", "data.validation=null"}).code == 0);
    const Finished resumed = run.resume(settings + Names{std::string("trainer.num_sanity_val_steps=") + tried,
                                                         "early_stopping.monitor=w", "early_stopping.patience=50"});
    INFO(resumed.err);
    REQUIRE(resumed.code == 0);
    for (const char* stage : {"fit", "validate"}) CHECK(run.metrics(stage) == unbroken.metrics(stage));
    for (const char* file : {"step-00000008/weights.safetensors", "step-00000008/optimizer.safetensors"})
      CHECK(read_file(run.folder / "run" / file) == read_file(unbroken.folder / "run" / file));
    CHECK(run.position("step-00000008")["early_stopping"]["misses"] == 0);
  }
}

TEST_CASE("A resumed run whose monitors have been seen tries one batch, and tells nothing that a model does wrong in it") {
  Validated run("single_device");
  for (const char* file : {"good.npy", "bad.npy"}) write_samples(run.folder / file, {file[0] == 'b' ? 7.F : 0.F, 0, 0, 0});
  run.config["early_stopping"] = {{"monitor", "w"}, {"patience", 50}};
  run.config["data"]["validation"]["targets"] = "good.npy";
  REQUIRE(run.fit().code == 0);
  run.trace();
  run.config["data"]["validation"]["targets"] = "bad.npy";
  const Names settings = {"model.options.num_classes=2", "trainer.max_epochs=2"};
  const Finished resumed = run.resume(settings);
  CHECK(resumed.code == 1);
  CHECK(resumed.err == Contains{"label 7"});
  CHECK(run.trace().size() == 4);
  // Another monitor has not been seen: all is told before it trains.
  CHECK(run.resume(settings + Names{"trainer.max_epochs=3", "early_stopping.monitor=loss"}).err == Contains{"label 7"});
  CHECK(run.trace().empty());
}

TEST_CASE("A stop in what is tried before a resumed run ends it where it was") {
  const Validated run(any_strategy());
  REQUIRE(run.fit({"trainer.max_steps=2"}).code == 0);
  run.trace();
  const auto before = run.contents();
  const Finished stopped =
      run.resume({R"(model.options.raise_at={"step": 2, "signal": 2, "stage": 1})", "early_stopping.monitor=w"});
  CHECK(stopped.code == 130);
  CHECK(stopped.json()["steps"] == 2);
  CHECK(run.trace().empty());
  CHECK(run.contents() == before);
}

TEST_CASE("A strategy without validation_step is told by its name with the way out, before anything is trained") {
  const Validated run("gradient_descent", TEST_GRADIENT_DESCENT);
  for (const char* tried : {"0", "2"}) {
    const Finished fit = run.fit({std::string("trainer.num_sanity_val_steps=") + tried, "checkpoint=null"});
    CHECK(fit.code == 1);
    CHECK(fit.err == Contains{"validation_step of the strategy \"gradient_descent\": this strategy has no validation_step; "
                              "/data/validation needs it: leave that out, or use a strategy and a model that have it"});
    CHECK(run.trace().empty());
  }
  const Finished without = run.fit({"data.validation=null", "checkpoint=null"});
  INFO(without.err);
  CHECK(without.json()["steps"] == 4);
  const Finished saving = run.fit({"data.validation=null"});
  CHECK(saving.code == 2);
  CHECK(saving.err == Contains{"/checkpoint: the strategy \"gradient_descent\" has no function save; leave /checkpoint out"});
}

TEST_CASE("A strategy that can't put back what a validation changes is told once, and a resumed run tries nothing") {
  const Validated run("bare", TEST_BARE_STRATEGY);
  const Names settings = {"model.options.draws=true", "trainer.val_check_interval=1"};
  const Finished fit = run.fit(settings);
  INFO(fit.err);
  REQUIRE(fit.code == 0);
  CHECK(fit.err ==
        "warning: the strategy \"bare\" has no export_state or no import_state: what a validation draws from generators "
        "and writes to buffers is not put back after it\n");
  CHECK(run.fit(settings + Names{"data.validation=null"}).err.find("export_state") == std::string::npos);
  run.trace();
  const Finished resumed = run.resume(settings + Names{"trainer.max_epochs=2", "early_stopping.monitor=mean_z"});
  CHECK(resumed.code == 1);
  CHECK(resumed.err == Contains{"\"bare\" has no export_state"});
  CHECK(resumed.err == Contains{"gives no \"mean_z\""});
  CHECK(run.trace().size() == 1);
}
