// SPDX-License-Identifier: Apache-2.0
//
// A strategy that is exchanged while a run goes on: the run is the one that it would have been.
#include <fstream>
#include <future>
#include <sstream>

#include "swap_run.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const Json single = strategy("single_device");
Json parallel(int num_devices) { return strategy("data_parallel", num_devices); }
Json in_trouble(const std::string& trouble) { return strategy("troubled", nullptr, {{"trouble", trouble}}); }

/// The same run without swaps, in a folder of its own.
struct Unswapped {
  explicit Unswapped(Json config) : data(swap_config(folder)), run(folder, without_swaps(std::move(config))) { run.run(); }
  static Json without_swaps(Json config) {
    config.erase("swap");
    return config;
  }
  TemporaryFolder folder;
  Json data;  // in the folder
  SwapRun run;
};

int64_t number_in(const std::string& file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(key, 0) == 0) return std::stoll(line.substr(key.size()));
  }
  return -1;
}

int64_t num_entries(const std::string& folder) { return std::distance(fs::directory_iterator(folder), fs::directory_iterator()); }

}  // namespace

TEST_CASE("A run that is swapped from one device to two, to three and back has the losses of one that isn't") {
  const TemporaryFolder folder;
  Json config = swap_config(folder);
  if (GENERATE(false, true)) config["optimizer"] = {{"name", "sgd"}, {"lr", 0.1}, {"momentum", 0.9}};
  config["trainer"]["accumulate_grad_batches"] = GENERATE(1, 2);
  config["swap"] = Json::array({swap_at(7, parallel(2)), swap_at(13, parallel(3)), swap_at(22, single)});
  SwapRun run(folder, config);
  run.run();
  CHECK(run.warnings == std::vector<std::string>{});
  REQUIRE(run.swap_lines.size() == 3);
  CHECK(run.swap_lines[1]["step"] == 13);
  CHECK(run.swap_lines[1]["strategy"] == parallel(3));
  REQUIRE(run.losses.size() == 30);
  CHECK(run.losses.back() < 0.9 * run.losses.front());
  check_near(run.losses, Unswapped(config).run.losses, 1e-9);
  CHECK(run.result["strategy"] == "single_device");
}

TEST_CASE(
    "A swap to the same arithmetic changes nothing, to the bit: dropout, buffers, schedule, loss scale, accumulation, the order "
    "of samples") {
  const TemporaryFolder folder;
  const Json same = GENERATE(1, 2) == 1 ? single : parallel(2);
  Json config = swap_config(folder, same);
  config["precision"] = GENERATE("32-true", "16-mixed");
  config["model"]["options"]["dropout"] = 0.3;
  config["trainer"]["accumulate_grad_batches"] = GENERATE(1, 3);
  config["swap"] = Json::array({swap_at(3, same), swap_at(4, same), swap_at(17, same)});
  SwapRun run(folder, config);
  run.run();
  CHECK(run.swap_lines.size() == 3);
  const Unswapped other(config);
  CHECK(run.losses == other.run.losses);
  CHECK(weights_of(run.result) == weights_of(other.run.result));
}

TEST_CASE("Generators of replicas that a strategy lacks are handed on to the next") {
  const TemporaryFolder folder;
  Json config = swap_config(folder, parallel(3));
  config["model"]["options"]["dropout"] = 0.3;
  config["trainer"]["max_steps"] = 12;
  // One device for no update at all.
  SwapRun run(folder, config);
  CHECK_FALSE(run.session->step(5));
  run.session->swap(single);
  run.session->swap(parallel(3));
  run.run();
  const Unswapped other(config);
  CHECK(run.losses == other.run.losses);
  CHECK(weights_of(run.result) == weights_of(other.run.result));
}

TEST_CASE("Steps add up to the run") {
  const TemporaryFolder folder;
  Json config = swap_config(folder);
  config["data"]["validation"] = config["data"]["train"];
  SwapRun run(folder, config);
  CHECK_FALSE(run.session->step(0));
  CHECK(run.losses.empty());
  CHECK_FALSE(run.session->step(1));
  CHECK(run.losses.size() == 1);
  CHECK_FALSE(run.session->step(12));
  CHECK(run.losses.size() == 13);
  CHECK(run.session->step(1000));
  CHECK(run.losses.size() == 30);
  CHECK(run.session->step(1));
  run.run();
  const Unswapped other(config);
  CHECK(run.losses == other.run.losses);
  CHECK(run.result["validation"] == other.run.result["validation"]);
  CHECK(run.result["steps"] == 30);
  CHECK(error_of([&] { run.session->step(1); }).code == STG_FAILED_PRECONDITION);
  CHECK(error_of([&] { run.session->swap(single); }).code == STG_FAILED_PRECONDITION);
}

TEST_CASE("A checkpoint after a swap carries the new strategy, and a resume goes on under it, to the bit") {
  const TemporaryFolder folder;
  Json config = swap_config(folder);
  config["precision"] = "32-true";
  config["model"]["options"]["dropout"] = 0.3;
  config["swap"] = Json::array({swap_at(8, parallel(2)), swap_at(15, parallel(3))});
  const int64_t stopped_after = GENERATE(8, 10, 15);
  SwapRun first(folder, config);
  first.after_update = [&](int64_t step) { first.requests.stop = step == stopped_after; };
  CHECK(first.run()["interrupted"] == true);
  CHECK(first.result["strategy"] == (stopped_after == 8 ? "single_device" : "data_parallel"));
  const fs::path checkpoint = first.result["checkpoint"].get<std::string>();
  const Json saved = Json::parse(read_file(checkpoint / "state.json")).at("host");
  const Json host = saved.is_string() ? Json::parse(saved.get<std::string>()) : saved;
  CHECK(host.at("config").at("strategy") == (stopped_after == 8 ? single : parallel(2)));
  SwapRun second(folder, config, checkpoint);
  second.run();
  CHECK(second.warnings == std::vector<std::string>{});
  CHECK(second.swap_lines.size() == (stopped_after == 8 ? 2 : 1));
  const TemporaryFolder folder_of_whole;
  swap_config(folder_of_whole);
  SwapRun whole(folder_of_whole, config);
  whole.run();
  std::vector<double> losses = first.losses;
  losses.insert(losses.end(), second.losses.begin(), second.losses.end());
  CHECK(losses == whole.losses);
  CHECK(weights_of(second.result) == weights_of(whole.result));
}

TEST_CASE("A resume under a config with other swaps goes by the config") {
  const TemporaryFolder folder;
  Json config = swap_config(folder);
  config["swap"] = Json::array({swap_at(8, parallel(2))});
  SwapRun first(folder, config);
  first.after_update = [&](int64_t step) { first.requests.stop = step == 10; };
  first.run();
  config["swap"] = Json::array({swap_at(9, parallel(3)), swap_at(20, single)});
  SwapRun second(folder, config, first.result["checkpoint"]);
  second.session->step(1);
  REQUIRE(second.swap_lines.size() == 1);
  CHECK(second.swap_lines[0]["strategy"] == parallel(3));
  CHECK(second.swap_lines[0]["step"] == 10);
}

TEST_CASE("A swap that fails leaves the old strategy running as if it had not been tried, and says why") {
  const TemporaryFolder folder;
  struct Case {
    Json strategy;
    std::string reason;
  };
  const Case cases[] = {{strategy("data_paralel"), "did you mean \"data_parallel\"?"},
                        {{{"name", "bad"}, {"path", TEST_PLUGINS "/bad/refuses.so"}}, "wants a host that was made on a Tuesday"},
                        {in_trouble("create"), "there is no such device"},
                        {in_trouble("setup"), "was told to fail"},
                        {in_trouble("memory"), "out of memory"},
                        {strategy("data_parallel", 2, {{"bucket", 1}}), "/strategy/options/bucket: unknown key"},
                        {{{"name", "single_device"}, {"accelerator", "cuda"}}, "/strategy/accelerator is \"cuda\""}};
  const Case& tried = cases[GENERATE(range(0, 7))];
  const Json old = GENERATE(1, 2) == 1 ? single : parallel(2);
  Json config = swap_config(folder, old);
  config["model"]["options"]["dropout"] = 0.3;
  config["trainer"]["accumulate_grad_batches"] = 2;
  config["swap"] = Json::array({swap_at(7, tried.strategy)});
  INFO(tried.strategy);
  SwapRun run(folder, config);
  REQUIRE(run.warnings.size() <= 1);  // of what can be known before
  run.warnings.clear();
  run.run();
  REQUIRE(run.warnings.size() == 1);
  CHECK(run.warnings[0] == Contains{"before update 8 failed; the strategy \"" + old["name"].get<std::string>() + "\" goes on: "});
  CHECK(run.warnings[0] == Contains{tried.reason});
  REQUIRE(run.told.size() == 1);
  CHECK(run.told[0].first == 7);
  CHECK(run.told[0].second == Contains{tried.reason});
  CHECK(run.swap_lines.empty());
  const Unswapped other(config);
  CHECK(run.losses == other.run.losses);
  CHECK(weights_of(run.result) == weights_of(other.run.result));
}

TEST_CASE("Out of memory in one replica of the new strategy leaves the old one running") {
  const TemporaryFolder folder;
  write_samples(folder / "x.npy", {1, 2, 3, 4, 5, 6, 7, 8});
  Json config = swap_config(folder);
  config["plugin_path"].push_back(TEST_PLUGINS "/toy");
  config["model"] = {{"kind", "library"}, {"name", "toy"}, {"options", {{"fails", "replicate of 1"}}}};
  config["data"]["train"] = {{"format", "npy"}, {"inputs", "x.npy"}, {"batch_size", 2}};
  config["swap"] = Json::array({swap_at(7, parallel(2))});
  SwapRun run(folder, config);
  run.run();
  REQUIRE(run.warnings.size() == 1);
  CHECK(run.warnings[0] == Contains{"setting up the strategy \"data_parallel\": "});
  CHECK(run.warnings[0] == Contains{"out of memory"});
  const TemporaryFolder folder_of_other;
  fs::copy_file(folder / "x.npy", folder_of_other / "x.npy");
  SwapRun other(folder_of_other, Unswapped::without_swaps(config));
  other.run();
  CHECK(run.losses == other.losses);
  CHECK(weights_of(run.result) == weights_of(other.result));
}

TEST_CASE(
    "Where a device can't hold two strategies the state goes through host memory, and back where the new one can't be set up") {
  const TemporaryFolder folder;
  const std::string trouble = GENERATE("crowded", "full");
  Json config = swap_config(folder, in_trouble("crowded"));
  config["model"]["options"]["dropout"] = 0.3;
  config["swap"] = Json::array({swap_at(7, in_trouble(trouble))});
  SwapRun run(folder, config);
  run.run();
  CHECK(run.swap_lines.size() == (trouble == "full" ? 0 : 1));
  CHECK(run.warnings.size() == (trouble == "full" ? 1 : 0));
  run.session.reset();  // the other one needs the device
  const Unswapped other(config);
  CHECK(run.losses == other.run.losses);
  CHECK(weights_of(run.result) == weights_of(other.run.result));
}

TEST_CASE("A strategy that can't be set up again after it made room ends the run with both reasons") {
  const TemporaryFolder folder;
  const Json config = swap_config(folder, in_trouble("once"));
  SwapRun run(folder, config);
  run.session->step(3);
  const Error error = error_of([&] { run.session->swap(in_trouble("full")); });
  CHECK(error.message == Contains{"cuda:0 is full"});
  CHECK(error.message == Contains{"neither can \"troubled\" any more"});
  CHECK((error.flags & STG_ERROR_INSTANCE_USABLE) == 0);
  CHECK(error_of([&] { run.session->step(1); }).code == STG_FAILED_PRECONDITION);
}

TEST_CASE("A swap asked for from another thread comes before the next update, and the last one counts") {
  const TemporaryFolder folder;
  const Json config = swap_config(folder);
  SwapRun run(folder, config);
  run.after_update = [&](int64_t step) {
    if (step != 11) return;
    std::async(std::launch::async, [&] {
      run.session->request_swap(parallel(3));
      run.session->request_swap(strategy_of(R"({"name": "data_parallel", "devices": 2, "options": null} // two)"));
    }).get();
  };
  run.run();
  CHECK(run.told == std::vector<std::pair<int64_t, std::string>>{{11, ""}});
  CHECK(run.result["devices"].size() == 2);
  check_near(run.losses, Unswapped(config).run.losses, 1e-9);
}

TEST_CASE("A swap that comes too late is told of: by the event during the last update, by an error after it") {
  const TemporaryFolder folder;
  SwapRun run(folder, swap_config(folder));
  run.after_update = [&](int64_t step) {
    if (step == 30) run.session->request_swap(parallel(3));
  };
  run.run();
  REQUIRE(run.told.size() == 1);
  CHECK(run.told[0].first == 30);
  CHECK(run.told[0].second == Contains{"after the run's last update"});
  CHECK(run.result["strategy"] == "single_device");
  CHECK(error_of([&] { run.session->request_swap(single); }).message == Contains{"this session's run is over"});
}

TEST_CASE("A swap by call before a resumed run's first update is the one that counts") {
  const TemporaryFolder folder;
  const Json config = swap_config(folder);
  SwapRun first(folder, config);
  first.session->step(4);
  first.session->swap(parallel(2));
  first.session->step(2);
  first.requests.stop = true;
  first.run();
  SwapRun second(folder, config, first.result["checkpoint"]);
  second.session->swap(parallel(3));
  second.session->step(1);
  REQUIRE(second.told.size() == 1);
  CHECK(second.told[0].first == 7);
  CHECK(second.told[0].second == "");
  second.run();
  CHECK(second.result["devices"].size() == 3);
}

TEST_CASE("A strategy that can't save is refused where there is a checkpoint to write, at open and as a swap") {
  const TemporaryFolder folder;
  Json config = swap_config(folder);
  const Json unsaving = {{"name", "gradient_descent"}, {"path", TEST_GRADIENT_DESCENT}};
  config["precision"] = "32-true";
  config["optimizer"] = {{"name", "sgd"}, {"lr", 0.05}};
  {
    SwapRun run(folder, config);
    run.session->step(3);
    const Error error = error_of([&] { run.session->swap(unsaving); });
    CHECK(error.message == Contains{"/checkpoint: the strategy \"gradient_descent\" has no function save"});
    run.run();
    CHECK(run.result["strategy"] == "single_device");
  }
  config["strategy"] = unsaving;
  CHECK(error_of([&] { const SwapRun run(folder, config); }).message == Contains{"/checkpoint: the strategy"});
}

TEST_CASE("The text of a strategy is checked at once") {
  const auto text_of_error = [](const std::string& text) {
    const Error error = error_of([&] { strategy_of(text); });
    CHECK(error.code == STG_INVALID_ARGUMENT);
    return error.message;
  };
  CHECK(text_of_error("{") == Contains{"the strategy"});
  CHECK(text_of_error("[]") == Contains{"/strategy: [] is not allowed"});
  CHECK(text_of_error("{}") == Contains{"/strategy/name: this key, a text, is required"});
  CHECK(text_of_error(R"({"name": "x", "device": 2})") == Contains{"/strategy/device: unknown key; did you mean \"devices\"?"});
  CHECK(text_of_error(R"({"name": "x", "devices": 0})") == Contains{"/strategy/devices: 0 is not allowed"});
}

TEST_CASE("A session that is not for fit has no swaps") {
  const TemporaryFolder folder;
  Json config = swap_config(folder);
  config["data"]["validation"] = config["data"]["train"];
  write_file(folder / "c.json", config.dump());
  Requests requests;
  SessionRequest request;
  request.config = read_config_file(folder / "c.json", {});
  request.command = Command::validate;
  request.events.requests = &requests;
  Session session(std::move(request));
  CHECK(error_of([&] { session.swap(single); }).code == STG_FAILED_PRECONDITION);
  CHECK(error_of([&] { session.request_swap(single); }).code == STG_FAILED_PRECONDITION);
  CHECK(error_of([&] { session.step(1); }).code == STG_FAILED_PRECONDITION);
}

TEST_CASE("A thousand swaps leave no memory, threads or open files behind") {
  const TemporaryFolder folder;
  Json config = swap_config(folder);
  config["model"]["options"]["sizes"] = {4, 512, 3};  // 28 KiB: one of them left behind per swap is seen
  SwapRun run(folder, config);
  run.session->step(2);
  const auto swap = [&](int num) {
    for (int i = 0; i < num; ++i) {
      run.session->swap(i % 2 == 0 ? parallel(3) : single);
      run.swap_lines.clear();  // what the test keeps of each
      run.told.clear();
    }
  };
  swap(100);
  const int64_t memory_kb = number_in("/proc/self/status", "VmRSS:");
  const int64_t num_threads = num_entries("/proc/self/task"), num_files = num_entries("/proc/self/fd");
  swap(1000);
  CHECK(num_entries("/proc/self/task") == num_threads);
  CHECK(num_entries("/proc/self/fd") == num_files);
  const int64_t growth_kb = number_in("/proc/self/status", "VmRSS:") - memory_kb;
  INFO("memory grew by " << growth_kb << " KiB from " << memory_kb);
#ifndef __SANITIZE_ADDRESS__  // which keeps freed memory back, and finds leaks by itself
  CHECK(growth_kb < 512);
#endif
  run.run();
  CHECK(run.warnings == std::vector<std::string>{});
}
