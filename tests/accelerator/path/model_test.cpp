// SPDX-License-Identifier: Apache-2.0
//
// What a model on LibTorch may do on an accelerator, and what it is spared.
#include "base/model.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "accelerator/path/rig.hpp"
#include "base/dlpack.hpp"
#include "support/catch.hpp"
#include "torch/bridge.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const c10::Device device(at::kPrivateUse1, 0);

const std::string sgd = R"(, "optimizer": {"name": "sgd", "momentum": 0.9})";

// Under a strategy of another author, which tells the replica's stream and leaves LibTorch's current one as it is.
struct Rig {
  Rig() {
    begin_emulation();
    auto args = sized<stg_replicate_args>();
    args.device = {STG_DEVICE_EXTENSION, 0};
    args.num_replicas = 1;
    replica = Replica(Model(model.get()), args);
    context.num_replicas = 1;
    context.flags = STG_STEP_GRADIENT;
  }

  // On the device, in memory of the stream that reads it, finished.
  static Tree batch(const c10::Stream& reader) {
    const c10::StreamGuard guard(reader);
    Tree tree = net_batch(8, 0);
    for_each_leaf(tree.root(), [](const KeyPath&, stg_value& leaf) {
      const TensorPtr host{std::exchange(leaf.as.tensor, nullptr)};
      leaf.as.tensor = to_dlpack(view_tensor(*host).to(device)).release();
    });
    emulated::drain();
    return tree;
  }

  ModelPtr model = model_of<Net>();
  Replica replica;
  stg_step_context context = sized<stg_step_context>();
};

double loss_in(const ModelStep& step) {
  const stg_value& root = step.outputs.root();
  return view_tensor(*(root.type == STG_TENSOR ? root : *find(root, "loss")).as.tensor).item<double>();
}

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

TEST_CASE("Channels last are kept: of batches, weights and gradients, on one device and on several") {
  for (const char* devices : {"[0]", "[0, 1]", "[0, 1, 0]"}) {
    begin_emulation();
    const auto instance = on_emulated("data_parallel", devices, sgd);
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
  begin_emulation();
  const auto mine = on_emulated("data_parallel", "[0, 1]", sgd);
  const auto reference = on_cpu("data_parallel", 2, sgd);
  for (Instance* instance : {mine.get(), reference.get()}) {
    instance->setup(model_of<Packing>().get());
    for (int64_t step = 0; step < 4; ++step) instance->train(net_batch(9, step), 0.01);
  }
  CHECK(distance(mine->export_state(), reference->export_state()) < 2e-5);
  CHECK(reports() == "");
}

TEST_CASE("On an accelerator a NaN is found where one is looked for, in a loss and in a gradient") {
  for (const char* devices : {"[0]", "[0, 1]"}) {
    begin_emulation();
    const auto instance = on_emulated("data_parallel", devices, sgd);
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

TEST_CASE("A model queues its step and backward on the stream that it is told, and on none of LibTorch's") {
  Rig rig;
  const c10::impl::VirtualGuardImpl impl(at::kPrivateUse1);
  const c10::Stream its = impl.getStreamFromGlobalPool(device, false);
  check(emulated::transport().native_stream(its.pack3(), &rig.context.stream));
  Tree batch = Rig::batch(its);
  size_t num_gradients = 0;
  {
    const emulated::Gate gate(impl.getDefaultStream(device));  // what is queued there doesn't come to be
    ModelStep step = rig.replica.step(rig.context, std::move(batch));
    rig.replica.backward(std::move(step.graph), 1, [&](uint64_t, TensorPtr gradient) {
      const c10::StreamGuard guard(its);
      const at::Tensor tensor = to_tensor(std::move(gradient));
      CHECK(tensor.isfinite().all().item<bool>());
      ++num_gradients;
    });
    const c10::StreamGuard guard(its);
    CHECK(loss_in(step) > 0);
  }
  CHECK(num_gradients == 4);
  CHECK(impl.getStream(device) == impl.getDefaultStream(device));
  CHECK(reports() == "");
}

TEST_CASE("A null handle is the default stream, and a stream of another device is refused") {
  Rig rig;
  rig.context.stream.device = {STG_DEVICE_EXTENSION, 0};
  const c10::impl::VirtualGuardImpl impl(at::kPrivateUse1);
  const c10::StreamGuard other(impl.getStreamFromGlobalPool(device, false));
  Tree batch = Rig::batch(impl.getDefaultStream(device));
  const ModelStep step = rig.replica.step(rig.context, std::move(batch));
  {
    const c10::StreamGuard guard(impl.getDefaultStream(device));
    CHECK(loss_in(step) > 0);
  }
  CHECK(reports() == "");
  rig.context.stream.device.index = 1;
  const Error error = error_of([&] { rig.replica.step(rig.context, Rig::batch(impl.getDefaultStream(device))); });
  CHECK(error.code == STG_INVALID_ARGUMENT);
  CHECK_THAT(error.message, Catch::Contains("stg_step_context.stream"));
}
