// SPDX-License-Identifier: Apache-2.0
//
// Denominators that a step gives as tensors on its device: the same training as with numbers, and no wait before all is queued.
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <time.h>

#include <future>

#include "accelerator/path/emulated_rig.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::string sgd = R"(, "optimizer": {"name": "sgd", "momentum": 0.9})";
const std::string adam = R"(, "optimizer": {"name": "adam"})";

/// The loss of a batch is the mean over what n (rows) adds up to; n is on the device, or was told to be a number: `options.number`.
class Counting : public TensorModel {
 public:
  explicit Counting(const nlohmann::json& options)
      : w1_(register_parameter("w1", at::randn({50, 6}))),
        w2_(register_parameter("w2", at::randn({3, 50}))),
        b2_(register_parameter("b2", at::zeros({3}))),
        sometimes_(register_parameter("sometimes", at::zeros({3}))),
        gives_number_(options.value("number", false)) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    at::Tensor out = at::linear(at::gelu(at::linear(batch["x"].tensor(), w1_)), w2_, b2_);
    if (out.size(0) == 3 || out.size(0) == 7) out = out.add(sometimes_);
    const at::Tensor loss = out.sub(batch["y"].tensor()).pow(2).mean();
    const at::Tensor count = batch["n"].tensor().sum();
    if (gives_number_) return StepOutput(loss).over(count.item<double>());
    return StepOutput(loss).over(count);
  }

 private:
  at::Tensor w1_, w2_, b2_, sometimes_;
  bool gives_number_;
};

const char* const as_numbers = R"({"number": true})";

// Each row weighs `counts[row]`, or 3 and the row's index where none are given.
Tree counted_batch(int64_t num_rows, int64_t index, std::vector<double> counts = {}, double first_y = 0) {
  const Tree plain = net_batch(num_rows, index);
  Dict dict;
  for (const char* key : {"x", "y"}) dict.emplace_back(key, copy_tensor(find(plain.root(), key)->as.tensor->view));
  if (first_y != 0) *first_element<float>(std::get<TensorPtr>(dict[1].second.data)->view) = static_cast<float>(first_y);
  TensorPtr n = allocate_tensor(float64, {num_rows});
  for (int64_t row = 0; row < num_rows; ++row) {
    first_element<double>(n->view)[row] = counts.empty() ? static_cast<double>(3 + row) : counts[static_cast<size_t>(row)];
  }
  dict.emplace_back("n", std::move(n));
  return make_tree(std::move(dict));
}

struct Outcome {
  std::vector<double> weights, totals, losses;
};

void note(Instance& instance, StepOutcome step, Outcome& outcome) {
  outcome.weights.insert(outcome.weights.end(), step.weights.begin(), step.weights.end());
  outcome.totals.push_back(step.update.total_weight);
  outcome.losses.push_back(loss_of(instance, std::move(step)));
}

// Windows of one, two and three micro-batches; in the third, replicas begin late, and one has nothing at all.
Outcome train(Instance& instance, const char* options = "{}") {
  instance.setup(model_of<Counting>(options).get());
  Outcome outcome;
  for (int64_t step = 0; step < 2; ++step) {
    note(instance, instance.train(counted_batch(8, step), 0.01), outcome);
    note(instance, instance.accumulate(counted_batch(6, 10 + step)), outcome);
    note(instance, instance.train(counted_batch(7, 20 + step), 0.01), outcome);
    note(instance, instance.accumulate(counted_batch(4, 30 + step, {0, 0, 5, 0})), outcome);
    note(instance, instance.accumulate(counted_batch(4, 40 + step, {2, 0, 0, 1})), outcome);
    note(instance, instance.train(counted_batch(4, 50 + step, {0, 7, 0, 0}), 0.01), outcome);
  }
  return outcome;
}

uint64_t now_ms() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000 + static_cast<uint64_t>(now.tv_nsec) / 1'000'000;
}

void rest() {
  const timespec pause{0, 1'000'000};
  nanosleep(&pause, nullptr);
}

}  // namespace

TEST_CASE("A denominator that stays on its device is the number that it is, on any list of devices") {
  for (const char* devices : {"[0]", "[0, 1]", "[2, 0, 1]", "[0, 0]", "[1, 0, 1]", "[3, 3, 1, 1]"}) {
    for (const std::string& more :
         {sgd, adam + R"(, "options": {"optimizer_sharding": true, "compress": "bf16"})", sgd + R"(, "precision": "16-mixed")"}) {
      begin_test();
      INFO(devices << more);
      const auto mine = on_accelerator("data_parallel", devices, more);
      const auto other = on_accelerator("data_parallel", devices, more);
      const Outcome outcome = train(*mine);
      const Outcome expected = train(*other, as_numbers);
      CHECK(outcome.weights == expected.weights);
      CHECK(outcome.totals == expected.totals);
      for (size_t i = 0; i < expected.losses.size(); ++i) CHECK(outcome.losses[i] == Approx(expected.losses[i]).epsilon(1e-5));
      const bool is_rounded = more.find("bf16") != std::string::npos || more.find("mixed") != std::string::npos;
      CHECK(distance(mine->export_state(), other->export_state()) < (is_rounded ? 2e-3 : 1e-5));
      CHECK(reports() == "");
    }
  }
}

TEST_CASE("A step whose denominators are on devices is queued whole before the host waits for one of them") {
  begin_test();
  const auto instance = on_accelerator("data_parallel", "[0, 1, 0]", sgd);
  train(*instance);
  emulated::drain();
  emulated::take_transport_log();
  const emulated::Counters before = emulated::counters();
  std::future<StepOutcome> step;
  {
    const emulated::Gate gate(c10::impl::VirtualGuardImpl(at::kPrivateUse1).getDefaultStream({at::kPrivateUse1, 0}));
    step = std::async(std::launch::async, [&] { return instance->train(counted_batch(9, 4), 0.01, STG_CLIP_VALUE, 0.1); });
    // Nothing of device 0 has begun. All is queued when no more comes.
    uint64_t last = 0;
    for (uint64_t since = now_ms(); now_ms() < since + 200; rest()) {
      if (emulated::counters().operations == last) continue;
      last = emulated::counters().operations;
      since = now_ms();
    }
    CHECK(step.wait_for(std::chrono::seconds(0)) == std::future_status::timeout);
    CHECK(last > before.operations + 100);
    const std::vector<std::string> log = emulated::take_transport_log();
    CHECK(std::any_of(log.begin(), log.end(),
                      [](const auto& line) { return line.starts_with("all_reduce rank 0 numel 3 dtype 2/64"); }));
    CHECK(std::any_of(log.begin(), log.end(), [](const auto& line) { return line.starts_with("all_reduce rank 0 numel 456 "); }));
  }
  const StepOutcome outcome = step.get();
  CHECK(outcome.update.outcome == STG_UPDATE_DONE);
  CHECK(outcome.weights == std::vector<double>{3 + 4 + 5, 6 + 7 + 8, 9 + 10 + 11});
  const emulated::Counters after = emulated::counters();
  CHECK(after.synchronisations == before.synchronisations);
  CHECK(after.host_reads == before.host_reads);
  CHECK(reports() == "");
}

TEST_CASE("A share whose denominator on its device is 0 keeps its NaNs to itself") {
  for (const char* devices : {"[0, 1]", "[0, 0]", "[0, 1, 0]"}) {
    begin_test();
    INFO(devices);
    const auto mine = on_accelerator("data_parallel", devices, sgd);
    const auto other = on_accelerator("data_parallel", devices, sgd);
    for (Instance* instance : {mine.get(), other.get()}) {
      instance->setup(model_of<Counting>(instance == mine.get() ? "{}" : as_numbers).get());
      instance->accumulate(counted_batch(6, 0, {0, 0, 0, 1, 1, 1}, std::nan("")));
      instance->train(counted_batch(6, 1, {0, 0, 0, 4, 1, 1}, std::nan("")), 0.01);
      instance->accumulate(counted_batch(6, 3));
      instance->train(counted_batch(6, 4, {0, 0, 0, 4, 1, 1}, std::nan("")), 0.01);
      const double loss = loss_of(*instance, instance->train(counted_batch(6, 2, {0, 0, 0, 4, 1, 1}, std::nan("")), 0.01));
      CHECK(std::isfinite(loss));
    }
    CHECK(distance(mine->export_state(), other->export_state()) < 1e-5);
    CHECK(reports() == "");
  }
}

TEST_CASE("Denominators on devices that are all 0 skip the update") {
  for (const char* optimizer : {"sgd", "adam", "rmsprop"}) {
    for (const char* more : {"", R"(, "options": {"optimizer_sharding": true})", R"(, "precision": "16-mixed")"}) {
      begin_test();
      INFO(optimizer << more);
      const auto instance =
          on_accelerator("data_parallel", "[0, 1]", concat(R"(, "optimizer": {"name": ")", optimizer, "\"}", more));
      train(*instance);
      const Tree before = instance->export_state();
      const stg_update_result update = instance->train(counted_batch(4, 0, {0, 0, 0, 0}), 0.01, STG_CLIP_NORM, 1).update;
      CHECK(update.outcome == STG_UPDATE_SKIPPED_NO_WEIGHT);
      CHECK(update.total_weight == 0);
      CHECK(distance(instance->export_state(), before) == 0);
      CHECK(optimizer_bytes(instance->export_state()) == optimizer_bytes(before));
      CHECK(reports() == "");
    }
  }
}

TEST_CASE("A denominator on a device that is none is an error, and everything is as before the step") {
  for (const double wrong : {-1.0, std::nan(""), HUGE_VAL}) {
    begin_test();
    const auto instance = on_accelerator("data_parallel", "[0, 1]", adam);
    train(*instance);
    const Tree before = instance->export_state();
    const Error error = error_of([&] { instance->train(counted_batch(2, 0, {3, wrong}), 0.01); });
    CHECK(error.code == STG_INVALID_ARGUMENT);
    CHECK_THAT(error.message, Catch::Contains("replica 1") && Catch::Contains("the denominator is ") &&
                                  Catch::Contains("it must be finite and at least 0"));
    CHECK(distance(instance->export_state(), before) == 0);
    CHECK(distance(instance->export_state(), before, "optimizer") == 0);
    CHECK(instance->train(counted_batch(4, 1), 0.01).update.outcome == STG_UPDATE_DONE);
    CHECK(reports() == "");
  }
}
