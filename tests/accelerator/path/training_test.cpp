// SPDX-License-Identifier: Apache-2.0
//
// What training on an accelerator must hold to on any of them, emulated or not, beside the numbers (parity_test.cpp).
#include <ATen/ops/arange.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>

#include <atomic>
#include <cmath>
#include <utility>

#include "accelerator/path/rig.hpp"
#include "base/dlpack.hpp"
#include "support/catch.hpp"
#include "torch/bridge.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::string sgd = R"(, "optimizer": {"name": "sgd", "momentum": 0.9})";

class Dropping : public TensorModel {
 public:
  explicit Dropping(const nlohmann::json&) : w_(register_parameter("w", at::ones({3, 6}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    return at::linear(at::dropout(batch["x"].tensor(), 0.5, true), w_).sub(batch["y"].tensor()).pow(2).mean();
  }

 private:
  at::Tensor w_;
};

// Counts the tensors that it was given with channels last, weight and input of each step.
class Convolution : public TensorModel {
 public:
  explicit Convolution(const nlohmann::json&)
      : w_(register_parameter(
            "w", at::arange(4 * 3 * 3 * 3, at::kFloat).sin().view({4, 3, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor x = batch["x"].tensor();
    for (const at::Tensor& tensor : {x, w_}) num_kept += tensor.is_contiguous(at::MemoryFormat::ChannelsLast) ? 1 : 0;
    return at::conv2d(x, w_).pow(2).mean();
  }
  static inline std::atomic<int> num_kept{0};

 private:
  at::Tensor w_;
};

Tree images(int64_t num_rows) {
  Dict dict;
  const at::Tensor numbers = at::arange(num_rows * 3 * 5 * 5, at::kFloat).cos().view({num_rows, 3, 5, 5});
  dict.emplace_back("x", to_dlpack(numbers.contiguous(at::MemoryFormat::ChannelsLast)));
  return make_tree(std::move(dict));
}

// Two thirds of the rows to the first share, the rest to the second; moves what it needs and doubles it on its way.
class Packing : public TensorModel {
 public:
  explicit Packing(const nlohmann::json&) : w_(register_parameter("w", at::ones({3, 6}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    return at::linear(batch["x"].tensor(), w_).sub(batch["y"].tensor()).pow(2).mean();
  }
  std::vector<TensorTree> split(const Batch& batch, size_t num_shares) override {
    const int64_t rows = batch["x"].tensor().size(0), first = num_shares == 1 ? rows : rows * 2 / 3;
    const auto share = [&](int64_t begin, int64_t end) {
      return TensorTree(
          TensorTree::Dict{{"x", batch["x"].tensor().slice(0, begin, end)}, {"y", batch["y"].tensor().slice(0, begin, end)}});
    };
    std::vector<TensorTree> shares{share(0, first)};
    if (first < rows) shares.push_back(share(first, rows));
    return shares;
  }
  TensorTree transfer(const Batch& batch, at::Device to, int64_t) override {
    return TensorTree::Dict{{"x", batch["x"].tensor().to(to).mul(2)}, {"y", batch["y"].tensor().to(to)}};
  }

 private:
  at::Tensor w_;
};

}  // namespace

TEST_CASE("On an accelerator a step with an announced batch is the step with that batch, to the bit") {
  begin_test();
  const auto announced = on_accelerator("data_parallel", "[0, 1, 0]", sgd);
  const auto plain = on_accelerator("data_parallel", "[0, 1, 0]", sgd);
  for (Instance* instance : {announced.get(), plain.get()}) instance->setup(model_of<Net>().get());
  uint64_t ticket = announce(*announced, net_batch(7, 0));
  for (int64_t step = 0; step < 5; ++step) {
    const uint64_t next = announce(*announced, net_batch(7 + step, step + 1));
    train_announced(*announced, std::exchange(ticket, next));
    plain->train(net_batch(step == 0 ? 7 : 6 + step, step), 0.05, STG_CLIP_NORM, 0.5);
  }
  CHECK(model_bytes(announced->export_state()) == model_bytes(plain->export_state()));
  CHECK(reports() == "");
}

TEST_CASE(
    "On an accelerator dropout draws the same numbers at each run of a seed, others on each replica, and goes on after a state") {
  const std::string seeded = sgd + R"(, "seed": 11)";
  std::string bytes;
  for (int run = 0; run < 3; ++run) {
    begin_test(1 + static_cast<uint64_t>(run));
    const auto instance = on_accelerator("data_parallel", "[0, 0, 1]", seeded);
    instance->setup(model_of<Dropping>().get());
    for (int64_t step = 0; step < 2; ++step) instance->train(net_batch(9, step), 0.05);
    if (run == 2) {
      const auto next = on_accelerator("data_parallel", "[0, 0, 1]", seeded);
      next->setup(model_of<Dropping>().get(), STG_STAGE_FIT, instance->export_state());
      for (int64_t step = 2; step < 4; ++step) next->train(net_batch(9, step), 0.05);
      CHECK(model_bytes(next->export_state()) == bytes);
    } else {
      for (int64_t step = 2; step < 4; ++step) instance->train(net_batch(9, step), 0.05);
      if (run == 1) CHECK(model_bytes(instance->export_state()) == bytes);
      bytes = model_bytes(instance->export_state());
    }
    CHECK(reports() == "");
  }
}

TEST_CASE("Mixed precision on an accelerator is near to the CPU's, and an overflow on one device skips the update on all") {
  for (const char* precision : {"bf16-mixed", "16-mixed"}) {
    begin_test();
    const std::string more = concat(sgd, R"(, "precision": ")", precision, "\"");
    const auto mine = on_accelerator("data_parallel", "[0, 1]", more);
    const auto reference = on_cpu("data_parallel", 2, more);
    for (Instance* instance : {mine.get(), reference.get()}) {
      instance->setup(model_of<Net>().get());
      for (int64_t step = 0; step < 8; ++step) instance->train(net_batch(8, step), 0.02);
    }
    INFO(precision);
    CHECK(distance(mine->export_state(), reference->export_state()) < 0.05);
    if (std::string(precision) == "16-mixed") {
      const std::string before = model_bytes(mine->export_state());
      Tree batch = net_batch(8, 20);
      first_element<float>(find(batch.root(), "y")->as.tensor->view)[23] = 1e30f;
      const stg_update_result update = mine->train(std::move(batch), 0.02).update;
      CHECK(update.outcome == STG_UPDATE_SKIPPED_OVERFLOW);
      CHECK(model_bytes(mine->export_state()) == before);
    }
    CHECK(reports() == "");
  }
}

TEST_CASE("On an accelerator setup may follow teardown, and the calling thread may do it all") {
  begin_test();
  const auto instance = on_accelerator("data_parallel", "[0, 1, 1]", sgd);
  std::string bytes;
  for (int round = 0; round < 2; ++round) {
    instance->setup(model_of<Net>().get());
    instance->train(net_batch(8, 0), 0.05);
    const std::string now = model_bytes(instance->export_state());
    if (round == 1) CHECK(now == bytes);
    bytes = now;
    instance->teardown();
  }
  const auto alone = on_accelerator("data_parallel", "[0, 1, 1]", sgd, STG_CREATE_CALLER_THREAD_ONLY);
  alone->setup(model_of<Net>().get());
  alone->train(net_batch(8, 0), 0.05);
  CHECK(model_bytes(alone->export_state()) == bytes);
  CHECK(reports() == "");
}

TEST_CASE("On an accelerator channels last are kept: of batches, weights and gradients, on one device and on several") {
  for (const char* devices : {"[0]", "[0, 1]", "[0, 1, 0]"}) {
    begin_test();
    const auto instance = on_accelerator("data_parallel", devices, sgd);
    instance->setup(model_of<Convolution>().get());
    Convolution::num_kept = 0;
    const int num_replicas = std::string(devices) == "[0]" ? 1 : std::string(devices) == "[0, 1]" ? 2 : 3;
    for (int step = 0; step < 2; ++step) instance->train(images(6), 0.1);
    INFO(devices);
    CHECK(Convolution::num_kept == 4 * num_replicas);
    instance->training_step(images(6));
    instance->backward(true);
    const Tree gradients = instance->gradients();
    for_each_leaf(gradients.root(), [](const KeyPath&, const stg_value& leaf) {
      CHECK(view_tensor(*leaf.as.tensor).is_contiguous(at::MemoryFormat::ChannelsLast));
    });
    CHECK(reports() == "");
  }
}

TEST_CASE("On an accelerator a model may split and move batches itself") {
  begin_test();
  const auto mine = on_accelerator("data_parallel", "[0, 1]", sgd);
  const auto reference = on_cpu("data_parallel", 2, sgd);
  for (Instance* instance : {mine.get(), reference.get()}) {
    instance->setup(model_of<Packing>().get());
    for (int64_t step = 0; step < 4; ++step) instance->train(net_batch(9, step), 0.01);
  }
  CHECK(distance(mine->export_state(), reference->export_state()) < tolerances().float32);
  CHECK(reports() == "");
}

TEST_CASE("On an accelerator a NaN is found where one is looked for, in a loss and in a gradient") {
  for (const char* devices : {"[0]", "[0, 1]"}) {
    begin_test();
    const auto instance = on_accelerator("data_parallel", devices, sgd);
    instance->setup(model_of<Net>().get());
    instance->run_batch(net_batch(8, 0), nullptr, STG_BATCH_DETECT_ANOMALY);
    instance->optimizer_step(0.05);
    Tree batch = net_batch(8, 1);
    first_element<float>(find(batch.root(), "y")->as.tensor->view)[23] = std::nanf("");
    const Error error = error_of([&] { instance->run_batch(std::move(batch), nullptr, STG_BATCH_DETECT_ANOMALY); });
    CHECK(error.code == STG_OUT_OF_RANGE);
    CHECK_THAT(error.message, Catch::Contains("NaN"));
    CHECK(reports() == "");
  }
}
