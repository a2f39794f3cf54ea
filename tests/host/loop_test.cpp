// SPDX-License-Identifier: Apache-2.0
//
// The loop's parts on their own: schedules, means, positions, lines of the metrics file.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

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

TEST_CASE("One cycle rises and falls by half waves, as PyTorch's does") {
  SchedulerConfig cycle;
  cycle.name = "one_cycle";
  // torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1, total_steps=10)
  const double expected[] = {0.04,
                             0.52,
                             1.0,
                             0.9504846320134737,
                             0.8117456539497631,
                             0.6112620219362893,
                             0.38874197806371075,
                             0.18825834605023684,
                             0.049519367986526,
                             4e-06};
  const std::vector<double> found = rates(cycle, 1, 12, 10);
  for (size_t i = 0; i < 10; ++i) CHECK(found[i] == Approx(expected[i]).epsilon(1e-9));
  CHECK(found[11] == Approx(4e-06));
  // OneCycleLR(optimizer, max_lr=0.5, total_steps=8, pct_start=0.5, div_factor=5, final_div_factor=2), after 3 updates of warm-up
  cycle.pct_start = 0.5;
  cycle.div_factor = 5;
  cycle.final_div_factor = 2;
  cycle.warmup_steps = 3;
  const std::vector<double> warm = rates(cycle, 0.5, 11, 11);
  CHECK(warm[2] == Approx(0.5));
  const double expected_warm[] = {0.1, 0.2, 0.4, 0.5, 0.4340990257669732, 0.275, 0.11590097423302682, 0.05};
  for (size_t i = 0; i < 8; ++i) CHECK(warm[3 + i] == Approx(expected_warm[i]).epsilon(1e-9));
  cycle = {};
  cycle.name = "one_cycle";
  cycle.pct_start = 0.1;
  CHECK(rates(cycle, 1, 1, 10) == std::vector<double>{1});  // the top is where it begins
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
  Config config = config_of("{}");
  TrainerConfig& trainer = config.trainer;
  trainer.max_epochs = 3;
  CHECK(total_updates(config, 37) == 30);
  trainer.max_steps = 7;
  CHECK(total_updates(config, 37) == 7);
  trainer.max_epochs = no_limit;
  CHECK(total_updates(config, 37) == 7);
  trainer = {};
  trainer.accumulate_grad_batches = 3;
  CHECK(total_updates(config, 37) == 4);
  trainer.accumulate_grad_batches = std::numeric_limits<int64_t>::max();
  CHECK(total_updates(config, 37) == 1);
  trainer = {};
  trainer.max_epochs = 3;
  trainer.accumulate_grad_batches = 2;
  trainer.limit_train_batches.count = 5;
  CHECK(total_updates(config, 37) == 9);
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
      metrics_line(3, 1, "fit", {{"loss", not_a_number}, {"lr", 0.1}, {"norm", INFINITY}, {"step", 7.0}, {"time", 8.0}}, 12.5);
  CHECK(line ==
        R"({"step":3,"epoch":1,"stage":"fit","loss":null,"lr":0.1,"norm":null,"model/step":7.0,"model/time":8.0,"time":12.5})");
}

TEST_CASE(
    "A new run's metrics file puts the old one aside, a resumed run keeps the lines up to its position, and the rest aside") {
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
  CHECK(read_file(path.string() + ".previous") == old);
  fs::remove(path.string() + ".previous");
  { MetricsFile(path, position, {}); }
  CHECK(read_file(path) == resumed);
  CHECK(!fs::exists(path.string() + ".previous"));
  position.validation_pending = true;
  write_file(path, old);
  { MetricsFile(path, position, {}); }
  CHECK(read_file(path) == line(1, "fit") + line(2, "fit"));
  { MetricsFile(path, std::nullopt, {}); }
  CHECK(read_file(path) == "");
  CHECK(read_file(path.string() + ".previous") == line(1, "fit") + line(2, "fit"));
}

TEST_CASE("What is no regular file is appended to, never put aside or rewritten") {
  const TemporaryFolder folder;
  const fs::path pipe = folder / "pipe", target = folder / "target", link = folder / "link";
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  write_file(target, "before\n");
  fs::create_symlink(target, link);
  const int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  REQUIRE(reader >= 0);
  const std::optional<Position> resumed_from = GENERATE(std::optional<Position>(), std::optional<Position>(Position()));
  for (const fs::path& path : {pipe, link}) {
    MetricsFile::check(path);
    MetricsFile(path, resumed_from, {}).write({}, "fit", {});
  }
  char text[200] = {};
  CHECK(read(reader, text, sizeof text - 1) > 0);
  close(reader);
  CHECK(std::string(text) == Contains{R"("stage":"fit")"});
  CHECK(fs::is_fifo(pipe));
  CHECK(fs::is_symlink(link));
  CHECK(read_file(target) == Contains{"before\n{\"step\":0"});
  CHECK(std::distance(fs::directory_iterator(folder.path), fs::directory_iterator()) == 3);
}

TEST_CASE("A position comes back from its JSON, also with a loss that is not a number") {
  const Config config = config_of(R"({"optimizer": {"name": "sgd", "lr": 0.1}})");
  Position position{2, 3, 25, true, true, {0.1 + 0.2, 7}};
  std::vector<std::string> warnings;
  const auto through_text = [&](const Position& p) {
    return restore_position(Json::parse(host_state(p, config, 10).dump()), config, 10, warnings);
  };
  const Position back = through_text(position);
  CHECK(back.epoch == 2);
  CHECK(back.batch == 3);
  CHECK(back.step == 25);
  CHECK(back.validation_pending);
  CHECK(back.epoch_is_whole);
  CHECK(back.loss.sum == 0.1 + 0.2);
  CHECK(back.loss.weight == 7);
  position.loss.sum = not_a_number;
  CHECK(std::isnan(through_text(position).loss.sum));
  CHECK(warnings.empty());
}

TEST_CASE("A state of a version without monitors, limits and times goes on as one that has seen none") {
  Config config = config_of("{}");
  config.early_stopping.emplace().monitor.name = "loss";
  config.checkpoint.emplace().monitor = Monitor{"loss", false, "/checkpoint/monitor"};
  Position position{2, 3, 25, false, false, {1, 7}, 25, 12.5, 3, {0.5, 2, 0.75, false}, {{20, 0.5}}};
  Json saved = host_state(position, config, 10);
  std::vector<std::string> warnings;
  const Position same = restore_position(saved, config, 10, warnings);
  CHECK(same.validated_step == 25);
  CHECK(same.seconds == 12.5);
  CHECK(same.num_skipped == 3);
  CHECK(same.stopping.best == 0.5);
  CHECK(same.stopping.num_misses == 2);
  CHECK(same.stopping.last == 0.75);
  REQUIRE(same.best.size() == 1);
  CHECK(same.best[0].step == 20);
  for (const char* key : {"validated_step", "seconds", "skipped_updates", "early_stopping", "best"}) CHECK(saved.erase(key) == 1);
  const Position old = restore_position(saved, config, 10, warnings);
  CHECK(old.step == 25);
  CHECK(old.validated_step == -1);
  CHECK(old.seconds == 0);
  CHECK(!old.stopping.best);
  CHECK(old.best.empty());
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
  for (const bool validation_pending : {false, true}) {
    const Json stopped = host_state({1, 2, 9, validation_pending, false, {}}, before, 10);
    CHECK(error_of([&] { restore_position(stopped, after, 10, warnings); }).code == STG_INVALID_ARGUMENT);
  }
  const Error error = error_of([&] {
    restore_position(host_state({1, 2, 9, false, false, {}}, before, 10), after, 10, warnings);
  });
  CHECK(error.code == STG_INVALID_ARGUMENT);
  CHECK(error.message == Contains{"/data/train/batch_size is 4 in the checkpoint and 5 in the config; the checkpoint lies within "
                                  "an epoch (batch 2 of epoch 1)"});
  restore_position(host_state({1, 0, 9, false, false, {}}, before, 10), after, 10, warnings);
  restore_position(host_state({1, 3, 9, true, true, {}}, before, 10), after, 10, warnings);
  REQUIRE(warnings.size() == 2);
  for (const std::string& warning : warnings)
    CHECK(warning == "/data/train/batch_size is 4 in the checkpoint and 5 in the config; the config's is used");
}

TEST_CASE("Another seed is part of the order only where samples are shuffled") {
  Config before = config_of("{}");
  Config after = before;
  after.seed = 2;
  const Position within{1, 2, 9, false, false, {}};
  std::vector<std::string> warnings;
  restore_position(host_state(within, before, 10), after, 10, warnings);
  CHECK(warnings.empty());
  before.train->shuffle = after.train->shuffle = true;
  CHECK(error_of([&] { restore_position(host_state(within, before, 10), after, 10, warnings); }).message ==
        Contains{"/seed is 1 in the checkpoint and 2 in the config"});
}

TEST_CASE("A resume tells whatever else changes the numbers, also the length that the cosine takes from the run") {
  Config before = config_of(R"({"scheduler": {"name": "cosine"}})");
  before.scheduler.name = "cosine";
  before.trainer.gradient_clip_val = 1;
  Config after = before;
  after.json["precision"] = "64-true";
  after.json["deterministic"] = true;
  after.trainer.max_epochs = 2;
  after.trainer.gradient_clip_val = 2;
  after.trainer.gradient_clip_algorithm = "value";
  after.strategy.options["compat"] = "lightning";
  after.trainer.limit_train_batches.count = 2;
  std::vector<std::string> warnings;
  restore_position(host_state({}, before, 10), after, 10, warnings);
  std::string all;
  for (const std::string& warning : warnings) all += warning + "\n";
  for (const char* part :
       {"/precision is \"32-true\" in the checkpoint and \"64-true\" in the config",
        "/deterministic is false in the checkpoint and true in the config",
        "/trainer/gradient_clip_val is 1.0 in the checkpoint and 2.0 in the config",
        "/trainer/gradient_clip_algorithm is \"norm\" in the checkpoint and \"value\" in the config",
        "/strategy/options/compat is absent in the checkpoint and \"lightning\" in the config",
        "/scheduler/total_steps (the run's length) is 3 in the checkpoint and 4 in the config",
        "/trainer/limit_train_batches (batches of an epoch) is absent in the checkpoint and 2 in the config"}) {
    CHECK(all == Contains{part});
  }
  CHECK(warnings.size() == 7);
}

TEST_CASE("A state that is not of this program's making is an error that says so") {
  std::vector<std::string> warnings;
  for (const char* text :
       {"{}", "[]", R"({"format": 1, "epoch": "x"})", R"({"format": 9})",
        R"({"format": 1, "epoch": 0, "batch": -1, "step": 0, "validation_pending": false, "epoch_is_whole": false})"}) {
    const Error error = error_of([&] { restore_position(Json::parse(text), config_of("{}"), 10, warnings); });
    CHECK(error.code == STG_DATA_LOSS);
    CHECK(error.message == Contains{"the loop's state in the checkpoint"});
  }
}
