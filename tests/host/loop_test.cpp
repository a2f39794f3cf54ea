// SPDX-License-Identifier: Apache-2.0
//
// The loop's parts on their own: schedules, means, positions, lines of the metrics file.
#include <cmath>
#include <limits>

#include "libstratagem/loop/metrics.hpp"
#include "libstratagem/loop/position.hpp"
#include "libstratagem/loop/schedule.hpp"
#include "support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

std::vector<double> rates(const SchedulerConfig& scheduler, double base, int64_t num_updates, int64_t total) {
  std::vector<double> all;
  for (int64_t u = 0; u < num_updates; ++u) all.push_back(learning_rate(scheduler, base, u, total));
  return all;
}

Config config_of(const char* text) {
  Config config;
  config.json = Json::parse(text);
  config.train.emplace();
  config.train->batch_size = 4;
  config.seed = 1;
  return config;
}

}  // namespace

TEST_CASE("Cosine follows half a wave from the base rate to min_lr") {
  SchedulerConfig cosine;
  cosine.name = "cosine";
  CHECK(learning_rate(cosine, 1, 0, 100) == 1);
  CHECK(learning_rate(cosine, 1, 25, 100) == Approx(0.853553).epsilon(1e-6));  // 0.5 (1 + cos(pi / 4))
  CHECK(learning_rate(cosine, 1, 50, 100) == Approx(0.5));
  CHECK(learning_rate(cosine, 1, 100, 100) == Approx(0).margin(1e-15));
  CHECK(learning_rate(cosine, 1, 150, 100) == Approx(0).margin(1e-15));
  cosine.min_lr = 0.2;
  CHECK(learning_rate(cosine, 1, 50, 100) == Approx(0.6));
  cosine.total_steps = 50;
  CHECK(learning_rate(cosine, 1, 50, 100) == Approx(0.2));
}

TEST_CASE("Warm-up rises linearly and reaches the full rate at its last update") {
  SchedulerConfig scheduler;
  scheduler.warmup_steps = 4;
  const std::vector<double> constant = rates(scheduler, 0.4, 6, 100);
  const double expected[] = {0.1, 0.2, 0.3, 0.4, 0.4, 0.4};
  for (size_t i = 0; i < 6; ++i) CHECK(constant[i] == Approx(expected[i]));
  scheduler.name = "cosine";
  const std::vector<double> cosine = rates(scheduler, 0.4, 9, 8);
  CHECK(cosine[3] == Approx(0.4));
  CHECK(cosine[4] == Approx(0.4));
  CHECK(cosine[6] == Approx(0.2));
  CHECK(cosine[8] == Approx(0).margin(1e-15));
}

TEST_CASE("Step falls by gamma every step_size updates after the warm-up") {
  SchedulerConfig step;
  step.name = "step";
  step.step_size = 2;
  step.gamma = 0.5;
  step.warmup_steps = 1;
  CHECK(rates(step, 8, 7, 100) == std::vector<double>{8, 8, 8, 4, 4, 2, 2});
}

TEST_CASE("The run's length in updates is the smaller of its limits") {
  TrainerConfig trainer;
  trainer.max_epochs = 3;
  CHECK(total_updates(trainer, 10) == 30);
  trainer.max_steps = 7;
  CHECK(total_updates(trainer, 10) == 7);
  trainer.max_epochs = no_limit;
  CHECK(total_updates(trainer, 10) == 7);
}

TEST_CASE("A weighted mean counts what each value stands for and doesn't read what has no weight") {
  WeightedMean accuracy;
  accuracy.add(0.7, 256);
  accuracy.add(0.8, 256);
  accuracy.add(0.9, 10);
  CHECK(accuracy.mean() == Approx(0.752874).epsilon(1e-6));
  accuracy.add(not_a_number, 0);
  CHECK(accuracy.mean() == Approx(0.752874).epsilon(1e-6));
  CHECK(std::isnan(WeightedMean().mean()));
}

TEST_CASE("A metrics line is strict JSON: what is not finite is null, and no name takes the place of ours") {
  const std::string line =
      metrics_line(3, 1, "fit", {{"loss", not_a_number}, {"lr", 0.1}, {"norm", INFINITY}, {"step", 7}, {"time", 8}}, 12.5);
  CHECK(line ==
        R"({"step":3,"epoch":1,"stage":"fit","loss":null,"lr":0.1,"norm":null,"model/step":7.0,"model/time":8.0,"time":12.5})");
}

TEST_CASE("A new run's metrics file puts the old one aside, a resumed run keeps the lines up to its position") {
  const TemporaryFolder folder;
  const fs::path path = folder / "deep/metrics.jsonl";
  const auto line = [](int64_t step, const char* stage) { return metrics_line(step, 0, stage, {}, 0) + "\n"; };
  const std::string old = line(1, "fit") + line(2, "fit") + line(2, "validate") + line(3, "fit") + "{\"step\": 4, \"ep";
  write_file(path, old);
  Position position;
  position.step = 2;
  { MetricsFile(path, position, {}).write(position, "fit", {}); }
  const std::string kept = line(1, "fit") + line(2, "fit") + line(2, "validate");
  const std::string resumed = read_file(path);
  CHECK(resumed.substr(0, kept.size()) == kept);
  CHECK(std::count(resumed.begin(), resumed.end(), '\n') == 4);
  position.validation_pending = true;
  write_file(path, old);
  { MetricsFile(path, position, {}); }
  CHECK(read_file(path) == line(1, "fit") + line(2, "fit"));
  { MetricsFile(path, std::nullopt, {}); }
  CHECK(read_file(path) == "");
  CHECK(read_file(path.string() + ".previous") == line(1, "fit") + line(2, "fit"));
}

TEST_CASE("A position comes back from its JSON, also with a loss that is not a number") {
  const Config config = config_of(R"({"optimizer": {"name": "sgd", "lr": 0.1}})");
  Position position{2, 3, 25, true, {0.1 + 0.2, 7}};
  std::vector<std::string> warnings;
  const auto through_text = [&](const Position& p) {
    return restore_position(Json::parse(host_state(p, config, 10).dump()), config, 10, warnings);
  };
  const Position back = through_text(position);
  CHECK(back.epoch == 2);
  CHECK(back.batch == 3);
  CHECK(back.step == 25);
  CHECK(back.validation_pending);
  CHECK(back.loss.sum == 0.1 + 0.2);
  CHECK(back.loss.weight == 7);
  position.loss.sum = not_a_number;
  CHECK(std::isnan(through_text(position).loss.sum));
  CHECK(warnings.empty());
}

TEST_CASE("A resume with another rate is told with the pointer and both values") {
  const Json saved =
      host_state({}, config_of(R"({"optimizer": {"name": "sgd", "lr": 0.1}, "scheduler": {"name": "constant"}})"), 10);
  std::vector<std::string> warnings;
  restore_position(saved, config_of(R"({"optimizer": {"name": "sgd", "lr": 0.01}})"), 10, warnings);
  REQUIRE(warnings.size() == 2);
  CHECK(warnings[0] == "/optimizer/lr is 0.1 in the checkpoint and 0.01 in the config; the config's is used from update 1 on");
  CHECK(warnings[1] ==
        "/scheduler/name is \"constant\" in the checkpoint and absent in the config; the config's is used from update 1 on");
}

TEST_CASE("Within an epoch a resume needs the same order of batches, between epochs it is told and goes on") {
  const Config before = config_of("{}");
  Config after = before;
  after.train->batch_size = 5;
  std::vector<std::string> warnings;
  const Error error = error_of([&] { restore_position(host_state({1, 2, 9, false, {}}, before, 10), after, 10, warnings); });
  CHECK(error.code == STG_INVALID_ARGUMENT);
  CHECK(error.message == Contains{"/data/train/batch_size is 4 in the checkpoint and 5 in the config; the checkpoint lies within "
                                  "an epoch (batch 2 of epoch 1)"});
  restore_position(host_state({1, 0, 9, false, {}}, before, 10), after, 10, warnings);
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0] == "/data/train/batch_size is 4 in the checkpoint and 5 in the config; the config's is used");
}

TEST_CASE("A state that is not of this program's making is an error that says so") {
  std::vector<std::string> warnings;
  for (const char* text : {"{}", "[]", R"({"format": 1, "epoch": "x"})", R"({"format": 9})"}) {
    const Error error = error_of([&] { restore_position(Json::parse(text), config_of("{}"), 10, warnings); });
    CHECK(error.code == STG_DATA_LOSS);
    CHECK(error.message == Contains{"the loop's state in the checkpoint"});
  }
}
