// SPDX-License-Identifier: Apache-2.0
//
// A session of this process over a perceptron with dropout, for the tests of swaps: what it logs, its losses, its last weights.
#pragma once

#include <functional>

#include "libstratagem/session.hpp"
#include "support.hpp"

namespace stratagem::test {

/// 60 samples of four numbers with a class of three each, in batches of 6, so that 1, 2 and 3 devices have equal shares.
Json strategy(const std::string& name, const Json& devices = nullptr, const Json& options = nullptr);
Json swap_config(const TemporaryFolder& folder, const Json& first = strategy("single_device"));
Json swap_at(int64_t step, const Json& strategy);

struct SwapRun {
  /// Opens a session of the config, which lies in `folder`.
  SwapRun(const TemporaryFolder& folder, const Json& config, const std::string& checkpoint = "");
  /// To the end.
  Json run() { return result = session->run(); }

  Requests requests;
  std::vector<std::string> warnings;
  std::vector<double> losses;                         // of each update
  std::vector<Json> swap_lines;                       // of the metrics
  std::vector<std::pair<int64_t, std::string>> told;  // of the event: step, and the error's text
  std::function<void(int64_t step)> after_update = [](int64_t) {};
  std::unique_ptr<Session> session;
  Json result;
};

/// The files of a checkpoint that hold weights and optimizer.
std::string weights_of(const Json& result);

/// |a - b| / |b| at most `limit`, all of them.
void check_near(const std::vector<double>& a, const std::vector<double>& b, double limit);

}  // namespace stratagem::test
