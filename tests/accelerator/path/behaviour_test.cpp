// SPDX-License-Identifier: Apache-2.0
//
// How the accelerator path goes about it: what overlaps, what the host doesn't wait for, and what it does when a device or a rank fails.
#include <ATen/ops/ones.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <time.h>

#include <algorithm>

#include "accelerator/path/emulated_rig.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::string sgd = R"(, "optimizer": {"name": "sgd", "momentum": 0.9})";
const std::string small_buckets = R"(, "options": {"bucket_mib": 0, "first_bucket_mib": 0})";

c10::Stream default_stream(int index) {
  return c10::impl::VirtualGuardImpl(at::kPrivateUse1).getDefaultStream({at::kPrivateUse1, static_cast<c10::DeviceIndex>(index)});
}

size_t count_reductions(const std::vector<std::string>& log) {
  return static_cast<size_t>(
      std::count_if(log.begin(), log.end(), [](const std::string& line) { return line.starts_with("all_reduce"); }));
}

// Counts the reductions that had been launched when the last replica's backward came to the input.
class Watched : public Net {
 public:
  explicit Watched(const nlohmann::json& options) : Net(options), first_(register_parameter("first", at::ones({6}))) {}
  StepOutput training_step(const Batch& batch, const StepContext& context) override {
    at::Tensor x = batch["x"].tensor().detach().requires_grad_();
    x.register_hook([](at::Tensor gradient) {
      num_at_input += count_reductions(emulated::take_transport_log());
      return gradient;
    });
    TensorTree tree(TensorTree::Dict{{"x", TensorTree(x.mul(first_))}, {"y", TensorTree(batch["y"].tensor())}});
    return Net::training_step(Batch(tree, "batch"), context);
  }
  static inline std::atomic<size_t> num_at_input{0};

 private:
  at::Tensor first_;
};

}  // namespace

TEST_CASE("A step on an accelerator is queued without waiting for a device, without new memory, and reads nothing") {
  begin_test();
  const auto instance = on_accelerator("data_parallel", "[0, 1, 0]", sgd);
  instance->setup(model_of<Net>(R"({"norm": true})").get());
  {
    // Warm: with more steps in flight than there will be again.
    emulated::Gate gate(default_stream(0));
    for (int64_t step = 0; step < 6; ++step) instance->train(net_batch(9, step), 0.05);
  }
  // How many blocks are in use at once depends on which thread was faster, so a late step may still need one more.
  bool is_warm = false;
  for (int64_t step = 0; step < 20 && !is_warm; ++step) {
    emulated::drain();
    const emulated::Counters before = emulated::counters();
    {
      emulated::Gate gate(default_stream(0));
      instance->train(net_batch(9, step), 0.05);
      CHECK_FALSE(emulated::is_idle(default_stream(0)));  // all of it is queued behind what the caller had queued
    }
    const emulated::Counters after = emulated::counters();
    CHECK(after.operations > before.operations + 20);
    CHECK(after.synchronisations == before.synchronisations);
    CHECK(after.host_reads == before.host_reads);
    is_warm = after.new_blocks == before.new_blocks;
  }
  CHECK(is_warm);
  emulated::drain();
  CHECK(reports() == "");
}

TEST_CASE("A batch in pinned memory is copied out of it, whether its tensors say that they are pinned or not") {
  for (const uint32_t kind : {STG_DEVICE_CUDA_HOST, STG_DEVICE_CPU}) {
    begin_test();
    const auto instance = on_accelerator("data_parallel", "[0, 1]", sgd);
    instance->setup(model_of<Net>().get());
    instance->train(net_batch(8, 0), 0.05);
    std::vector<at::Tensor> sources;
    Tree batch = net_batch(8, 1);
    for_each_leaf(batch.root(), [&](const KeyPath&, stg_value& leaf) {
      const TensorPtr before{std::exchange(leaf.as.tensor, nullptr)};
      sources.push_back(view_tensor(*before).pin_memory());
      leaf.as.tensor = to_dlpack(sources.back()).release();
      leaf.as.tensor->view.device.kind = kind;
    });
    emulated::drain();
    {
      const emulated::Gate first(default_stream(0)),
          second(default_stream(1));  // the copies come after what the caller has queued
      instance->train(std::move(batch), 0.05);
      for (const at::Tensor& source : sources) CHECK(source.storage().use_count() > 1);
    }
    for (int64_t step = 2; step < 5; ++step) {
      emulated::drain();
      instance->train(net_batch(8, step), 0.05);
    }
    for (const at::Tensor& source : sources) CHECK(source.storage().use_count() == 1);
    CHECK(reports() == "");
  }
}

TEST_CASE("Gradients are reduced while the rest of backward runs, each bucket once for all devices") {
  begin_test();
  const auto instance = on_accelerator("data_parallel", "[0, 1]", sgd + small_buckets);
  instance->setup(model_of<Watched>().get());
  emulated::take_transport_log();
  Watched::num_at_input = 0;
  instance->train(net_batch(8, 0), 0.05);
  CHECK(Watched::num_at_input >= 2);  // of five, on two devices each
  CHECK(reports() == "");
}

TEST_CASE("The weights of shares are the factors of the reduction") {
  begin_test();
  const auto instance = on_accelerator("data_parallel", "[0, 1]", sgd);
  instance->setup(model_of<Net>().get());
  emulated::take_transport_log();
  instance->train(net_batch(5, 0), 0.05);
  std::vector<double> factors;
  for (const std::string& line : emulated::take_transport_log()) {
    const size_t at = line.find("factor ");
    if (at != std::string::npos) factors.push_back(std::stod(line.substr(at + 7)));
  }
  CHECK(factors == std::vector<double>{3.0 / 5, 2.0 / 5});
}

TEST_CASE("Compressed gradients cross as bfloat16, and training is near to the uncompressed") {
  begin_test();
  const auto plain = on_accelerator("data_parallel", "[0, 1]", sgd);
  const auto compressed = on_accelerator("data_parallel", "[0, 1]", sgd + R"(, "options": {"compress": "bf16"})");
  for (Instance* instance : {plain.get(), compressed.get()}) {
    instance->setup(model_of<Net>().get());
    emulated::take_transport_log();
    for (int64_t step = 0; step < 3; ++step) instance->train(net_batch(8, step), 0.05);
  }
  const std::vector<std::string> log = emulated::take_transport_log();
  CHECK(
      std::any_of(log.begin(), log.end(), [](const std::string& line) { return line.find("dtype 4/16") != std::string::npos; }));
  CHECK(distance(compressed->export_state(), plain->export_state()) < 0.02);
  CHECK(distance(compressed->export_state(), plain->export_state()) > 0);
  CHECK(reports() == "");
}

TEST_CASE("An announced batch is on its way before its step, and the step is the same") {
  begin_test();
  const auto announced = on_accelerator("data_parallel", "[0, 1, 0]", sgd);
  const auto plain = on_accelerator("data_parallel", "[0, 1, 0]", sgd);
  for (Instance* instance : {announced.get(), plain.get()}) instance->setup(model_of<Net>().get());
  for (int64_t step = 0; step < 3; ++step) {
    const uint64_t before = emulated::counters().operations;
    const uint64_t ticket = announce(*announced, net_batch(7, step));
    for (int wait = 0; wait < 1000 && emulated::counters().operations < before + 6; ++wait) {
      const timespec pause{0, 1'000'000};
      nanosleep(&pause, nullptr);
    }
    CHECK(emulated::counters().operations >= before + 6);  // two tensors for each of three replicas
    train_announced(*announced, ticket);
    plain->train(net_batch(7, step), 0.05, STG_CLIP_NORM, 0.5);
  }
  CHECK(model_bytes(announced->export_state()) == model_bytes(plain->export_state()));
  CHECK(reports() == "");
}

TEST_CASE("A device that fails ends the step with an error that names it, and the strategy can be made anew") {
  begin_test();
  {
    const auto instance = on_accelerator("data_parallel", "[0, 1]", sgd);
    instance->setup(model_of<Net>().get());
    instance->train(net_batch(8, 0), 0.05);
    emulated::drain();
    emulated::fail_device(1, "an uncorrectable memory error");
    std::optional<Error> error;
    for (int64_t step = 0; step < 3 && !error; ++step) {
      try {
        instance->train(net_batch(8, 1 + step), 0.05, STG_CLIP_NORM, 0.5);
      } catch (const Error& thrown) {
        error = thrown;
      }
    }
    REQUIRE(error);
    CHECK_THAT(error->message, Catch::Contains("emulated:1") && Catch::Contains("uncorrectable memory error"));
    CHECK(instance->status().state == STG_STATE_DRAINING);
  }
  emulated::heal();
  emulated::drain();
  const auto again = on_accelerator("data_parallel", "[0, 1]", sgd);
  again->setup(model_of<Net>().get());
  again->train(net_batch(8, 0), 0.05);
  again->export_state();
}

TEST_CASE("A rank that never arrives ends a wait at its deadline, and no thread of ours hangs") {
  begin_test();
  {
    const auto instance = on_accelerator("data_parallel", "[0, 1]", sgd);
    instance->setup(model_of<Net>().get());
    instance->train(net_batch(8, 0), 0.05);
    emulated::hold_rank(1);
    const Error error = error_of([&] { check(train_until(*instance, in_ms(150))); });
    CHECK(error.code == STG_DEADLINE_EXCEEDED);
    CHECK_THAT(error.message, Catch::Contains("update"));
    CHECK(instance->status().state == STG_STATE_DRAINING);
  }
  emulated::release_ranks();
  emulated::drain();
  const auto again = on_accelerator("data_parallel", "[0, 1]", sgd);
  again->setup(model_of<Net>().get());
  check(train_until(*again, in_ms(20000)));
}

TEST_CASE("Each call of the transport may fail: the step is an error, and the strategy can be made anew") {
  for (uint64_t call = 1; call <= 4; ++call) {  // begin, two ranks, end
    begin_test();
    {
      const auto instance = on_accelerator("data_parallel", "[0, 1]", sgd);
      instance->setup(model_of<Net>().get());
      emulated::fail_transport_call(call, "a cable was pulled");
      const Error error = error_of([&] { instance->train(net_batch(8, 0), 0.05); });
      CHECK_THAT(error.message, Catch::Contains("a cable was pulled"));
      CHECK(instance->status().state == STG_STATE_DRAINING);
    }
    emulated::drain();
  }
}

TEST_CASE("A list of devices that aren't there is refused, and those that are are named") {
  begin_test();
  const Error error = error_of([] { on_accelerator("data_parallel", "[0, 9]", sgd); });
  CHECK(error.code == STG_NOT_FOUND);
  CHECK_THAT(error.message, Catch::Contains("/devices/1 is 9") && Catch::Contains("0 (") && Catch::Contains("3 ("));
  CHECK(error_of([] { on_accelerator("data_parallel", "5", sgd); }).code == STG_NOT_FOUND);
}
