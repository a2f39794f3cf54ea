// SPDX-License-Identifier: Apache-2.0
//
// What only a GPU can show: kernels that take their time on streams of the caller's, and devices that are named by the driver.
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "accelerator/path/cuda_rig.hpp"
#include "gpu/transport.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::string sgd = R"(, "optimizer": {"name": "sgd", "momentum": 0.9})";
const c10::Device first_gpu{at::kCUDA, 0};

// Holds the current stream for `num_products` times some milliseconds.
void keep_busy(int num_products) {
  const at::Tensor matrix = at::full({4096, 4096}, 1.0f / 4096, at::TensorOptions().device(first_gpu));
  at::Tensor product = matrix;
  for (int i = 0; i < num_products; ++i) product = at::mm(product, matrix);
}

Tree twice(Tree batch, const std::optional<c10::Device>& device) {
  for_each_leaf(batch.root(), [&](const KeyPath&, stg_value& leaf) {
    const TensorPtr before{std::exchange(leaf.as.tensor, nullptr)};
    const at::Tensor tensor = view_tensor(*before);
    leaf.as.tensor = to_dlpack((device ? tensor.to(*device) : tensor).mul(2)).release();
  });
  return batch;
}

}  // namespace

TEST_CASE("A step on a GPU comes after what the caller has queued on its stream, and what it queues there later after the step") {
  begin_test();
  if (!is_on_gpus()) return;
  const auto instance = on_accelerator("single_device", "[0]", sgd);
  const auto reference = on_cpu("single_device", 1, sgd);
  for (Instance* one : {instance.get(), reference.get()}) one->setup(model_of<Net>().get());
  const c10::Stream stream = c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(first_gpu, false);
  const stg_stream given = abi_stream(stream);
  stg_call call = sized<stg_call>();
  call.streams = &given;
  call.num_streams = 1;
  for (int64_t step = 0; step < 4; ++step) {
    at::Tensor tripled;
    {
      const c10::StreamGuard guard(stream);
      keep_busy(20);
      Tree batch = twice(net_batch(64, step), first_gpu);
      stg_step_args args = sized<stg_step_args>();
      args.batch = batch.argument();
      stg_step_result result = sized<stg_step_result>();
      check(instance->api.predict_step(instance->self, &call, &args, &result));
      const Tree outputs{result.outputs};
      tripled = view_tensor(*outputs.root().as.tensor).mul(3);
    }
    const std::vector<double> rows = numbers(on_host(*instance, batch_with(tripled)).root());
    const StepOutcome expected = reference->predict(twice(net_batch(64, step), {}));
    const std::vector<double> expected_rows = numbers(expected.outputs.root());
    REQUIRE(rows.size() == expected_rows.size());
    for (size_t i = 0; i < rows.size(); ++i) CHECK(rows[i] == Approx(3 * expected_rows[i]).epsilon(1e-4).margin(1e-5));
  }
}

TEST_CASE("A deadline ends the wait for a GPU that is busy, and the strategy can be made anew") {
  begin_test();
  if (!is_on_gpus()) return;
  {
    const auto instance = on_accelerator("data_parallel", "[0, 0]", sgd);
    instance->setup(model_of<Net>().get());
    instance->train(net_batch(8, 0), 0.05);
    keep_busy(400);
    const Error error = error_of([&] { check(train_until(*instance, in_ms(50))); });
    CHECK(error.code == STG_DEADLINE_EXCEEDED);
    CHECK(instance->status().state == STG_STATE_DRAINING);
  }
  const auto again = on_accelerator("data_parallel", "[0, 0]", sgd);
  again->setup(model_of<Net>().get());
  check(train_until(*again, in_ms(30000)));
}

TEST_CASE("A GPU that isn't there is refused, and those that are are named") {
  begin_test();
  if (!is_on_gpus()) return;
  const Error error = error_of([] { Instance("data_parallel", R"({"accelerator": "cuda", "devices": [0, 999]})"); });
  CHECK(error.code == STG_NOT_FOUND);
  CHECK_THAT(error.message, Catch::Contains("/devices/1 is 999") && Catch::Contains(concat("0 (", find_gpus().names.at(0))));
}
