// SPDX-License-Identifier: Apache-2.0
//
// What follows from a watched value, on its own: improvements, thresholds, ranks.
#include "libstratagem/loop/monitors.hpp"

#include <cmath>

#include "support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

constexpr double inf = INFINITY;

/// The number of the value after which training stops; 0: it doesn't.
size_t stops_after(const EarlyStoppingConfig& config, const std::vector<double>& values) {
  StoppingState state;
  for (size_t i = 0; i < values.size(); ++i) {
    observe(state, config, values[i]);
    // As through a checkpoint.
    state = stopping_state(Json::parse(to_json(state, config.monitor).dump()), config.monitor).value();
    if (!reason_to_stop(state, config).empty()) return i + 1;
  }
  return 0;
}

EarlyStoppingConfig stopping(bool is_max, int64_t patience, double min_delta = 0) {
  return {{"score", is_max, "/early_stopping/monitor"}, patience, min_delta, {}};
}

CheckpointConfig keeping(int64_t save_top_k, bool is_max = false) {
  CheckpointConfig config;
  config.monitor = Monitor{"score", is_max, "/checkpoint/monitor"};
  config.save_top_k = save_top_k;
  return config;
}

std::vector<int64_t> steps(const BestCheckpoints& best) {
  std::vector<int64_t> all;
  for (const RankedCheckpoint& checkpoint : best) all.push_back(checkpoint.step);
  return all;
}

BestCheckpoints best_of(const CheckpointConfig& config, const std::vector<double>& values) {
  BestCheckpoints best;
  for (size_t i = 0; i < values.size(); ++i) {
    if (is_one_of_the_best(best, config, values[i])) insert(best, config, {static_cast<int64_t>(i), values[i]});
  }
  return best;
}

}  // namespace

TEST_CASE("An equal value is no improvement, and neither is one that is better by no more than min_delta") {
  CHECK(stops_after(stopping(false, 2), {1, 1, 1, 0}) == 3);
  CHECK(stops_after(stopping(false, 2, 0.25), {1, 0.875, 0.75, 0.5}) == 3);
  CHECK(stops_after(stopping(false, 2, 0.25), {1, 0.875, 0.625, 0.375, 0.125}) == 0);
  CHECK(stops_after(stopping(true, 2, 0.25), {1, 1.125, 1.25, 2}) == 3);
  CHECK(stops_after(stopping(true, 2, 0.25), {1, 1.125, 1.5, 1.75, 2}) == 0);
  CHECK(stops_after(stopping(true, 1), {0.5, 0.6, 0.55}) == 3);
}

TEST_CASE("A value that is not finite is no improvement in either mode") {
  CHECK(stops_after(stopping(false, 2), {0.5, std::nan(""), std::nan("")}) == 3);
  CHECK(stops_after(stopping(false, 2), {0.5, -inf, -inf, 0.4}) == 3);
  CHECK(stops_after(stopping(true, 2), {inf, inf, 0.4}) == 2);
  CHECK(stops_after(stopping(false, 2), {std::nan(""), 0.5, std::nan(""), 0.4}) == 0);
}

TEST_CASE("A value better than stopping_threshold ends the run at once") {
  EarlyStoppingConfig config = stopping(false, 10);
  config.stopping_threshold = 0.5;
  CHECK(stops_after(config, {1, 0.5, 0.49}) == 3);
  config.monitor.is_max = true;
  CHECK(stops_after(config, {0.1, 0.5, std::nan(""), 0.51}) == 4);
  StoppingState state;
  observe(state, config, 0.51);
  CHECK(reason_to_stop(state, config) == "/early_stopping/stopping_threshold (0.5) is passed: \"score\" is 0.51");
}

TEST_CASE("Another process's decision to stop is kept in the state") {
  StoppingState state;
  state.is_others_decision = true;
  const auto config = stopping(false, 3);
  const auto back = stopping_state(to_json(state, config.monitor), config.monitor);
  CHECK(reason_to_stop(back.value(), config) == "/early_stopping: another process decided to stop");
}

TEST_CASE("The best checkpoints are ranked by value, the older before its equal, and are as many as save_top_k") {
  CHECK(steps(best_of(keeping(1), {3, 2, 2, 4, 1})) == std::vector<int64_t>{4});
  CHECK(steps(best_of(keeping(1), {3, 2, 2, 4})) == std::vector<int64_t>{1});
  CHECK(steps(best_of(keeping(3), {3, 2, 2, 4, 1})) == std::vector<int64_t>{4, 1, 2});
  CHECK(steps(best_of(keeping(2, true), {3, 2, 2, 4, 1})) == std::vector<int64_t>{3, 0});
  CHECK(steps(best_of(keeping(no_limit), {3, 2, 2})) == std::vector<int64_t>{1, 2, 0});
  CHECK(steps(best_of(keeping(2), {std::nan(""), -inf, inf})).empty());
  const auto config = keeping(2);
  const BestCheckpoints best = best_of(config, {3, 2, 0.1 + 0.2});
  const auto back = best_checkpoints(Json::parse(to_json(best, *config.monitor).dump()), *config.monitor).value();
  CHECK(steps(back) == steps(best));
  CHECK(back[0].value == 0.1 + 0.2);
}

TEST_CASE("One step is ranked once, with its last value") {
  const auto config = keeping(3);
  BestCheckpoints best = {{5, 1.0}, {4, 2.0}};
  insert(best, config, {5, 3.0});
  CHECK(steps(best) == std::vector<int64_t>{4, 5});
}

TEST_CASE("What was seen of another monitor, or under another mode, counts for nothing") {
  const Monitor saved{"loss", false, ""};
  for (const Monitor& now : {Monitor{"score", false, ""}, Monitor{"loss", true, ""}}) {
    CHECK(!stopping_state(to_json(StoppingState{}, saved), now));
    CHECK(!best_checkpoints(to_json(BestCheckpoints{{1, 2}}, saved), now));
  }
}

TEST_CASE("A share of batches is rounded down as it is written, a number is at most what there is") {
  CHECK(BatchLimit{{}, 0.29}.of(100) == 29);  // 28.999...96 in binary
  CHECK(BatchLimit{{}, 0.1}.of(30) == 3);
  CHECK(BatchLimit{{}, 0.999}.of(10) == 9);
  CHECK(BatchLimit{{}, 1.0}.of(7) == 7);
  CHECK(BatchLimit{{}, 0.1}.of(9) == 0);
  CHECK(BatchLimit{3, 1.0}.of(10) == 3);
  CHECK(BatchLimit{30, 1.0}.of(10) == 10);
}
