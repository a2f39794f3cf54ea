// SPDX-License-Identifier: Apache-2.0
//
// A run of the toy model from the command line, for the tests of the loop: one weight w = 0, loss w * x, sgd with lr 1.
#pragma once

#include "support.hpp"

namespace stratagem::test {

struct Run {
  /// Training on `samples`, batch 1, in order. A checkpoint folder `run`, metrics in m.jsonl, samples of each step in trace.
  explicit Run(const std::string& strategy, const std::vector<float>& samples = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9});

  /// `--set` texts on top of the config; `more` are other words of the command line.
  Finished fit(const std::vector<std::string>& overrides = {}, const std::vector<std::string>& more = {"--json"}) const;
  Finished resume(const std::vector<std::string>& overrides = {}) const;
  Finished command(const std::string& name, const std::vector<std::string>& overrides, const std::vector<std::string>& more,
                   Surroundings surroundings = {}) const;

  /// The metrics lines of a stage, all fields but the time.
  std::vector<Json> metrics(const std::string& stage) const;
  /// A value of each metrics line of a stage.
  std::vector<double> values(const std::string& stage, const std::string& name) const;
  /// The samples of each training step, one text each; and forgets them.
  std::vector<std::string> trace() const;
  /// The names in the checkpoint folder, sorted.
  std::vector<std::string> checkpoints() const;
  /// The loop's position as a checkpoint holds it.
  Json position(const std::string& checkpoint) const;

  TemporaryFolder folder;
  Json config;
};

/// "0", "1", ... "9" from `first` to `last`.
std::vector<std::string> numbers(int first, int last);
std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b);

}  // namespace stratagem::test
