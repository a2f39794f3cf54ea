// SPDX-License-Identifier: Apache-2.0
//
// Time of a swap against that of a checkpoint, written and read again, which is what a program without swaps has to do (and then to load
// everything anew, which isn't counted here). Both in turn, in one run, on a perceptron of 25 million parameters, 100 MB. Printed: the
// medians, and the median of the ratios pair by pair.
//
//   bench-swap [pairs] [folder of the checkpoints]
#include <stratagem/session.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "base/npy.hpp"
#include "base/structs.hpp"

using namespace stratagem;
using Json = nlohmann::json;
namespace fs = std::filesystem;

namespace {

template <class Body>
double time_ms(Body body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void write_data(const fs::path& folder) {
  const TensorPtr inputs = allocate_tensor(float32, {8, 512}), targets = allocate_tensor(int64, {8});
  std::fill_n(first_element<float>(inputs->view), 8 * 512, 0.5F);
  std::fill_n(first_element<int64_t>(targets->view), 8, 1);
  write_npy(folder / "x.npy", inputs->view);
  write_npy(folder / "y.npy", targets->view);
}

void round_trip(stg_session session, const fs::path& folder) {
  const stg_strategy_api* api = nullptr;
  stg_strategy* instance = nullptr;
  check(stg_session_strategy(session, &api, &instance));
  const std::string path = folder / "checkpoint";
  auto args = sized<stg_checkpoint_args>();
  args.path = to_abi(path);
  check(api->save(instance, nullptr, &args));
  args.flags = STG_IMPORT_STRICT;
  check(api->load(instance, nullptr, &args, nullptr, nullptr));
}

void measure(const fs::path& folder, const Json& optimizer, const std::string& from, const std::string& to, int num_pairs) {
  const Json config = {{"strategy", Json::parse(from)},
                       {"model", {{"kind", "library"}, {"path", BENCH_MODEL}, {"options", {{"sizes", {512, 5000, 4500, 10}}}}}},
                       {"optimizer", optimizer},
                       {"data", {{"train", {{"format", "npy"}, {"inputs", "x.npy"}, {"targets", "y.npy"}, {"batch_size", 8}}}}},
                       {"trainer", {{"max_steps", 1000000}}}};
  const std::string text = config.dump(), folder_text = folder;
  auto args = sized<stg_session_args>();
  args.config_text = to_abi(text);
  args.config_folder = to_abi(folder_text);
  stg_session session = 0;
  check(stg_session_open(&args, &session));
  std::vector<double> swaps, round_trips, ratios;
  for (int i = -1; i < num_pairs; ++i) {  // the first of each allocates
    check(stg_session_step(session, 1, nullptr));
    const double there = time_ms([&] { check(stg_session_swap(session, to_abi(to))); });
    const double back = time_ms([&] { check(stg_session_swap(session, to_abi(from))); });
    const double round_trip_ms = time_ms([&] { round_trip(session, folder); });
    if (i < 0) continue;
    swaps.insert(swaps.end(), {there, back});
    round_trips.push_back(round_trip_ms);
    ratios.push_back((there + back) / 2 / round_trip_ms);
  }
  stg_session_close(session);
  std::printf("%s, %s <-> %s, %d pairs: swap %.1f ms, checkpoint written and read %.1f ms, ratio %.3f\n",
              optimizer["name"].get<std::string>().c_str(), from.c_str(), to.c_str(), num_pairs, median(swaps),
              median(round_trips), median(ratios));
}

}  // namespace

int main(int argc, char** argv) try {
  const int num_pairs = argc > 1 ? std::atoi(argv[1]) : 7;
  std::string name = ((argc > 2 ? fs::path(argv[2]) : fs::temp_directory_path()) / "bench-swap-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) throw invalid_argument("can't make a folder ", name);
  const fs::path folder = fs::canonical(name);
  write_data(folder);
  const std::string single = R"({"name": "single_device"})", parallel = R"({"name": "data_parallel", "devices": 2})";
  for (const Json& optimizer : {Json{{"name", "sgd"}, {"lr", 0.01}}, Json{{"name", "adamw"}, {"lr", 0.001}}}) {
    measure(folder, optimizer, single, single, num_pairs);
    measure(folder, optimizer, single, parallel, num_pairs);
  }
  fs::remove_all(folder);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench-swap: %s\n", error.what());
  return 1;
}
