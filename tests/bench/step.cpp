// SPDX-License-Identifier: Apache-2.0
//
// Time per training step of two strategies on one model, side by side: both live in this process and take turns, step by step, so
// that a slow moment of the machine meets both. Printed: the median step of each, and the median of the ratios pair by pair.
//
//   bench-step [steps] [batch size] [devices of data_parallel] [model] [model options as JSON]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <vector>

#include "base/dlpack.hpp"
#include "base/structs.hpp"
#include "support/plugin.hpp"

using namespace stratagem;

namespace {

class Contestant {
 public:
  Contestant(const std::filesystem::path& plugins, const std::string& name, const std::string& devices, const stg_model* model)
      : api_(test::strategy_api(test::load_plugin(plugins / (name + ".so")), name)) {
    const std::string config = R"({"accelerator": "cpu", "devices": )" + devices +
                               R"(, "seed": 1, "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.01}})";
    stg_create_args create = sized<stg_create_args>();
    create.config_json = to_abi(config);
    check(api_.create(&create, &self_));
    stg_setup_args setup = sized<stg_setup_args>();
    setup.model = model;
    check(api_.setup(self_, nullptr, &setup));
  }
  Contestant(const Contestant&) = delete;
  Contestant& operator=(const Contestant&) = delete;
  ~Contestant() { api_.destroy(self_); }

  double step_ms(Tree batch) {
    stg_update_args update = sized<stg_update_args>();
    update.lr = 1e-3;
    stg_step_args args = sized<stg_step_args>();
    args.batch = batch.argument();
    args.flags = STG_BATCH_LAST_MICRO_BATCH;
    args.update = &update;
    stg_step_result result = sized<stg_step_result>();
    const auto start = std::chrono::steady_clock::now();
    check(api_.train_batch(self_, nullptr, &args, &result, nullptr));
    const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;
    result.outputs.release(&result.outputs);
    times_.push_back(elapsed.count());
    return elapsed.count();
  }

  double median_ms() const { return median(times_); }

  static double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
    return values[values.size() / 2];
  }

 private:
  const stg_strategy_api& api_;
  stg_strategy* self_ = nullptr;
  std::vector<double> times_;
};

Tree random_batch(int64_t rows, std::mt19937& random) {
  TensorPtr inputs = allocate_tensor(uint8, {rows, 28, 28});
  TensorPtr targets = allocate_tensor(int64, {rows});
  std::generate_n(first_element<uint8_t>(inputs->view), rows * 28 * 28, [&] { return static_cast<uint8_t>(random()); });
  std::generate_n(first_element<int64_t>(targets->view), rows, [&] { return static_cast<int64_t>(random() % 10); });
  Dict dict;
  dict.emplace_back("inputs", std::move(inputs));
  dict.emplace_back("targets", std::move(targets));
  return make_tree(std::move(dict));
}

}  // namespace

int main(int argc, char** argv) try {
  const auto argument = [&](int i, const char* fallback) { return std::string(argc > i ? argv[i] : fallback); };
  const int num_steps = std::stoi(argument(1, "60"));
  const int64_t batch_size = std::stoll(argument(2, "256"));
  const std::string devices = argument(3, "2");
  const std::string model_name = argument(4, "fashion_cnn");
  const auto plugins = std::filesystem::canonical("/proc/self/exe").parent_path().parent_path() / "lib" / "stratagem";

  const test::ModelPtr model = test::make_model(test::load_plugin(plugins / (model_name + ".so")), model_name, argument(5, "{}"));
  Contestant single(plugins, "single_device", "1", model.get());
  Contestant parallel(plugins, "data_parallel", devices, model.get());
  std::mt19937 random(1);
  for (int i = 0; i < 5; ++i) {  // the first steps allocate
    single.step_ms(random_batch(batch_size, random));
    parallel.step_ms(random_batch(batch_size, random));
  }
  std::vector<double> ratios;
  for (int i = 0; i < num_steps; ++i) {
    const double single_ms = single.step_ms(random_batch(batch_size, random));
    ratios.push_back(parallel.step_ms(random_batch(batch_size, random)) / single_ms);
  }
  std::printf("%s, batch %lld, %d pairs of steps: single_device %.2f ms, data_parallel(%s) %.2f ms, ratio %.3f\n",
              model_name.c_str(), static_cast<long long>(batch_size), num_steps, single.median_ms(), devices.c_str(),
              parallel.median_ms(), Contestant::median(ratios));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench-step: %s\n", error.what());
  return 1;
}
