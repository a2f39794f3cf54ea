// SPDX-License-Identifier: Apache-2.0
//
// When validation runs, that it leaves training as it is, and how much of the data and how much time a run uses.
#include <csignal>

#include "run.hpp"

using namespace stratagem::test;

namespace {

using Doubles = std::vector<double>;
using Names = std::vector<std::string>;

std::string any_strategy() { return GENERATE("single_device", "data_parallel"); }

std::string raise_at(int64_t step, int signal, int stage = 0) {
  return "model.options.raise_at=" + Json{{"step", step}, {"signal", signal}, {"stage", stage}}.dump();
}

/// A run that is validated on its own samples.
struct Validated : Run {
  explicit Validated(const std::string& strategy, const std::vector<float>& samples = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9})
      : Run(strategy, samples) {
    config["data"]["validation"] = config["data"]["train"];
    config["trainer"] = {{"log_every_n_steps", 1}};
  }
  std::string weights(const std::string& checkpoint) const {
    return read_file(folder / "run" / checkpoint / "weights.safetensors") +
           read_file(folder / "run" / checkpoint / "optimizer.safetensors");
  }
};

}  // namespace

TEST_CASE("Validation every n steps counts updates through all epochs") {
  const Validated run(any_strategy(), {0, 1, 2, 3, 4});
  const Names settings = {"trainer.accumulate_grad_batches=2", "trainer.val_check_interval=3", "trainer.max_epochs=3"};
  REQUIRE(run.fit(settings).json()["steps"] == 9);
  CHECK(run.values("validate", "step") == Doubles{3, 6, 9});
  REQUIRE(run.fit(settings + Names{"trainer.val_check_interval=2"}).code == 0);
  CHECK(run.values("validate", "step") == Doubles{2, 4, 6, 8, 9});  // the last is the end of the run
  REQUIRE(run.fit(settings + Names{"trainer.val_check_interval=2", "trainer.max_steps=4"}).code == 0);
  CHECK(run.values("validate", "step") == Doubles{2, 4});
}

TEST_CASE("Validation every n epochs, and at the end of the run") {
  const Validated run("single_device", {1, 1});
  REQUIRE(run.fit({"trainer.check_val_every_n_epoch=2", "trainer.max_epochs=5"}).code == 0);
  CHECK(run.values("validate", "step") == Doubles{4, 8, 10});
  REQUIRE(run.fit({"trainer.check_val_every_n_epoch=2", "trainer.max_epochs=5", "trainer.max_steps=7"}).code == 0);
  CHECK(run.values("validate", "step") == Doubles{4, 7});
  CHECK(run.metrics("epoch").size() == 4);
}

TEST_CASE("The sanity validation counts for nothing: neither lines, nor best, nor patience") {
  Validated run(any_strategy(), {1});
  run.config["model"]["options"]["scores"] = {1.0, 0.6, 0.7};
  run.config["early_stopping"] = {{"monitor", "score"}, {"mode", "max"}, {"patience", 1}};
  const Finished fit = run.fit({"checkpoint.monitor=score", "checkpoint.mode=max", "trainer.max_epochs=2"});
  REQUIRE(fit.code == 0);
  CHECK(fit.json()["best"]["value"] == 0.7);
  CHECK(fit.json()["steps"] == 2);
  CHECK(run.values("validate", "score") == Doubles{0.6, 0.7});
}

TEST_CASE("A stop in the sanity validation ends the run before it trains or writes anything") {
  const Validated run(any_strategy(), {1, 2});
  const Finished fit = run.fit({R"(model.options.raise_at={"step": 0, "signal": 2, "stage": 1})"});
  INFO(fit.err);
  CHECK(fit.code == 130);
  CHECK(fit.json()["steps"] == 0);
  CHECK(fit.json()["checkpoint"].is_null());
  CHECK(run.trace().empty());
  CHECK(run.checkpoints().empty());
}

TEST_CASE("Validation, before training and in the middle of it, leaves training bitwise as it is") {
  const std::string strategy = any_strategy();
  Run alone(strategy);
  const Names settings = {"trainer.max_epochs=2", "trainer.log_every_n_steps=1", "model.options.draws=true", "optimizer.lr=0.1"};
  REQUIRE(alone.fit(settings).code == 0);
  for (const Names& more : {Names{"trainer.num_sanity_val_steps=0"},
                            {"trainer.num_sanity_val_steps=2"},
                            {"trainer.num_sanity_val_steps=-1", "trainer.val_check_interval=3"}}) {
    const Validated run(strategy);
    REQUIRE(run.fit(settings + more).code == 0);
    CHECK(run.metrics("fit") == alone.metrics("fit"));
    CHECK(read_file(run.folder / "run/step-00000020/weights.safetensors") ==
          read_file(alone.folder / "run/step-00000020/weights.safetensors"));
  }
}

TEST_CASE("The sanity validation is as long as its number says, and none with 0 or on a resume without a new monitor") {
  Validated run("single_device", {1, 1, 1});
  for (const char* file : {"good.npy", "bad.npy"}) write_samples(run.folder / file, {0, 0, file[0] == 'b' ? 7.F : 0.F});
  run.config["data"]["validation"]["targets"] = "bad.npy";  // the third batch is an error
  const auto fails_before_training = [&](const char* number) {
    const Finished fit = run.fit({"model.options.num_classes=2", std::string("trainer.num_sanity_val_steps=") + number});
    CHECK(fit.code == 1);
    CHECK(fit.err == Contains{"label 7"});
    return run.trace().empty();
  };
  for (const char* number : {"3", "100", "-1"}) CHECK(fails_before_training(number));
  for (const char* number : {"0", "2"}) CHECK(!fails_before_training(number));
  run.config["data"]["validation"]["targets"] = "good.npy";
  fs::remove_all(run.folder / "run");
  REQUIRE(run.fit().code == 0);
  run.trace();
  run.config["data"]["validation"]["targets"] = "bad.npy";
  CHECK(run.resume({"model.options.num_classes=2", "trainer.max_epochs=2", "trainer.num_sanity_val_steps=-1"}).code == 1);
  CHECK(run.trace().size() == 3);
}

TEST_CASE("A run killed between two validations of an epoch goes on bitwise as the unbroken one") {
  const std::string strategy = any_strategy();
  const int64_t step = GENERATE(5, 13);
  const Names settings = {
      "trainer.max_epochs=2",     "trainer.val_check_interval=3", "checkpoint.every_n_steps=2",    "checkpoint.monitor=w",
      "early_stopping.monitor=w", "early_stopping.patience=50",   "model.options.draws=true",      "optimizer.lr=0.1",
      "optimizer.momentum=0.9",   "data.train.shuffle=true",      R"(scheduler={"name":"cosine"})"};
  const Validated unbroken(strategy), run(strategy);
  REQUIRE(unbroken.fit(settings).code == 0);
  REQUIRE(run.fit(settings + Names{raise_at(step, SIGKILL)}).code == 128 + SIGKILL);
  const Finished resumed = run.resume(settings);
  INFO(resumed.err);
  REQUIRE(resumed.code == 0);
  for (const char* stage : {"fit", "epoch", "validate"}) CHECK(run.metrics(stage) == unbroken.metrics(stage));
  CHECK(run.weights("step-00000020") == unbroken.weights("step-00000020"));
  CHECK(read_file(run.folder / "run/best") == read_file(unbroken.folder / "run/best"));
  for (const char* key : {"early_stopping", "best", "loss", "validated_step"})
    CHECK(run.position("step-00000020")[key] == unbroken.position("step-00000020")[key]);
}

TEST_CASE("A run interrupted in a validation within an epoch repeats that, and goes on with the next batch") {
  const Validated run(any_strategy());
  const Names settings = {"trainer.val_check_interval=4"};
  const Finished stopped = run.fit(settings + Names{raise_at(4, SIGINT, 1)});
  CHECK(stopped.code == 130);
  CHECK(run.position("step-00000004")["validation_pending"] == true);
  CHECK(run.metrics("validate").empty());
  run.trace();
  REQUIRE(run.resume(settings).code == 0);
  CHECK(run.trace() == numbers(4, 9));
  CHECK(run.values("validate", "step") == Doubles{4, 8, 10});
  CHECK(run.metrics("epoch").size() == 1);
}

TEST_CASE("limit_train_batches is a number of batches, or with a decimal point a share of them, and the schedule's length") {
  const Validated run("single_device");
  REQUIRE(run.fit({"trainer.limit_train_batches=1", "trainer.max_epochs=2"}).code == 0);
  CHECK(run.trace() == Names{"0", "0"});
  REQUIRE(run.fit({"trainer.limit_train_batches=1.0"}).json()["steps"] == 10);
  run.trace();
  REQUIRE(run.fit({"trainer.limit_train_batches=0.45"}).code == 0);
  CHECK(run.trace() == numbers(0, 3));
  REQUIRE(run.fit({"trainer.limit_train_batches=100"}).json()["steps"] == 10);
  REQUIRE(run.fit({"trainer.limit_train_batches=4", "trainer.max_epochs=2", R"(scheduler={"name":"cosine"})"}).code == 0);
  const Doubles rates = run.values("fit", "lr");
  REQUIRE(rates.size() == 8);
  CHECK(rates[4] == Approx(0.5));
  const Finished none = run.fit({"trainer.limit_train_batches=0.05"});
  CHECK(none.code == 2);
  CHECK(none.err == Contains{"/trainer/limit_train_batches: 0.05 of 10 batches is less than one batch"});
}

TEST_CASE("Limited epochs of shuffled samples are parts of the whole order, and accumulate over what is there") {
  const Validated run("single_device");
  const Names shuffled = {"data.train.shuffle=true", "seed=1", "trainer.max_epochs=2", "trainer.limit_train_batches=3"};
  REQUIRE(run.fit(shuffled + Names{"trainer.accumulate_grad_batches=2"}).json()["steps"] == 4);
  CHECK(run.trace() == Names{"5", "0", "8", "6", "2", "8"});
}

TEST_CASE("limit_val_batches, limit_test_batches and limit_predict_batches limit their data sets") {
  Validated run("single_device");
  run.config["data"]["test"] = run.config["data"]["predict"] = run.config["data"]["train"];
  const Names limits = {"trainer.limit_val_batches=3", "trainer.limit_test_batches=0.5", "trainer.limit_predict_batches=2"};
  CHECK(run.fit(limits).json()["validation"]["mean_x"] == 1);
  const Names checkpoint = {"--json", "--checkpoint", (run.folder / "run").string()};
  CHECK(run.command("validate", limits, checkpoint).json()["validation"]["mean_x"] == 1);
  CHECK(run.command("test", limits, checkpoint).json()["test"]["mean_x"] == 2);
  const Finished predicted = run.command("predict", limits, checkpoint + Names{"--output", (run.folder / "p.npz").string()});
  CHECK(predicted.json()["arrays"]["x"] == Json{2, 1});
  const Finished none = run.command("test", {"trainer.limit_test_batches=0.01"}, checkpoint);
  CHECK(none.code == 2);
  CHECK(none.err == Contains{"/trainer/limit_test_batches: 0.01 of 10 batches is less than one batch"});
}

TEST_CASE("overfit_batches trains on the same batches in each epoch, in order, and validates on them") {
  Validated run(any_strategy());
  write_samples(run.folder / "v.npy", {100, 200});
  run.config["data"]["validation"]["inputs"] = "v.npy";
  const Finished fit =
      run.fit({"trainer.overfit_batches=2", "trainer.max_epochs=2", "data.train.batch_size=2", "data.train.shuffle=true"});
  INFO(fit.err);
  REQUIRE(fit.code == 0);
  CHECK(fit.json()["steps"] == 4);
  CHECK(fit.json()["validation"]["mean_x"] == 1.5);  // 0 to 3
  if (run.config["strategy"]["name"] == "single_device") CHECK(run.trace() == Names{"0 1", "2 3", "0 1", "2 3"});
  // The file of validation isn't looked for.
  const Finished without = run.fit({"trainer.overfit_batches=2", "data.validation.inputs=nothing.npy"});
  INFO(without.err);
  CHECK(without.json()["validation"]["mean_x"] == 0.5);
  CHECK(run.fit({"data.validation.inputs=nothing.npy"}).err == Contains{"/data/validation/inputs"});
  const Finished both = run.fit({"trainer.overfit_batches=2", "trainer.limit_val_batches=1"});
  CHECK(both.code == 2);
  CHECK(both.err ==
        Contains{"/trainer/limit_val_batches: /trainer/overfit_batches says which batches are used; give one of them"});
}

TEST_CASE("max_time ends a run after the update in which it is over, and counts the time of earlier processes") {
  const Validated run("single_device");
  const Finished fit = run.fit({"trainer.max_time=1e-9"});
  CHECK(fit.code == 0);
  CHECK(fit.json()["steps"] == 1);
  CHECK(fit.json()["ended_by"].get<std::string>() == Contains{"/trainer/max_time (1e-09 s) is reached: training took "});
  CHECK(run.values("validate", "step") == Doubles{1});
  const double used = run.position("step-00000001")["seconds"];
  CHECK(used > 0);
  const Finished again = run.resume({"trainer.max_time=" + std::to_string(used / 2)});
  CHECK(again.code == 0);
  CHECK(again.json()["nothing_to_do"].get<std::string>() == Contains{"/trainer/max_time"});
  // It is over with the first update of the process that goes on.
  CHECK(run.resume({"trainer.max_time=" + Json(used * (1 + 1e-9)).dump()}).json()["steps"] == 2);
  CHECK(run.resume({R"(trainer.max_time="00:01:00:00")", "trainer.max_epochs=1"}).json()["steps"] == 10);
}
