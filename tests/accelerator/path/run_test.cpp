// SPDX-License-Identifier: Apache-2.0
//
// Whole runs of libstratagem on the emulated accelerator: the loop, validation, checkpoints and swaps are those of the CPU.
#include "accelerator/emulated/emulated.hpp"
#include "host/swap_run.hpp"
#include "libstratagem/session.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

Json emulated_strategy(const std::string& name, const Json& devices) {
  return {{"name", name}, {"accelerator", "emulated"}, {"devices", devices}};
}

const Json one = emulated_strategy("single_device", {1});
const Json three = emulated_strategy("data_parallel", {0, 1, 0});
const Json two = emulated_strategy("data_parallel", 2);

// With validation within the epochs, of batches of another size.
Json run_config(const TemporaryFolder& folder, const Json& first) {
  Json config = swap_config(folder, first);
  config["plugin_path"] = {EMULATED_PLUGINS};
  config["data"]["validation"] = config["data"]["train"];
  config["data"]["validation"].erase("shuffle");
  config["data"]["validation"]["batch_size"] = 7;
  config["trainer"]["val_check_interval"] = 4;
  return config;
}

std::string reports() {
  emulated::drain();
  std::string all;
  for (const std::string& report : emulated::take_reports()) all += report + "\n";
  return all;
}

}  // namespace

TEST_CASE("A run that goes from one accelerator to three replicas, to the CPU and back has the losses of one on the CPU") {
  const TemporaryFolder folder, other_folder;
  Json config = run_config(folder, one);
  if (GENERATE(false, true)) config["optimizer"] = {{"name", "sgd"}, {"lr", 0.1}, {"momentum", 0.9}};
  config["trainer"]["accumulate_grad_batches"] = GENERATE(1, 2);
  config["swap"] = Json::array({swap_at(7, three), swap_at(13, strategy("data_parallel", 2)), swap_at(22, two)});
  SwapRun run(folder, config);
  run.run();
  CHECK(run.warnings == std::vector<std::string>{});
  CHECK(run.swap_lines.size() == 3);
  REQUIRE(run.losses.size() == 30);

  Json on_cpu = run_config(other_folder, strategy("single_device"));
  on_cpu["optimizer"] = config["optimizer"];
  on_cpu["trainer"] = config["trainer"];
  SwapRun reference(other_folder, on_cpu);
  reference.run();
  check_near(run.losses, reference.losses, 1e-9);
  for (const auto& [name, value] : reference.result["validation"].items()) {
    INFO(name);
    CHECK(run.result["validation"][name].get<double>() == Approx(value.get<double>()).epsilon(1e-6));
  }
  CHECK(reports() == "");
}

TEST_CASE("A run that is cut and resumed on accelerators ends with the weights of one that isn't, to the bit") {
  const TemporaryFolder folder, whole_folder;
  const Json strategy = GENERATE(0, 1) == 0 ? one : three;
  Json config = run_config(folder, strategy);
  config["model"]["options"]["dropout"] = 0.3;
  Json shorter = config;
  shorter["checkpoint"]["every_n_steps"] = 1;
  SwapRun cut(folder, shorter);
  CHECK_FALSE(cut.session->step(11));
  cut.session.reset();
  SwapRun resumed(folder, config, (folder / "run").string());
  resumed.run();
  Json same = run_config(whole_folder, strategy);
  same["model"] = config["model"];
  SwapRun whole(whole_folder, same);
  whole.run();
  CHECK(resumed.losses.size() == 19);
  CHECK(weights_of(resumed.result) == weights_of(whole.result));
  CHECK(reports() == "");
}

TEST_CASE("A device that fails ends the run with the device's name, and the run resumes on the one that is left") {
  const TemporaryFolder folder;
  Json config = run_config(folder, two);
  config["checkpoint"]["every_n_steps"] = 5;
  {
    SwapRun run(folder, config);
    CHECK_FALSE(run.session->step(10));
    emulated::fail_device(1, "an uncorrectable memory error");
    const Error error = error_of([&] { run.session->step(5); });
    CHECK_THAT(error.message, Catch::Contains("emulated:1") && Catch::Contains("uncorrectable memory error"));
  }
  emulated::heal();
  reports();
  config["strategy"] = emulated_strategy("single_device", {0});
  SwapRun resumed(folder, config, (folder / "run").string());
  resumed.run();
  CHECK(resumed.losses.size() == 20);
}
