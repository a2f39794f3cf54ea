// SPDX-License-Identifier: Apache-2.0
//
// How the accelerator path goes about it: what overlaps, what the host doesn't wait for, and what it does when a device or a rank fails.
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <time.h>

#include <algorithm>

#include "accelerator/path/rig.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::string sgd = R"(, "optimizer": {"name": "sgd", "momentum": 0.9})";
const std::string small_buckets = R"(, "options": {"bucket_mib": 0, "first_bucket_mib": 0})";

c10::Stream default_stream(int index) {
  return c10::impl::VirtualGuardImpl(at::kPrivateUse1).getDefaultStream({at::kPrivateUse1, static_cast<c10::DeviceIndex>(index)});
}

uint64_t in_ms(uint64_t milliseconds) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec) + milliseconds * 1'000'000u;
}

struct Clipped {
  stg_update_args update = sized<stg_update_args>();
  Clipped() {
    update.lr = 0.05;
    update.clip = STG_CLIP_NORM;
    update.clip_limit = 0.5;
  }
};

// A step that reads its gradient's norm, and so waits for the devices, until `deadline_ns`.
stg_error* train_until(Instance& instance, uint64_t deadline_ns) {
  static const Clipped clipped;
  Tree batch = net_batch(8, 5);
  stg_call call = sized<stg_call>();
  call.deadline_ns = deadline_ns;
  stg_step_args args = sized<stg_step_args>();
  args.batch = batch.argument();
  args.update = &clipped.update;
  args.flags = STG_BATCH_LAST_MICRO_BATCH;
  stg_step_result result = sized<stg_step_result>();
  stg_error* error = instance.api.train_batch(instance.self, &call, &args, &result, nullptr);
  const Tree outputs{result.outputs};
  return error;
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

class Dropping : public TensorModel {
 public:
  explicit Dropping(const nlohmann::json&) : w_(register_parameter("w", at::ones({3, 6}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    return at::linear(at::dropout(batch["x"].tensor(), 0.5, true), w_).sub(batch["y"].tensor()).pow(2).mean();
  }

 private:
  at::Tensor w_;
};

}  // namespace

TEST_CASE("A step on an accelerator is queued without waiting for a device, without new memory, and reads nothing") {
  begin_emulation();
  const auto instance = on_emulated("data_parallel", "[0, 1, 0]", sgd);
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

TEST_CASE("Gradients are reduced while the rest of backward runs, each bucket once for all devices") {
  begin_emulation();
  const auto instance = on_emulated("data_parallel", "[0, 1]", sgd + small_buckets);
  instance->setup(model_of<Watched>().get());
  emulated::take_transport_log();
  Watched::num_at_input = 0;
  instance->train(net_batch(8, 0), 0.05);
  CHECK(Watched::num_at_input >= 2);  // of five, on two devices each
  CHECK(reports() == "");
}

TEST_CASE("The weights of shares are the factors of the reduction") {
  begin_emulation();
  const auto instance = on_emulated("data_parallel", "[0, 1]", sgd);
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
  begin_emulation();
  const auto plain = on_emulated("data_parallel", "[0, 1]", sgd);
  const auto compressed = on_emulated("data_parallel", "[0, 1]", sgd + R"(, "options": {"compress": "bf16"})");
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
  begin_emulation();
  const auto announced = on_emulated("data_parallel", "[0, 1, 0]", sgd);
  const auto plain = on_emulated("data_parallel", "[0, 1, 0]", sgd);
  for (Instance* instance : {announced.get(), plain.get()}) instance->setup(model_of<Net>().get());
  const Clipped clipped;
  for (int64_t step = 0; step < 3; ++step) {
    stg_transfer_args transfer = sized<stg_transfer_args>();
    Tree batch = net_batch(7, step);
    transfer.batch = batch.argument();
    transfer.device = {STG_DEVICE_NONE, -1};
    uint64_t ticket = 0;
    const uint64_t before = emulated::counters().operations;
    check(announced->api.announce_batch(announced->self, nullptr, &transfer, STG_STAGE_FIT, &ticket));
    for (int wait = 0; wait < 1000 && emulated::counters().operations < before + 6; ++wait) {
      const timespec pause{0, 1'000'000};
      nanosleep(&pause, nullptr);
    }
    CHECK(emulated::counters().operations >= before + 6);  // two tensors for each of three replicas
    stg_step_args args = sized<stg_step_args>();
    args.announced = ticket;
    args.update = &clipped.update;
    args.flags = STG_BATCH_LAST_MICRO_BATCH;
    stg_step_result result = sized<stg_step_result>();
    check(announced->api.train_batch(announced->self, nullptr, &args, &result, nullptr));
    const Tree outputs{result.outputs};
    plain->train(net_batch(7, step), 0.05, STG_CLIP_NORM, 0.5);
  }
  CHECK(model_bytes(announced->export_state()) == model_bytes(plain->export_state()));
  CHECK(reports() == "");
}

TEST_CASE("A device that fails ends the step with an error that names it, and the strategy can be made anew") {
  begin_emulation();
  {
    const auto instance = on_emulated("data_parallel", "[0, 1]", sgd);
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
  const auto again = on_emulated("data_parallel", "[0, 1]", sgd);
  again->setup(model_of<Net>().get());
  again->train(net_batch(8, 0), 0.05);
  again->export_state();
}

TEST_CASE("A rank that never arrives ends a wait at its deadline, and no thread of ours hangs") {
  begin_emulation();
  {
    const auto instance = on_emulated("data_parallel", "[0, 1]", sgd);
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
  const auto again = on_emulated("data_parallel", "[0, 1]", sgd);
  again->setup(model_of<Net>().get());
  check(train_until(*again, in_ms(20000)));
}

TEST_CASE("Each call of the transport may fail: the step is an error, and the strategy can be made anew") {
  for (uint64_t call = 1; call <= 4; ++call) {  // begin, two ranks, end
    begin_emulation();
    {
      const auto instance = on_emulated("data_parallel", "[0, 1]", sgd);
      instance->setup(model_of<Net>().get());
      emulated::fail_transport_call(call, "a cable was pulled");
      const Error error = error_of([&] { instance->train(net_batch(8, 0), 0.05); });
      CHECK_THAT(error.message, Catch::Contains("a cable was pulled"));
      CHECK(instance->status().state == STG_STATE_DRAINING);
    }
    emulated::drain();
  }
}

TEST_CASE(
    "On an accelerator dropout draws the same numbers at each run of a seed, others on each replica, and goes on after a state") {
  const std::string seeded = sgd + R"(, "seed": 11)";
  std::string bytes;
  for (int run = 0; run < 3; ++run) {
    begin_emulation();
    emulated::set_delays(static_cast<uint64_t>(run), std::chrono::microseconds(100));
    const auto instance = on_emulated("data_parallel", "[0, 0, 1]", seeded);
    instance->setup(model_of<Dropping>().get());
    for (int64_t step = 0; step < 2; ++step) instance->train(net_batch(9, step), 0.05);
    if (run == 2) {
      const auto next = on_emulated("data_parallel", "[0, 0, 1]", seeded);
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
    begin_emulation();
    const std::string more = concat(sgd, R"(, "precision": ")", precision, "\"");
    const auto mine = on_emulated("data_parallel", "[0, 1]", more);
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

TEST_CASE("A list of devices that aren't there is refused, and those that are are named") {
  begin_emulation();
  const Error error = error_of([] { on_emulated("data_parallel", "[0, 9]", sgd); });
  CHECK(error.code == STG_NOT_FOUND);
  CHECK_THAT(error.message, Catch::Contains("/devices/1 is 9") && Catch::Contains("0 (") && Catch::Contains("3 ("));
  CHECK(error_of([] { on_emulated("data_parallel", "5", sgd); }).code == STG_NOT_FOUND);
}

TEST_CASE("On an accelerator setup may follow teardown, and the calling thread may do it all") {
  begin_emulation();
  const auto instance = on_emulated("data_parallel", "[0, 1, 1]", sgd);
  std::string bytes;
  for (int round = 0; round < 2; ++round) {
    instance->setup(model_of<Net>().get());
    instance->train(net_batch(8, 0), 0.05);
    const std::string now = model_bytes(instance->export_state());
    if (round == 1) CHECK(now == bytes);
    bytes = now;
    instance->teardown();
  }
  const auto alone = on_emulated("data_parallel", "[0, 1, 1]", sgd, STG_CREATE_CALLER_THREAD_ONLY);
  alone->setup(model_of<Net>().get());
  alone->train(net_batch(8, 0), 0.05);
  CHECK(model_bytes(alone->export_state()) == bytes);
  CHECK(reports() == "");
}
