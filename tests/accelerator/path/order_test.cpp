// SPDX-License-Identifier: Apache-2.0
//
// Each wait of the accelerator path, and each memory that is kept for a stream, is needed: left out by its name, the detector misses it.
#include <algorithm>
#include <fstream>
#include <regex>
#include <set>

#include "accelerator/path/rig.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::string sgd = R"(, "optimizer": {"name": "sgd", "momentum": 0.9})";

// All that the path does, on devices of which one holds two replicas.
void do_everything() {
  const auto instance = on_emulated("data_parallel", "[0, 1, 0, 1]", sgd);
  instance->setup(model_of<Net>(R"({"norm": true})").get());
  for (int64_t step = 0; step < 3; ++step) {
    instance->accumulate(net_batch(8, step));
    const StepOutcome outcome = instance->train(net_batch(9, 10 + step), 0.05, STG_CLIP_NORM, 0.5);
    instance->validate(net_batch(7, step));
  }
  instance->export_state();
  emulated::drain();
}

}  // namespace

TEST_CASE("The whole path runs without a report, with and without delays") {
  for (int run = 0; run < 3; ++run) {
    begin_emulation();
    emulated::set_delays(static_cast<uint64_t>(run), std::chrono::microseconds(run == 0 ? 0 : 300));
    do_everything();
    CHECK(reports() == "");
  }
}

TEST_CASE("Every wait of the path is missed when it is left out") {
  begin_emulation();
  do_everything();
  const std::vector<std::string> places = take_places();
  CHECK(places.size() > 8);
  for (const std::string& place : places) {
    begin_emulation();
    leave_out(place);
    INFO(place);
    try {
      do_everything();
    } catch (const Error&) {
      // poisoned memory may be an error, too
    }
    CHECK(reports() != "");
    leave_out("");
  }
}
