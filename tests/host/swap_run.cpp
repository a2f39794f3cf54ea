// SPDX-License-Identifier: Apache-2.0
#include "swap_run.hpp"

#include <stratagem/host.h>

#include <cmath>

#include "base/dlpack.hpp"
#include "base/npy.hpp"

namespace stratagem::test {

Json swap_config(const TemporaryFolder& folder, const Json& first) {
  constexpr int64_t num_samples = 60;
  const TensorPtr inputs = allocate_tensor(float32, {num_samples, 4}), targets = allocate_tensor(int64, {num_samples});
  for (int64_t i = 0; i < num_samples * 4; ++i)
    first_element<float>(inputs->view)[i] = static_cast<float>(std::sin(static_cast<double>(i * i + 1)));
  for (int64_t i = 0; i < num_samples; ++i) first_element<int64_t>(targets->view)[i] = i * i % 3;
  write_npy(folder / "x.npy", inputs->view);
  write_npy(folder / "y.npy", targets->view);
  Json config = Json::parse(R"({
    "precision": "64-true", "seed": 7, "threads": 1,
    "model": {"kind": "library", "options": {"sizes": [4, 16, 3], "activation": "tanh", "buffers": true}},
    "optimizer": {"name": "adamw", "lr": 0.05}, "scheduler": {"name": "one_cycle"},
    "data": {"train": {"format": "npy", "inputs": "x.npy", "targets": "y.npy", "batch_size": 6, "shuffle": true}},
    "trainer": {"max_steps": 30, "log_every_n_steps": 1}, "checkpoint": {"dir": "run"}})");
  config["plugin_path"] = {TEST_INSTALLED, TEST_PLUGINS "/troubled"};
  config["model"]["path"] = TEST_MODELS "/mlp.so";
  config["strategy"] = first;
  return config;
}

Json strategy(const std::string& name, const Json& devices, const Json& options) {
  Json strategy = {{"name", name}, {"accelerator", "cpu"}};
  if (!devices.is_null()) strategy["devices"] = devices;
  if (!options.is_null()) strategy["options"] = options;
  return strategy;
}

Json swap_at(int64_t step, const Json& strategy) { return {{"at_step", step}, {"strategy", strategy}}; }

SwapRun::SwapRun(const TemporaryFolder& folder, const Json& config, const std::string& checkpoint) {
  write_file(folder / "c.json", config.dump());
  SessionRequest request;
  request.config = read_config_file(folder / "c.json", {});
  request.checkpoint = checkpoint;
  request.events.requests = &requests;
  request.events.log = [this](uint32_t level, const std::string& text) {
    if (level == STG_LOG_WARNING) warnings.push_back(text);
  };
  request.events.metrics = [this](const std::string& text) {
    const Json line = Json::parse(text);
    if (line.at("stage") == "fit") {
      losses.push_back(line.at("loss"));
      after_update(line.at("step"));
    }
    if (line.at("stage") == "swap") swap_lines.push_back(line);
  };
  request.events.swap = [this](int64_t step, const Json&, const Error* error) {
    told.emplace_back(step, error == nullptr ? "" : error->message);
  };
  session = std::make_unique<Session>(std::move(request));
}

std::string weights_of(const Json& result) {
  const fs::path checkpoint = result.at("checkpoint").get<std::string>();
  return read_file(checkpoint / "weights.safetensors") + read_file(checkpoint / "optimizer.safetensors");
}

void check_near(const std::vector<double>& a, const std::vector<double>& b, double limit) {
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    INFO("number " << i << ": " << a[i] << " and " << b[i]);
    CHECK(std::abs(a[i] - b[i]) <= limit * std::abs(b[i]));
  }
}

}  // namespace stratagem::test
