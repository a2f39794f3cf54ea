// SPDX-License-Identifier: Apache-2.0
//
// What stream a model on LibTorch is on.
#include "base/model.hpp"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "accelerator/path/emulated_rig.hpp"
#include "base/dlpack.hpp"
#include "support/catch.hpp"
#include "torch/bridge.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const c10::Device device(at::kPrivateUse1, 0);

// Under a strategy of another author, which tells the replica's stream and leaves LibTorch's current one as it is.
struct Rig {
  Rig() {
    begin_test();
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

}  // namespace

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
