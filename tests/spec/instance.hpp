// SPDX-License-Identifier: Apache-2.0
//
// A strategy instance of a plugin as the tests of its rules use it: through the C ABI, errors as exceptions.
#pragma once

#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "base/dlpack.hpp"
#include "base/structs.hpp"
#include "spec/toy_model.hpp"
#include "support/plugin.hpp"

namespace stratagem::test {

struct StepOutcome {
  Tree outputs;
  std::vector<double> weights;
  stg_update_result update = sized<stg_update_result>();

  double loss() const;
};

/// A host whose warnings are kept, and what is worse.
struct LoggingHost {
  LoggingHost();
  stg_host table = sized<stg_host>();
  std::vector<std::string> messages;
};

class Instance {
 public:
  /// `strategy` is "single_device" or "data_parallel".
  Instance(const std::string& strategy, const std::string& config, const stg_host* host = nullptr, uint64_t flags = 0);
  Instance(const stg_strategy_api& api, const std::string& config, const stg_host* host = nullptr, uint64_t flags = 0);
  Instance(const Instance&) = delete;
  Instance& operator=(const Instance&) = delete;
  ~Instance() { api.destroy(self); }

  void setup(const ToyModel& model, uint64_t stage = STG_STAGE_FIT) { setup(&model.table, stage); }
  void setup(const stg_model* model, uint64_t stage = STG_STAGE_FIT, Tree state = {});
  void teardown() { check(api.teardown(self, nullptr)); }

  /// One batch; with an update when it is the last of its window.
  StepOutcome train(Tree batch, double lr = 1, uint64_t clip = STG_CLIP_NONE, double clip_limit = 0);
  StepOutcome accumulate(Tree batch);
  StepOutcome training_step(Tree batch);
  void backward(bool is_last) { check(api.backward(self, nullptr, is_last ? STG_BATCH_LAST_MICRO_BATCH : 0)); }
  stg_update_result optimizer_step(double lr = 1, uint64_t clip = STG_CLIP_NONE, double clip_limit = 0);
  StepOutcome validate(Tree batch) { return evaluate(api.validation_step, std::move(batch)); }
  StepOutcome predict(Tree batch) { return evaluate(api.predict_step, std::move(batch)); }
  Tree gradients();
  Tree reduce(Tree object, uint32_t op = STG_REDUCE_MEAN);
  Tree export_state(uint64_t flags = STG_EXPORT_COPY);
  Tree import_state(Tree state, uint64_t flags = STG_IMPORT_STRICT);
  stg_status status();

  /// The parameter's or buffer's elements on the root.
  std::vector<double> values(const std::string& name);
  double value(const std::string& name) { return values(name).at(0); }

  StepOutcome evaluate(decltype(stg_strategy_api::validation_step) function, Tree batch);
  StepOutcome run_batch(Tree batch, const stg_update_args* update, uint64_t flags);

  const stg_strategy_api& api;
  stg_strategy* self = nullptr;
};

/// The Error that `body` throws; fails the test if there is none.
template <class Body>
Error error_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  throw std::runtime_error("no error was thrown");
}

/// The config of an instance that trains by SGD without momentum at a rate of 1.
std::string sgd_config(size_t num_devices, const std::string& more = "");
/// {"x": values as (n,)}.
Tree batch_of(const std::vector<double>& values, stg_dtype dtype = float32);
/// All elements of a tensor, or the number, as doubles.
std::vector<double> numbers(const stg_value& value);
std::vector<int64_t> shape(const stg_value& value);
/// The bytes of all parameters of a state, one after the other: for bitwise comparisons.
std::string model_bytes(const Tree& state);
std::string optimizer_bytes(const Tree& state);
/// The state, with a scaler of these numbers.
Tree with_scaler(Tree state, double scale, int64_t good_steps);

}  // namespace stratagem::test
