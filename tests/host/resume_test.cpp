// SPDX-License-Identifier: Apache-2.0
//
// Runs that end early, and go on: killed, interrupted, with a damaged checkpoint, under another strategy. An unbroken run is what each is
// compared with.
#include <sys/stat.h>

#include <csignal>

#include "run.hpp"

using namespace stratagem::test;

namespace {

using Doubles = std::vector<double>;

std::string any_strategy() { return GENERATE("single_device", "data_parallel"); }

/// Has the model raise a signal in the training step after `step` updates.
std::string raise_at(int64_t step, int signal, int times = 1, int stage = 0) {
  return "model.options.raise_at=" + Json{{"step", step}, {"signal", signal}, {"times", times}, {"stage", stage}}.dump();
}

/// The run whose parts the others must add up to.
void check_as_unbroken(const Run& run, const std::vector<std::string>& settings) {
  Run same(run.config["strategy"]["name"]);
  same.config["data"] = run.config["data"];
  for (const std::string file : {"x.npy", "y.npy"}) {
    if (fs::exists(run.folder / file)) fs::copy_file(run.folder / file, same.folder / file, fs::copy_options::overwrite_existing);
  }
  REQUIRE(same.fit(settings).code == 0);
  for (const char* stage : {"fit", "epoch", "validate"}) CHECK(run.metrics(stage) == same.metrics(stage));
  const std::string last = read_file(same.folder / "run/last");
  CHECK(read_file(run.folder / "run/last") == last);
  const std::string weights = last.substr(0, last.size() - 1) + "/weights.safetensors";
  CHECK(read_file(run.folder / "run" / weights) == read_file(same.folder / "run" / weights));
}

}  // namespace

TEST_CASE("A killed run goes on at the next batch of the same epoch") {
  Run run(any_strategy());
  run.config["data"]["validation"] = run.config["data"]["train"];
  const std::vector<std::string> settings = {"trainer.max_epochs=2", "checkpoint.every_n_steps=3", "trainer.log_every_n_steps=1"};
  CHECK(run.fit(settings + std::vector<std::string>{raise_at(5, SIGKILL)}).code == 128 + SIGKILL);
  CHECK(run.trace() == numbers(0, 5));
  const Finished resumed = run.resume(settings);
  INFO(resumed.err);
  REQUIRE(resumed.code == 0);
  CHECK(run.trace() == numbers(3, 9) + numbers(0, 9));
  CHECK(resumed.json()["steps"] == 20);
  CHECK(resumed.json()["validation"]["w"] == -90);
  check_as_unbroken(run, settings);
}

TEST_CASE("A run in 16-mixed that overflowed and was killed goes on with its loss scale and its count of good updates") {
  const Run run(any_strategy(), {3e38F, 1, 2, 3, 4, 5, 6, 7});
  const std::vector<std::string> settings = {"precision=16-mixed", "trainer.max_epochs=2", "checkpoint.every_n_steps=3",
                                             "trainer.log_every_n_steps=1"};
  CHECK(run.fit(settings + std::vector<std::string>{raise_at(5, SIGKILL)}).code == 128 + SIGKILL);
  const Json state = Json::parse(read_file(run.folder / "run/step-00000003/state.json"));
  CHECK(state.at("scaler") == Json{{"scale", 32768.0}, {"good_steps", 3}});
  const Finished resumed = run.resume(settings);
  INFO(resumed.err);
  REQUIRE(resumed.code == 0);
  CHECK(resumed.json()["steps"] == 14);  // the first batch overflows in the second epoch, too
  const Doubles scales = run.values("fit", "loss_scale");
  CHECK(Doubles(scales.begin(), scales.begin() + 7) == Doubles(7, 32768));
  CHECK(Doubles(scales.begin() + 7, scales.end()) == Doubles(7, 16384));
  check_as_unbroken(run, settings);
}

TEST_CASE("A run goes on in another precision, to 16-mixed and back, with a warning that names it") {
  const Run run(any_strategy());
  CHECK(run.fit({"trainer.max_steps=2"}).code == 0);
  int max_steps = 2;
  for (const std::string precision : {"16-mixed", "bf16-mixed", "64-true", "16-mixed", "32-true"}) {
    const Finished resumed = run.resume({"precision=" + precision, "trainer.max_steps=" + std::to_string(++max_steps)});
    INFO(resumed.err);
    REQUIRE(resumed.code == 0);
    CHECK(resumed.json()["steps"] == max_steps);
    CHECK(resumed.err == Contains{"warning: /precision is "});
    CHECK(resumed.err == Contains{"\"" + precision + "\" in the config"});
  }
}

TEST_CASE("A run killed after the save at an epoch's end sees the next epoch once") {
  Run run(any_strategy());
  const std::vector<std::string> settings = {"trainer.max_epochs=2", "checkpoint.every_n_steps=10",
                                             "trainer.log_every_n_steps=1"};
  CHECK(run.fit(settings + std::vector<std::string>{raise_at(12, SIGKILL)}).code == 128 + SIGKILL);
  run.trace();
  REQUIRE(run.resume(settings).json()["steps"] == 20);
  CHECK(run.trace() == numbers(0, 9));
  check_as_unbroken(run, settings);
}

TEST_CASE("A shuffled run with momentum and accumulation goes on bitwise as the unbroken one") {
  Run run(any_strategy(), {0.5, -1.25, 2, 3.75, -4.1F, 0.3F, 7, 1.1F, 0.7F, 9});
  const std::vector<std::string> settings = {"trainer.max_epochs=4",
                                             "checkpoint.every_n_steps=3",
                                             "trainer.log_every_n_steps=1",
                                             "data.train.shuffle=true",
                                             "seed=3",
                                             "data.train.batch_size=3",
                                             "trainer.accumulate_grad_batches=2",
                                             "optimizer.momentum=0.9",
                                             "optimizer.lr=0.1",
                                             R"(scheduler={"name":"cosine","warmup_steps":2})"};
  CHECK(run.fit(settings + std::vector<std::string>{raise_at(5, SIGKILL)}).code == 128 + SIGKILL);
  REQUIRE(run.resume(settings).code == 0);
  check_as_unbroken(run, settings);
}

TEST_CASE("The loss scale and what was skipped go on where they were") {
  Run run(any_strategy(), {3e38F, 1, 1, 1, 1, 1});
  const std::vector<std::string> settings = {"checkpoint.every_n_steps=3", "trainer.log_every_n_steps=1", "precision=16-mixed"};
  CHECK(run.fit(settings + std::vector<std::string>{raise_at(4, SIGKILL)}).code == 128 + SIGKILL);
  const Finished resumed = run.resume(settings);
  REQUIRE(resumed.code == 0);
  CHECK(resumed.json()["skipped_updates"] == 1);
  CHECK(run.values("fit", "loss_scale") == Doubles(5, 32768));
  check_as_unbroken(run, settings);
}

TEST_CASE("A resumed schedule goes on where it was, not further") {
  Run run("single_device", std::vector<float>(100, 0));
  const std::vector<std::string> settings = {"trainer.max_steps=100", "checkpoint.every_n_steps=25",
                                             "trainer.log_every_n_steps=1", R"(scheduler={"name":"cosine"})"};
  run.fit(settings + std::vector<std::string>{raise_at(30, SIGKILL)});
  REQUIRE(run.resume(settings).code == 0);
  CHECK(run.values("fit", "lr").at(25) == Approx(0.853553).epsilon(1e-6));
  CHECK(run.values("fit", "step").size() == 100);
}

TEST_CASE("A resume with another rate uses the config's, and says so with both") {
  Run run(any_strategy());
  const std::vector<std::string> settings = {"checkpoint.every_n_steps=5", "trainer.log_every_n_steps=1", "optimizer.lr=0.1"};
  run.fit(settings + std::vector<std::string>{raise_at(7, SIGKILL)});
  const Finished resumed = run.resume(settings + std::vector<std::string>{"optimizer.lr=0.01"});
  REQUIRE(resumed.code == 0);
  CHECK(
      resumed.err ==
      Contains{"warning: /optimizer/lr is 0.1 in the checkpoint and 0.01 in the config; the config's is used from update 6 on"});
  CHECK(run.values("fit", "lr") == Doubles{0.1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01, 0.01});
}

TEST_CASE("A resume with another optimizer, or other options of it, begins its state anew, and says so") {
  struct Row {
    const char *before, *after, *misfit;
    double w;
  };
  // Two updates by the first, two by the second, each on a gradient of 1 at a rate of 0.5.
  const Row rows[] = {
      {R"({"name":"sgd","lr":0.5})", R"({"name":"adam","lr":0.5})", "optimizer", -2},
      {R"({"name":"adam","lr":0.5})", R"({"name":"adamw","lr":0.5,"weight_decay":0.5})", "optimizer", -1.4375},
      {R"({"name":"sgd","lr":0.5,"momentum":0.5})", R"({"name":"sgd","lr":0.5})", "optimizer.weight.momentum_buffer", -2.25},
      {R"({"name":"adam","lr":0.5})", R"({"name":"adam","lr":0.5,"amsgrad":true})", "optimizer.weight.max_exp_avg_sq", -2},
      {R"({"name":"adam","lr":0.5,"amsgrad":true})", R"({"name":"adam","lr":0.5})", "optimizer.weight.max_exp_avg_sq", -2},
  };
  for (const Row& row : rows) {
    INFO(row.before << " to " << row.after);
    Run run(any_strategy(), {1, 1, 1, 1, 1});
    run.config["data"]["validation"] = run.config["data"]["train"];
    run.config["optimizer"] = Json::parse(row.before);
    REQUIRE(run.fit({"trainer.max_steps=2"}).code == 0);
    run.config["optimizer"] = Json::parse(row.after);
    const Finished resumed = run.resume({"trainer.max_steps=4"});
    INFO(resumed.err);
    REQUIRE(resumed.code == 0);
    CHECK(resumed.json()["validation"]["w"].get<double>() == Approx(row.w).epsilon(1e-4));
    CHECK(resumed.err == Contains{"warning: /optimizer/"});
    CHECK(resumed.err == Contains{std::string("the checkpoint's (") + row.misfit});
    CHECK(resumed.err == Contains{"begins anew"});
    CHECK_FALSE(run.resume({"trainer.max_steps=5"}).err == Contains{"begins anew"});
    const Finished other =
        run.resume({"trainer.max_steps=6", "model.options.name=other", R"(optimizer={"name":"rmsprop","lr":1})"});
    CHECK(other.code == 2);
    CHECK(other.err == Contains{"other"});
  }
}

TEST_CASE("A folder of somebody's in the place of a checkpoint stays, and the run ends with 1") {
  const Run run(any_strategy());
  write_file(run.folder / "run/step-00000005/notes.txt", "mine");
  const Finished fit = run.fit({"checkpoint.every_n_steps=5"});
  CHECK(fit.code == 1);
  CHECK(fit.err == Contains{(run.folder / "run/step-00000005").string() + " doesn't look like a checkpoint"});
  CHECK(fit.err == Contains{"notes.txt"});
  CHECK(read_file(run.folder / "run/step-00000005/notes.txt") == "mine");
}

TEST_CASE("Ctrl-C finishes the step, writes a checkpoint and ends with 130, SIGTERM with 143") {
  const auto [signal, code] = GENERATE(std::pair{SIGINT, 130}, std::pair{SIGTERM, 143});
  Run run(any_strategy());
  const std::vector<std::string> settings = {"trainer.max_epochs=2", "trainer.log_every_n_steps=1"};
  const Finished stopped = run.fit(settings + std::vector<std::string>{raise_at(4, signal)});
  INFO(stopped.err);
  CHECK(stopped.code == code);
  CHECK(stopped.json()["interrupted"] == true);
  CHECK(stopped.json()["steps"] == 5);
  CHECK(stopped.json()["checkpoint"] == (run.folder / "run/step-00000005").string());
  REQUIRE(run.resume(settings).code == 0);
  CHECK(run.trace() == numbers(0, 9) + numbers(0, 9));
  check_as_unbroken(run, settings);
}

TEST_CASE("A signal that whoever started the run has had ignored does not stop it") {
  const Run run("single_device");
  const Finished fit = run.command("fit", {raise_at(4, SIGINT)}, {"--json"}, {.ignores_sigint = true});
  CHECK(fit.code == 0);
  CHECK(fit.json()["steps"] == 10);
}

TEST_CASE("A second signal ends at once") {
  Run run("single_device");
  CHECK(run.fit({raise_at(4, SIGINT, 2)}).code == 130);
  CHECK(run.trace() == numbers(0, 4));
  CHECK(run.checkpoints().empty());
}

TEST_CASE("A run interrupted in validation repeats that validation, and no training") {
  Run run(any_strategy());
  run.config["data"]["validation"] = run.config["data"]["train"];
  const std::vector<std::string> settings = {"trainer.max_epochs=2", "trainer.log_every_n_steps=1"};
  const Finished stopped = run.fit(settings + std::vector<std::string>{raise_at(10, SIGINT, 1, 1)});
  CHECK(stopped.code == 130);
  CHECK(run.position("step-00000010")["validation_pending"] == true);
  CHECK(run.metrics("validate").empty());
  run.trace();
  REQUIRE(run.resume(settings).code == 0);
  CHECK(run.trace() == numbers(0, 9));
  check_as_unbroken(run, settings);
}

TEST_CASE("A run interrupted in validation ends its epoch there, also when another number of batches would make one") {
  Run run("single_device");
  run.config["data"]["validation"] = run.config["data"]["train"];
  const std::string change = GENERATE("data.train.batch_size=2", "data.train.limit=4");
  const std::vector<std::string> settings = {"trainer.max_epochs=2"};
  REQUIRE(run.fit(settings + std::vector<std::string>{raise_at(10, SIGINT, 1, 1)}).code == 130);
  run.trace();
  const Finished resumed = run.resume(settings + std::vector<std::string>{change});
  REQUIRE(resumed.code == 0);
  CHECK(resumed.err == Contains{"warning: /data/train"});
  CHECK(resumed.json()["epochs"] == 2);
  const bool in_pairs = change == "data.train.batch_size=2";
  CHECK(run.trace() == (in_pairs ? std::vector<std::string>{"0 1", "2 3", "4 5", "6 7", "8 9"} : numbers(0, 3)));
}

TEST_CASE("A run stopped by max_steps within an epoch, and interrupted in its validation, needs the same order") {
  Run run(any_strategy());
  run.config["data"]["validation"] = run.config["data"]["train"];
  const std::vector<std::string> settings = {"trainer.max_steps=5", "data.train.shuffle=true", "seed=1"};
  REQUIRE(run.fit(settings + std::vector<std::string>{raise_at(5, SIGINT, 1, 1)}).code == 130);
  CHECK(run.position("step-00000005")["validation_pending"] == true);
  const Finished resumed = run.resume(settings + std::vector<std::string>{"seed=2"});
  CHECK(resumed.code == 2);
  CHECK(resumed.err == Contains{"/seed is 1 in the checkpoint and 2 in the config"});
}

TEST_CASE("Resuming a finished run does nothing, and says so") {
  Run run(any_strategy());
  const std::string limit = GENERATE("trainer.max_steps=7", "trainer.max_epochs=1");
  REQUIRE(run.fit({limit}).code == 0);
  const std::vector<std::string> before = run.checkpoints();
  const std::string weights = read_file(run.folder / "run" / before.back() / "weights.safetensors"),
                    metrics = read_file(run.folder / "m.jsonl");
  run.trace();
  const Finished again = run.resume({limit});
  CHECK(again.code == 0);
  CHECK(again.err == Contains{"nothing to do: /trainer/max_"});
  CHECK(again.json()["nothing_to_do"].get<std::string>() == Contains{" is reached: "});
  CHECK(run.trace().empty());
  CHECK(run.checkpoints() == before);
  CHECK(read_file(run.folder / "run" / before.back() / "weights.safetensors") == weights);
  CHECK(read_file(run.folder / "m.jsonl") == metrics);
}

TEST_CASE("A finished run goes on when its limit is raised") {
  Run run(any_strategy());
  const std::vector<std::string> settings = {"trainer.max_epochs=2", "trainer.log_every_n_steps=1"};
  REQUIRE(run.fit({"trainer.max_epochs=2", "trainer.max_steps=7", "trainer.log_every_n_steps=1"}).code == 0);
  run.trace();
  REQUIRE(run.resume(settings).json()["steps"] == 20);
  CHECK(run.trace() == numbers(7, 9) + numbers(0, 9));
}

TEST_CASE("A truncated newest checkpoint is told, the one before is used, and the wreck stays") {
  Run run(any_strategy());
  const std::vector<std::string> settings = {"checkpoint.every_n_steps=2", "checkpoint.keep_last=2", "trainer.max_epochs=2"};
  run.fit(settings + std::vector<std::string>{raise_at(5, SIGKILL)});
  REQUIRE(run.checkpoints() == std::vector<std::string>{"last", "step-00000002", "step-00000004"});
  fs::copy(run.folder / "run/step-00000004", run.folder / "run/step-00000008");
  const fs::path weights = run.folder / "run/step-00000008/weights.safetensors";
  fs::resize_file(weights, fs::file_size(weights) / 2);
  if (GENERATE(false, true)) write_file(run.folder / "run/last", "step-00000008\n");
  write_file(run.folder / "run/.step-00000006.tmp-1-1/weights.safetensors", "half");
  run.trace();
  const Finished resumed = run.resume(settings + std::vector<std::string>{"trainer.max_steps=6"});
  INFO(resumed.err);
  REQUIRE(resumed.code == 0);
  CHECK(resumed.err == Contains{"step-00000008"});
  CHECK(run.trace() == numbers(4, 5));
  CHECK(run.checkpoints() == std::vector<std::string>{"last", "step-00000004", "step-00000006", "step-00000008"});
}

TEST_CASE("Whichever file of the newest checkpoint is truncated or empty, the one before is used") {
  Run run("single_device");
  const std::vector<std::string> settings = {"checkpoint.every_n_steps=2", "optimizer.momentum=0.9"};
  run.fit(settings + std::vector<std::string>{raise_at(5, SIGKILL)});
  const std::string name = GENERATE("weights.safetensors", "optimizer.safetensors", "state.json");
  const bool emptied = GENERATE(false, true);
  const fs::path file = run.folder / "run/step-00000004" / name;
  fs::resize_file(file, emptied ? 0 : fs::file_size(file) / 2);
  run.trace();
  const Finished resumed = run.resume(settings);
  INFO(resumed.err);
  REQUIRE(resumed.code == 0);
  CHECK(resumed.err == Contains{"step-00000004 is not whole ("});
  CHECK(resumed.err == Contains{name});
  CHECK(run.trace() == numbers(2, 9));
}

TEST_CASE("A checkpoint that was named with a slash at its end is one of the run's, which keep_last counts") {
  Run run("single_device");
  REQUIRE(run.fit({"trainer.max_steps=3"}).code == 0);
  const Finished resumed =
      run.fit({"checkpoint.keep_last=1"}, {"--json", "--resume", (run.folder / "run/step-00000003/").string()});
  REQUIRE(resumed.code == 0);
  CHECK(run.checkpoints() == std::vector<std::string>{"last", "step-00000010"});
}

TEST_CASE("A folder that holds no checkpoint, and one whose files can't be read, end with 2") {
  Run run("single_device");
  REQUIRE(run.fit().code == 0);
  const Finished none = run.fit({}, {"--resume", run.folder.path.string()});
  CHECK(none.code == 2);
  CHECK(none.err == Contains{run.folder.path.string() + " holds no checkpoint: "});
  chmod((run.folder / "run/step-00000010/state.json").c_str(), 0);
  const Finished unreadable = run.command("fit", {}, {"--resume", (run.folder / "run").string()}, {.obeys_modes = true});
  CHECK(unreadable.code == 2);
  CHECK(unreadable.err == Contains{"state.json: Permission denied"});
}

TEST_CASE(
    "An error in the middle leaves a checkpoint of the last update, from which the mended run adds up to the unbroken one") {
  Run run(any_strategy());
  run.config["data"]["train"]["targets"] = "y.npy";
  std::vector<float> labels(10, 0);
  labels.back() = 7;
  write_samples(run.folder / "y.npy", labels);
  const std::vector<std::string> settings = {"model.options.num_classes=2", "trainer.log_every_n_steps=1",
                                             "trainer.accumulate_grad_batches=4"};
  const Finished failed = run.fit(settings);
  CHECK(failed.code == 1);
  CHECK(failed.err == Contains{"label 7 at row 0; there are 2 classes"});
  CHECK(failed.err == Contains{"the weights after update 2 are saved in " + (run.folder / "run/step-00000002").string()});
  CHECK(run.position("step-00000002")["batch"] == 8);
  labels.back() = 1;
  write_samples(run.folder / "y.npy", labels);
  run.trace();
  REQUIRE(run.resume(settings).code == 0);
  CHECK(run.trace() == numbers(8, 9));
  check_as_unbroken(run, settings);
}

TEST_CASE("A metrics file on a full disk ends a run with 1, not with the loss of what it trained") {
  Run run(any_strategy());
  const Finished failed = run.fit({"metrics.path=/dev/full", "trainer.log_every_n_steps=5"});
  CHECK(failed.code == 1);
  CHECK(failed.err == Contains{"can't write to /dev/full: No space left on device"});
  CHECK(run.position("step-00000005")["step"] == 5);
  run.trace();
  REQUIRE(run.resume().json()["steps"] == 10);
  CHECK(run.trace() == numbers(5, 9));
}

TEST_CASE("An error before the first update leaves no checkpoint") {
  Run run(any_strategy());
  run.config["data"]["train"]["targets"] = "y.npy";
  write_samples(run.folder / "y.npy", std::vector<float>(10, 7));
  CHECK(run.fit({"model.options.num_classes=2"}).code == 1);
  CHECK(run.checkpoints().empty());
}

TEST_CASE("A damaged checkpoint that was asked for by name ends with 2 and the file") {
  Run run("single_device");
  REQUIRE(run.fit().code == 0);
  const fs::path weights = run.folder / "run/step-00000010/weights.safetensors";
  fs::resize_file(weights, 10);
  const Finished resumed = run.resume();
  CHECK(resumed.code == 2);
  CHECK(resumed.err == Contains{weights.string()});
}

TEST_CASE("A checkpoint of another model ends with 2 and the names") {
  Run run(any_strategy());
  REQUIRE(run.fit().code == 0);
  const Finished other = run.resume({"model.options.name=other"});
  CHECK(other.code == 2);
  CHECK(other.err == Contains{"weight"});
  CHECK(other.err == Contains{"other"});
}

TEST_CASE("A run saved under one strategy goes on under the other") {
  const auto [from, to] = GENERATE(std::pair{"single_device", "data_parallel"}, std::pair{"data_parallel", "single_device"});
  Run run(from);
  run.config["data"]["validation"] = run.config["data"]["train"];
  const std::vector<std::string> settings = {"trainer.max_epochs=2", "checkpoint.every_n_steps=3"};
  run.fit(settings + std::vector<std::string>{raise_at(5, SIGKILL)});
  run.trace();
  run.config["strategy"] = {{"name", to}, {"accelerator", "cpu"}};
  const Json result = run.resume(settings).json();
  CHECK(result["strategy"] == to);
  CHECK(result["validation"]["w"] == -90);
  CHECK(run.trace() == numbers(3, 9) + numbers(0, 9));
}

TEST_CASE("In the middle of an epoch another batch size is refused with both values") {
  Run run("single_device");
  run.fit({"checkpoint.every_n_steps=3", raise_at(5, SIGKILL)});
  const Finished resumed = run.resume({"data.train.batch_size=2"});
  CHECK(resumed.code == 2);
  CHECK(resumed.err == Contains{"/data/train/batch_size is 1 in the checkpoint and 2 in the config"});
}

TEST_CASE("A save that fails ends with 1 and leaves the checkpoint before, from which the run goes on") {
  Run run(any_strategy());
  const std::vector<std::string> settings = {"trainer.max_epochs=2", "trainer.log_every_n_steps=1"};
  REQUIRE(run.fit(settings + std::vector<std::string>{raise_at(4, SIGINT)}).code == 130);
  const std::vector<std::string> limited = settings + std::vector<std::string>{"metrics=null", "checkpoint.every_n_steps=7"};
  const Finished full = run.command("fit", limited, {"--resume", (run.folder / "run").string()}, {.max_file_bytes = 700});
  CHECK(full.code == 1);
  CHECK(full.err == Contains{"File too large"});
  CHECK(full.err.find("can't be saved") == std::string::npos);  // not tried again
  CHECK(run.checkpoints() == std::vector<std::string>{"last", "step-00000005"});
  run.trace();
  REQUIRE(run.resume(settings).json()["steps"] == 20);
  CHECK(run.trace() == numbers(5, 9) + numbers(0, 9));
  check_as_unbroken(run, settings);
}
