// SPDX-License-Identifier: Apache-2.0
//
// The training loop through the command line, under both strategies, on a model whose every number is known.
#include <cmath>
#include <csignal>
#include <cstdlib>

#include "run.hpp"

using namespace stratagem::test;

namespace {

using Doubles = std::vector<double>;

std::string any_strategy() { return GENERATE("single_device", "data_parallel"); }

}  // namespace

TEST_CASE("fit --json prints one object as its last line, with all that a program wants to know") {
  Run run(any_strategy());
  run.config["data"]["validation"] = run.config["data"]["train"];
  const Finished fit = run.fit();
  INFO(fit.err);
  REQUIRE(fit.code == 0);
  const Json result = fit.json();
  CHECK(result["strategy"] == run.config["strategy"]["name"]);
  CHECK(result["devices"] == (run.config["strategy"]["name"] == "single_device" ? Json{"cpu:0"} : Json{"cpu:0", "cpu:1"}));
  CHECK(result["steps"] == 10);
  CHECK(result["epochs"] == 1);
  CHECK(result["train_loss"] == Approx(-87.0));  // sum over x of x * -(0 + ... + x-1), over 10
  CHECK(result["validation"]["loss"] == Approx(-45 * 4.5));
  CHECK(!result["validation"].contains("predictions"));
  CHECK(result["seconds"].get<double>() > 0);
  CHECK(result["step_ms_median"].get<double>() > 0);
  CHECK(result["checkpoint"] == (run.folder / "run/step-00000010").string());
  CHECK(result["interrupted"] == false);
  CHECK(run.trace() == numbers(0, 9));
}

TEST_CASE("Without --json a person is told strategy, devices, loss, validation and checkpoint") {
  Run run("single_device");
  run.config["data"]["validation"] = run.config["data"]["train"];
  const Finished fit = run.fit({}, {});
  CHECK(fit.out == Contains{"strategy    single_device on cpu:0\ntrained     10 steps, 1 epochs in "});
  CHECK(fit.out == Contains{"\ntrain loss  -87\nvalidation  loss -202.5, mean_x 4.5, w -45\ncheckpoint  " +
                            (run.folder / "run/step-00000010").string()});
  CHECK(fit.err == "");
}

TEST_CASE("A last, shorter window of micro-batches is divided by what is there") {
  Run run(any_strategy(), {1, 1, 1, 1, 2, 4});
  run.config["data"]["validation"] = run.config["data"]["train"];
  REQUIRE(run.fit({"trainer.accumulate_grad_batches=4", "trainer.log_every_n_steps=1"}).code == 0);
  CHECK(run.values("fit", "loss") == Doubles{0, -3});  // w = -1 after the first update
  CHECK(run.values("validate", "w") == Doubles{-4});
}

TEST_CASE("The schedule and the steps count updates, not micro-batches") {
  Run run(any_strategy(), std::vector<float>(16, 1));
  REQUIRE(run.fit({"trainer.accumulate_grad_batches=4", "trainer.log_every_n_steps=1", "optimizer.lr=0.4",
                   R"(scheduler={"name":"constant","warmup_steps":4})"})
              .code == 0);
  CHECK(run.values("fit", "step") == Doubles{1, 2, 3, 4});
  const Doubles rates = run.values("fit", "lr");
  for (size_t i = 0; i < 4; ++i) CHECK(rates[i] == Approx(0.1 * static_cast<double>(i + 1)));
}

TEST_CASE("Validation means count samples, over replicas and over a last, smaller batch") {
  Run run(any_strategy());
  write_samples(run.folder / "v.npy", {1, 1, 6, 6, 1});  // 3 samples, 2 of them on the first of two replicas, and 2
  run.config["data"]["validation"] = {{"format", "npy"}, {"inputs", "v.npy"}, {"batch_size", 3}};
  REQUIRE(run.fit({"optimizer.lr=0", "model.options.w=1"}).code == 0);
  CHECK(run.values("validate", "loss")[0] == Approx(3).epsilon(1e-6));
}

TEST_CASE("train_loss is the mean over the epoch's samples") {
  Run run(any_strategy(), {4, 4, 2, 2, 1});
  const Json result = run.fit({"optimizer.lr=0", "model.options.w=1", "data.train.batch_size=2"}).json();
  CHECK(result["train_loss"] == Approx(2.6));
  CHECK(run.values("epoch", "train_loss") == Doubles{2.6});
}

TEST_CASE("Figures are means over the model's own denominators, over replicas and over batches, and what has none isn't read") {
  Run run(any_strategy(), {4, 2, 0, 6, 3});  // of (0, 6) one replica of two has nothing to count: its mean is NaN
  run.config["data"]["validation"] = run.config["data"]["train"];
  const Finished fit = run.fit({"optimizer.lr=0", "model.options.w=1", "model.options.counts=true", "data.train.batch_size=2",
                                "data.validation.batch_size=2", "trainer.log_every_n_steps=1"});
  INFO(fit.err);
  REQUIRE(fit.code == 0);
  CHECK(run.values("fit", "loss") == Doubles{3, 6, 3});
  CHECK(run.values("epoch", "train_loss") == Doubles{3.75});  // by rows it would be 4.2
  CHECK(fit.json()["train_loss"] == 3.75);
  CHECK(run.values("validate", "loss") == Doubles{3.75});
  CHECK(run.values("validate", "mean_x") == Doubles{3.75});
  REQUIRE(run.fit({"optimizer.lr=0", "model.options.w=1", "model.options.counts=true", "data.train.batch_size=2",
                   "trainer.accumulate_grad_batches=3", "trainer.log_every_n_steps=1"})
              .code == 0);
  CHECK(run.values("fit", "loss") == Doubles{3.75});
}

TEST_CASE("NaN and infinity leave the files strict JSON, as null, with the other fields right") {
  Run run(any_strategy(), {INFINITY, 1, 1});
  const Finished fit = run.fit({"trainer.max_steps=2", "trainer.log_every_n_steps=1"});
  INFO(fit.err);
  REQUIRE(fit.code == 0);
  CHECK(fit.json()["train_loss"].is_null());
  CHECK(fit.json()["steps"] == 2);
  const std::vector<Json> lines = run.metrics("fit");
  REQUIRE(lines.size() == 2);
  CHECK(lines[1]["loss"].is_null());
  CHECK(lines[1]["lr"] == 1);
  CHECK(run.position("step-00000002")["loss"]["sum"].is_null());
}

TEST_CASE("Every n steps means after finished updates n, 2n, ..., for metrics and checkpoints") {
  Run run(any_strategy(), std::vector<float>(20, 1));
  REQUIRE(run.fit({"trainer.log_every_n_steps=5", "checkpoint.every_n_steps=10"}).code == 0);
  CHECK(run.values("fit", "step") == Doubles{5, 10, 15, 20});
  CHECK(run.checkpoints() == std::vector<std::string>{"last", "step-00000010", "step-00000020"});
  CHECK(run.position("step-00000010")["step"] == 10);
  CHECK(run.position("step-00000020")["step"] == 20);
}

TEST_CASE("The logging interval spans epochs that are shorter than it") {
  Run run(any_strategy(), {1, 1, 1});
  REQUIRE(run.fit({"trainer.log_every_n_steps=5", "trainer.max_epochs=5"}).code == 0);
  CHECK(run.values("fit", "step") == Doubles{5, 10, 15});
  CHECK(run.metrics("epoch").size() == 5);
}

TEST_CASE("max_steps is exactly so many updates, also with accumulation, and reads no batch more") {
  Run run(any_strategy(), {0, 1, 2, 3, 4});
  const Json result = run.fit({"trainer.accumulate_grad_batches=2", "trainer.max_steps=7", "trainer.max_epochs=100",
                               "trainer.log_every_n_steps=1"})
                          .json();
  CHECK(result["steps"] == 7);
  CHECK(run.values("fit", "epoch") == Doubles{0, 0, 0, 1, 1, 1, 2});
  CHECK(run.trace().size() == 12);
  const Finished zero = run.fit({"trainer.max_steps=0"});
  CHECK(zero.code == 2);
  CHECK(zero.err == Contains{"/trainer/max_steps: 0 is not allowed"});
}

TEST_CASE("Fewer samples than the batch make one batch of what is there, none are refused with the file") {
  Run run("single_device", {1, 2, 3});
  REQUIRE(run.fit({"data.train.batch_size=1024", "trainer.max_epochs=2"}).code == 0);
  CHECK(run.trace() == std::vector<std::string>{"1 2 3", "1 2 3"});
  write_samples(run.folder / "x.npy", {});
  const Finished none = run.fit();
  CHECK(none.code == 2);
  CHECK(none.err == Contains{"no samples in " + (run.folder / "x.npy").string()});
}

TEST_CASE("A skipped update is no update: the schedule and the steps wait for the next, and the epoch's line counts it") {
  Run run(any_strategy(), {3e38F, 1, 1, 1, 1});
  run.config["data"]["validation"] = run.config["data"]["train"];
  const std::vector<std::string> settings = {"precision=16-mixed", "trainer.log_every_n_steps=1", "optimizer.lr=0.4",
                                             R"(scheduler={"name":"constant","warmup_steps":4})"};
  const Finished fit = run.fit(settings);
  INFO(fit.err);
  REQUIRE(fit.code == 0);
  CHECK(fit.json()["steps"] == 4);
  CHECK(fit.json()["skipped_updates"] == 1);
  CHECK(run.metrics("epoch").at(0)["skipped_updates"] == 1);
  CHECK(run.values("fit", "loss_scale") == Doubles(4, 32768));
  const Doubles rates = run.values("fit", "lr");
  for (size_t i = 0; i < 4; ++i) CHECK(rates[i] == Approx(0.1 * static_cast<double>(i + 1)));
  CHECK(run.values("validate", "w").at(0) == Approx(-1));  // as without the bad batch
}

TEST_CASE("A run whose every update overflows ends after 24 with its weights untouched, and says so") {
  Run run(any_strategy(), std::vector<float>(8, INFINITY));  // whatever the scale
  const Finished fit = run.fit({"precision=16-mixed", "trainer.max_epochs=3", "trainer.max_steps=5"});
  CHECK(fit.code == 1);
  CHECK(fit.err ==
        Contains{"24 updates in a row were skipped (a gradient was not finite); the weights are those after update 0"});
  CHECK(run.trace().size() == 24);
  CHECK(run.checkpoints().empty());
}

TEST_CASE(
    "Inputs that float16 can't hold overflow at any scale: the run ends after 24 updates with its weights untouched and a scale "
    "above 0") {
  const std::string strategy = any_strategy();
  const auto model = [](Run& run) { run.config["model"] = {{"kind", "library"}, {"path", TEST_TOY_LINEAR}}; };
  Run run(strategy, std::vector<float>(8, 3e38F));
  model(run);
  const Finished fit = run.fit({"precision=16-mixed", "trainer.max_epochs=3", "trainer.max_steps=5"});
  CHECK(fit.code == 1);
  CHECK(fit.err ==
        Contains{"24 updates in a row were skipped (a gradient was not finite); the weights are those after update 0"});
  CHECK(run.checkpoints().empty());

  std::vector<float> samples(30, 3e38F);
  samples[0] = samples[1] =
      0;  // the loss is float16 itself, which holds no 65536; then an update, after which there is something to save
  Run saved(strategy, samples);
  model(saved);
  CHECK(saved.fit({"precision=16-mixed"}).code == 1);
  CHECK(saved.checkpoints() == std::vector<std::string>{"last", "step-00000001"});
  const std::string weights = read_file(saved.folder / "run/step-00000001/weights.safetensors");
  CHECK(weights.substr(weights.size() - 4) == std::string(4, '\0'));
  CHECK(Json::parse(read_file(saved.folder / "run/step-00000001/state.json"))["scaler"]["scale"] == 0x1p-9);
}

TEST_CASE("A data file that isn't what its header says ends a run with 2 and both numbers, before anything is trained") {
  Run run("single_device");
  run.config["data"]["train"] = {{"format", "idx"}, {"inputs", "x-idx"}};
  const std::string images = bytes("00 00 08 03 00 00 00 03 00 00 00 02 00 00 00 02");
  for (const auto& [content, numbers] : std::map<std::string, std::string>{
           {images + std::string(9, 'x'), "12 bytes of elements expected by its header, 9 found"},
           {images + std::string(13, 'x'), "12 bytes of elements expected by its header, 13 found"},
           {bytes("00 00 08 01 02 00 00 00 07 09"), "33554432 bytes of elements expected by its header, 2 found"}}) {
    write_file(run.folder / "x-idx", content);
    const Finished fit = run.fit();
    CHECK(fit.code == 2);
    CHECK(fit.err == Contains{(run.folder / "x-idx").string()});
    CHECK(fit.err == Contains{numbers});
    CHECK(run.trace().empty());
  }
}

TEST_CASE("Shuffling depends on the seed and the epoch alone") {
  Run run("single_device");
  const std::vector<std::string> shuffled = {"data.train.shuffle=true", "trainer.max_epochs=2", "seed=1"};
  REQUIRE(run.fit(shuffled).code == 0);
  CHECK(run.trace() == std::vector<std::string>{"5", "0", "8", "7", "3", "1", "9", "6", "4", "2",
                                                "6", "2", "8", "7", "4", "5", "9", "3", "0", "1"});
}

TEST_CASE("Clipping by norm and by value reach the strategy") {
  Run run(any_strategy(), {8, 8});
  run.config["data"]["validation"] = run.config["data"]["train"];
  REQUIRE(run.fit({"trainer.gradient_clip_val=0.5"}).code == 0);
  CHECK(run.values("validate", "w").at(0) == Approx(-1).epsilon(1e-5));
  REQUIRE(run.fit({"trainer.gradient_clip_val=0.25", "trainer.gradient_clip_algorithm=value"}).code == 0);
  CHECK(run.values("validate", "w").at(0) == Approx(-0.5));
}

TEST_CASE("Clipping acts once, on the whole gradient of a window of micro-batches") {
  Run run(any_strategy(), {8, 0, 8, 8});
  run.config["data"]["validation"] = run.config["data"]["train"];
  // The means are 4 and 8, clipped to 0.5 each; clipped by micro-batch the first would be 0.25.
  REQUIRE(run.fit({"trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.5"}).code == 0);
  CHECK(run.values("validate", "w").at(0) == Approx(-1).epsilon(1e-5));
}

TEST_CASE("validate and test evaluate a checkpoint and change nothing") {
  Run run(any_strategy());
  run.config["data"]["validation"] = run.config["data"]["train"];
  run.config["data"]["test"] = run.config["data"]["train"];
  REQUIRE(run.fit().code == 0);
  const std::string before = read_file(run.folder / "run/step-00000010/weights.safetensors");
  const std::vector<std::string> words = {"--json", "--checkpoint", (run.folder / "run").string()};
  const Json validated = run.command("validate", {}, words).json();
  CHECK(validated["validation"]["w"] == -45);
  CHECK(validated["checkpoint"] == (run.folder / "run/step-00000010").string());
  CHECK(run.command("test", {}, words).json()["test"]["loss"] == Approx(-45 * 4.5));
  CHECK(read_file(run.folder / "run/step-00000010/weights.safetensors") == before);
  CHECK(run.trace() == numbers(0, 9));
  const Finished missing = run.command("validate", {}, {"--checkpoint", (run.folder / "none").string()});
  CHECK(missing.code == 2);
  CHECK(missing.err == Contains{"there is no checkpoint folder " + (run.folder / "none").string()});
}

TEST_CASE("An error of the model in training ends with 1 and says what, where") {
  Run run(any_strategy());
  write_file(run.folder / "images", bytes("00 00 08 01 00 00 00 03 01 02 03"));
  write_file(run.folder / "labels", bytes("00 00 08 01 00 00 00 03 01 00 07"));
  run.config["data"]["train"] = {{"format", "idx"}, {"inputs", "images"}, {"targets", "labels"}};
  const Finished fit = run.fit({"model.options.num_classes=2"});
  CHECK(fit.code == 1);
  CHECK(fit.out.empty());
  CHECK(fit.err == Contains{"label 7 at row 0; there are 2 classes"});
}

TEST_CASE("A device that is missing is told before anything is created") {
  const Run run(any_strategy());
  write_file(run.folder / "c.json", run.config.dump());
  const Finished cuda = run_stratagem(
      {"fit", (run.folder / "c.json").string(), "--set", "strategy.accelerator=cuda"}, "/",
      {{"STRATAGEM_PLUGIN_PATH", TEST_PLUGINS "/toy"}, {"LD_LIBRARY_PATH", TEST_FAKE_DRIVER}, {"FAKE_CUDA", "devices=0"}});
  CHECK(cuda.code == 3);
  CHECK(!fs::exists(run.folder / "run"));
  CHECK(cuda.err == Contains{"/strategy/accelerator: \"cuda\": NVIDIA's driver is here, but finds no GPU"});
  const Finished options = run.fit({"strategy.options.nothing=1"});
  CHECK(options.code == 2);
  CHECK(options.err == Contains{"/strategy/options/nothing: unknown key by the strategy"});
}

TEST_CASE("What a model's constructor throws before the start is about its options, and ends with 2") {
  const Run run(any_strategy());
  const std::string where = GENERATE("create", "replicate");
  const Finished fit = run.fit({"model.options.fails=" + where});
  CHECK(fit.code == 2);
  CHECK(fit.err == Contains{"the toy was told to fail"});
}

TEST_CASE("What a strategy says about its devices has the config's pointer") {
  const Run run("data_parallel");
  const Finished fit = run.fit({"strategy.devices=[0,0]"});
  CHECK(fit.code == 2);
  CHECK(fit.err == Contains{"strategy \"data_parallel\": /strategy/devices/1: cpu:0 stands twice"});
}

TEST_CASE("A result that can't be written ends with 1, though the training is done and saved") {
  const Run run("single_device");
  const Finished full = run.command("fit", {}, {"--json"}, {.out = "/dev/full"});
  CHECK(full.code == 1);
  CHECK(full.err == Contains{"can't write the result to stdout: No space left on device"});
  CHECK(run.position("step-00000010")["step"] == 10);
}

TEST_CASE("The largest numbers of the config are no overflow") {
  Run run(any_strategy());
  const Finished fit =
      run.fit({"data.train.batch_size=9223372036854775807", "trainer.accumulate_grad_batches=9223372036854775807",
               "seed=9223372036854775807", "trainer.max_epochs=2"});
  INFO(fit.err);
  CHECK(fit.code == 0);
  CHECK(fit.json()["steps"] == 2);
}

TEST_CASE("Data are read from the config's folder, not from the one that a command is called in") {
  const Run run("single_device", {1, 2, 3});
  const TemporaryFolder elsewhere;
  write_samples(elsewhere / "x.npy", {7, 8});
  write_file(run.folder / "c.json", run.config.dump());
  const Finished done = run_stratagem({"fit", (run.folder / "c.json").string(), "--json"}, elsewhere.path,
                                      {{"STRATAGEM_PLUGIN_PATH", TEST_PLUGINS "/toy"}});
  INFO(done.err);
  CHECK(done.code == 0);
  CHECK(run.trace() == numbers(1, 3));
  CHECK(fs::path(done.json()["checkpoint"].get<std::string>()).parent_path() == run.folder / "run");
  CHECK(std::distance(fs::directory_iterator(elsewhere.path), {}) == 1);
}

TEST_CASE("A folder that can't be written to is told before training") {
  const Run run("single_device");
  write_file(run.folder / "file", "");
  const Finished dir = run.fit({"checkpoint.dir=file/run"});
  CHECK(dir.code == 2);
  CHECK(dir.err == Contains{"/checkpoint/dir: "});
  const Finished metrics = run.fit({"metrics.path=/proc/none/m.jsonl"});
  CHECK(metrics.code == 2);
  CHECK(metrics.err == Contains{"/metrics/path: "});
  fs::create_symlink("nowhere/m.jsonl", run.folder / "dangling");
  const Finished dangling = run.fit({"metrics.path=dangling"});
  CHECK(dangling.code == 2);
  CHECK(dangling.err == Contains{"/metrics/path: can't write " + (run.folder / "dangling").string()});
  CHECK(run.trace().empty());
}

TEST_CASE("A progress bar is drawn on a terminal, and only there") {
  const Run run("single_device");
  const std::vector<std::string> words = {"fit", (run.folder / "c.json").string(), "--json"};
  REQUIRE(run.fit().err == "");  // writes the config
  const std::map<std::string, std::string> environment = {
      {"STRATAGEM_PLUGIN_PATH", TEST_PLUGINS "/toy"}, {"TERM", "xterm"}, {"NO_COLOR", "1"}};
  const Finished shown = run_stratagem(words, "/", environment, {.on_terminal = true});
  INFO(shown.err);
  CHECK(shown.code == 0);
  CHECK(shown.err == Contains{"epoch 1/1 [########################] 10/10  step 10"});
  CHECK(shown.json()["steps"] == 10);
}

TEST_CASE("A plugin built with another LibTorch than the one in the process is refused with both") {
  const Run run("single_device");
  const std::string other = TEST_PLUGINS "/other_libtorch/toy_other_libtorch.so";
  const fs::path its_own = TEST_PLUGINS "/other_libtorch/lib/libtorch_cpu.so";  // where its run path leads; never opened
  fs::create_directories(its_own.parent_path());
  write_file(its_own, "");
  const Finished refused = run.fit({"model.name=null", "model.path=" + other});
  CHECK(refused.code == 3);
  CHECK(refused.err ==
        Contains{other + " was built with LibTorch 1.13.1 (" + its_own.string() + "), but this process already holds LibTorch "});
  CHECK(refused.err == Contains{"libtorch_cpu.so"});
  CHECK(refused.err == Contains{TEST_INSTALLED "/single_device.so"});
}

TEST_CASE("Without a GPU \"auto\" is the cpu, which is said once, with the reason") {
  Run run(any_strategy());
  run.config["strategy"]["accelerator"] = "auto";
  Json next = run.config["strategy"];
  next["devices"] = 1;
  run.config["swap"] = Json::array({{{"at_step", 4}, {"strategy", next}}});  // another instance
  setenv("CUDA_VISIBLE_DEVICES", "", 1);                                     // for the command line, where this machine has one
  const Finished fit = run.fit();
  unsetenv("CUDA_VISIBLE_DEVICES");
  REQUIRE(fit.code == 0);
  const std::string said = "accelerator \"auto\" is the cpu here; cuda: ";
  const size_t at = fit.err.find(said);
  REQUIRE(at != std::string::npos);
  CHECK(fit.err.find(said, at + 1) == std::string::npos);
  CHECK(fit.json()["devices"] == Json{"cpu:0"});
}

TEST_CASE("An accelerator that neither we nor the strategy know is refused with those that there are") {
  Run run(any_strategy());
  const Finished fit = run.fit({"strategy.accelerator=cuad"});
  CHECK(fit.code == 2);
  CHECK(
      fit.err ==
      Contains{"/strategy/accelerator: \"cuad\" is not allowed; wanted: \"auto\", \"cpu\" or \"cuda\"; did you mean \"cuda\"?"});
}
