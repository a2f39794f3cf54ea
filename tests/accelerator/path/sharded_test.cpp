// SPDX-License-Identifier: Apache-2.0
//
// An optimizer that is sharded over devices: the same training as of one that isn't, with a part of its state on each device.
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <set>

#include "accelerator/path/emulated_rig.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::string sharded = R"(, "options": {"optimizer_sharding": true, "first_bucket_mib": 0.001, "bucket_mib": 0.004})";
const std::string whole = R"(, "options": {"first_bucket_mib": 0.001, "bucket_mib": 0.004})";
const std::string sgd = R"(, "optimizer": {"name": "sgd", "momentum": 0.9})";
const std::string adam = R"(, "optimizer": {"name": "adam"})";

// As Net, but wide: parts of its parameters are on several devices. `unused` has no gradient.
class Wide : public TensorModel {
 public:
  explicit Wide(const nlohmann::json&)
      : w1_(register_parameter("w1", at::randn({150, 6}))),
        b1_(register_parameter("b1", at::zeros({150}))),
        unused_(register_parameter("unused", at::randn({33}))),
        w2_(register_parameter("w2", at::randn({3, 150}))),
        b2_(register_parameter("b2", at::zeros({3}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor hidden = at::gelu(at::linear(batch["x"].tensor(), w1_, b1_));
    return at::mse_loss(at::linear(hidden, w2_, b2_), batch["y"].tensor());
  }

 private:
  at::Tensor w1_, b1_, unused_, w2_;

 protected:
  at::Tensor b2_;
};

// s (n) is added to the gradient of b2 alone, which is in one device's part.
class Spiked : public Wide {
 public:
  using Wide::Wide;
  StepOutput training_step(const Batch& batch, const StepContext& context) override {
    const at::Tensor loss = std::get<at::Tensor>(Wide::training_step(batch, context).outputs.data);
    return loss.add(b2_.sum().mul(batch["s"].tensor().mean()));
  }
};

Tree spiked_batch(int64_t num_rows, int64_t index, double spike) {
  const Tree plain = net_batch(num_rows, index);
  Dict dict;
  for (const char* key : {"x", "y"}) dict.emplace_back(key, copy_tensor(find(plain.root(), key)->as.tensor->view));
  dict.emplace_back("s", to_dlpack(at::full({num_rows}, spike, at::kFloat)));
  return make_tree(std::move(dict));
}

struct Clip {
  uint64_t kind = STG_CLIP_NONE;
  double limit = 0;
};

// Windows of one and of two micro-batches, and batches of fewer rows than devices.
std::vector<double> train(Instance& instance, const Clip& clip = {}, double lr = 0.01) {
  std::vector<double> norms;
  const std::vector<int64_t> sizes{8, 7, 2, 9, 1, 5};
  for (size_t step = 0; step < sizes.size(); ++step) {
    const auto index = static_cast<int64_t>(step);
    if (step == 3) instance.accumulate(net_batch(sizes[step] + 3, 100));
    norms.push_back(instance.train(net_batch(sizes[step], index), lr, clip.kind, clip.limit).update.gradient_norm);
  }
  return norms;
}

std::unique_ptr<Instance> begin(const std::string& devices, const std::string& more, Tree state = {}) {
  auto instance = on_accelerator("data_parallel", devices, more);
  instance->setup(model_of<Wide>().get(), STG_STAGE_FIT, std::move(state));
  return instance;
}

void check_same_bits(Instance& mine, Instance& other) {
  const Tree its = mine.export_state(), expected = other.export_state();
  const bool has_same_model = model_bytes(its) == model_bytes(expected);
  const bool has_same_state = optimizer_bytes(its) == optimizer_bytes(expected);
  CAPTURE(distance(its, expected), distance(its, expected, "optimizer"));
  CHECK((has_same_model && has_same_state));
}

size_t count_calls(const std::vector<std::string>& log, const std::string& name) {
  return static_cast<size_t>(std::count_if(log.begin(), log.end(), [&](const auto& line) { return line.starts_with(name); }));
}

const char* const optimizers[] = {R"({"name": "sgd"})",
                                  R"({"name": "sgd", "momentum": 0.9, "nesterov": true, "weight_decay": 0.01})",
                                  R"({"name": "adam", "amsgrad": true})",
                                  R"({"name": "adamw"})",
                                  R"({"name": "rmsprop", "momentum": 0.5, "centered": true})",
                                  R"({"name": "adagrad", "initial_accumulator_value": 0.1})"};

}  // namespace

TEST_CASE("A sharded optimizer gives the bits of one that isn't, whichever it is, and its state") {
  for (const char* optimizer : optimizers) {
    begin_test();
    INFO(optimizer);
    const std::string config = concat(R"(, "optimizer": )", optimizer);
    const auto mine = begin("[0, 1, 2]", config + sharded);
    const auto other = begin("[0, 1, 2]", config + whole);
    for (Instance* instance : {mine.get(), other.get()}) train(*instance);
    check_same_bits(*mine, *other);
    CHECK(reports() == "");
  }
}

TEST_CASE("A sharded optimizer gives the bits of one that isn't on any list of devices, by value clipped or not") {
  for (const char* devices : {"[0]", "[1, 1]", "[0, 1]", "[1, 0, 1]", "[3, 3, 1, 1]", "[3, 1, 0, 2]"}) {
    for (const Clip& clip : {Clip{}, Clip{STG_CLIP_VALUE, 0.05}}) {
      begin_test();
      INFO(devices);
      const auto mine = begin(devices, adam + sharded);
      const auto other = begin(devices, adam + whole);
      for (Instance* instance : {mine.get(), other.get()}) train(*instance, clip);
      check_same_bits(*mine, *other);
      CHECK(reports() == "");
    }
  }
}

TEST_CASE("A sharded optimizer clips by the norm over all devices") {
  for (const char* devices : {"[0, 1]", "[2, 0, 2, 1]"}) {
    begin_test();
    const auto mine = begin(devices, sgd + sharded);
    const auto other = begin(devices, sgd + whole);
    const std::vector<double> norms = train(*mine, {STG_CLIP_NORM, 0.3});
    const std::vector<double> expected = train(*other, {STG_CLIP_NORM, 0.3});
    for (size_t i = 0; i < norms.size(); ++i) CHECK(norms[i] == Approx(expected[i]).epsilon(1e-5));
    CHECK(distance(mine->export_state(), other->export_state()) < 2e-5);
    CHECK(distance(mine->export_state(), other->export_state(), "optimizer") < 2e-5);
    CHECK(reports() == "");
  }
}

TEST_CASE("A sharded optimizer in float64, and of compressed gradients, is the one that isn't, too") {
  for (const char* more : {R"(, "precision": "64-true")", ""}) {
    begin_test();
    const std::string options = R"(, "options": {"compress": "bf16", "optimizer_sharding": )";
    const auto mine = begin("[0, 1, 2]", adam + more + options + "true}");
    const auto other = begin("[0, 1, 2]", adam + more + options + "false}");
    for (Instance* instance : {mine.get(), other.get()}) train(*instance);
    check_same_bits(*mine, *other);
    CHECK(reports() == "");
  }
}

TEST_CASE("A sharded optimizer has a part of the state on each device") {
  begin_test();
  const auto used_by = [](const std::string& more) {
    const auto before = std::vector<uint64_t>{emulated::used_bytes(0), emulated::used_bytes(1), emulated::used_bytes(2)};
    const auto instance = begin("[0, 1, 2]", more);
    emulated::drain();
    std::vector<uint64_t> used;
    for (int i = 0; i < 3; ++i) used.push_back(emulated::used_bytes(i) - before[static_cast<size_t>(i)]);
    return used;
  };
  const std::string one_bucket = R"(, "options": {"optimizer_sharding": )";
  const std::vector<uint64_t> mine = used_by(adam + one_bucket + "true}");
  const std::vector<uint64_t> other = used_by(adam + one_bucket + "false}");
  constexpr uint64_t state_bytes = (150 * 6 + 150 + 33 + 3 * 150 + 3) * 2 * 4;
  for (size_t i = 0; i < 3; ++i) {
    CAPTURE(i, mine[i], other[i]);
    CHECK(mine[i] + state_bytes / 2 < other[i]);  // two thirds less, but for what buckets are rounded up by
  }
}

TEST_CASE("An overflow in one device's part skips a sharded update on all") {
  for (const char* optimizer : {"adam", "rmsprop"}) {
    begin_test();
    const std::string config = concat(R"(, "precision": "16-mixed", "optimizer": {"name": ")", optimizer, "\"}");
    const auto mine = on_accelerator("data_parallel", "[0, 1, 2]", config + sharded);
    const auto other = on_accelerator("data_parallel", "[0, 1, 2]", config + whole);
    const auto run = [](Instance& instance) {
      for (int64_t step = 0; step < 20; ++step) instance.train(spiked_batch(9, step, 0), 0.01);
    };
    for (Instance* instance : {mine.get(), other.get()}) {
      instance->setup(model_of<Spiked>().get());
      run(*instance);  // the first updates overflow anyway
    }
    CHECK(mine->status().num_updates > 3);
    check_same_bits(*mine, *other);
    const Tree before = mine->export_state();
    for (Instance* instance : {mine.get(), other.get()}) {
      CHECK(instance->train(spiked_batch(9, 20, 1e37), 0.01).update.outcome == STG_UPDATE_SKIPPED_OVERFLOW);
    }
    CHECK(distance(mine->export_state(), before) == 0);
    CHECK(distance(mine->export_state(), before, "optimizer") == 0);
    for (Instance* instance : {mine.get(), other.get()}) run(*instance);
    check_same_bits(*mine, *other);
    CHECK(reports() == "");
  }
}

TEST_CASE("The state of a sharded optimizer goes to any list of devices, to the CPU, and back") {
  begin_test();
  const auto straight = on_cpu("data_parallel", 3, adam);
  straight->setup(model_of<Wide>().get());
  train(*straight);
  Tree state = straight->export_state();
  for (const char* devices : {"[0, 1, 2]", "[0, 0]", "[3, 0, 1, 2]", "[1, 0]"}) {
    INFO(devices);
    const auto mine = begin(devices, adam + sharded, std::move(state));
    CHECK(model_bytes(mine->export_state()) == model_bytes(straight->export_state()));
    CHECK(optimizer_bytes(mine->export_state()) == optimizer_bytes(straight->export_state()));
    state = mine->export_state();
  }
  const auto there = begin("[2, 0, 1]", adam + sharded, std::move(state));
  for (Instance* instance : {there.get(), straight.get()}) train(*instance);
  const auto back = on_cpu("data_parallel", 3, adam);
  back->setup(model_of<Wide>().get(), STG_STAGE_FIT, there->export_state());
  for (Instance* instance : {back.get(), straight.get()}) train(*instance);
  CHECK(distance(back->export_state(), straight->export_state()) < 1e-4);
  CHECK(distance(back->export_state(), straight->export_state(), "optimizer") < 1e-4);
  CHECK(reports() == "");
}

TEST_CASE("A state without an optimizer's begins a sharded one anew") {
  begin_test();
  const std::string adagrad = R"(, "optimizer": {"name": "adagrad", "initial_accumulator_value": 0.5})";
  const auto fresh = begin("[0, 1]", adagrad + sharded);
  const auto used = begin("[0, 1]", adagrad + sharded);
  const Tree initial = fresh->export_state();
  train(*used);
  used->import_state(fresh->export_state());
  for (Instance* instance : {fresh.get(), used.get()}) train(*instance);
  check_same_bits(*used, *fresh);
}

TEST_CASE("A sharded optimizer shows whole gradients to a host that asks for them, and updates with them") {
  begin_test();
  const auto mine = begin("[0, 1, 0]", sgd + sharded);
  const auto other = begin("[0, 1, 0]", sgd + whole);
  for (int64_t step = 0; step < 3; ++step) {
    std::vector<std::string> gradients;
    for (Instance* instance : {mine.get(), other.get()}) {
      instance->training_step(net_batch(7, step));
      instance->backward(step == 1);
      for (int look = 0; look < 2; ++look) {
        gradients.emplace_back();
        for (const double number : numbers(*find(on_host(*instance, instance->gradients()).root(), "w1"))) {
          gradients.back() += concat(number, " ");
        }
      }
      instance->optimizer_step(0.05, STG_CLIP_VALUE, 0.1);
    }
    CHECK(std::set<std::string>(gradients.begin(), gradients.end()).size() == 1);
  }
  check_same_bits(*mine, *other);
  CHECK(reports() == "");
}

TEST_CASE("Each bucket of a sharded optimizer is scattered once and gathered once, in the same order on all devices") {
  begin_test();
  const auto mine = begin("[0, 1, 2]", sgd + sharded);
  emulated::take_transport_log();
  mine->train(net_batch(9, 0), 0.05, STG_CLIP_NORM, 0.1);
  std::vector<std::string> scattered, gathered;
  const std::vector<std::string> log = emulated::take_transport_log();
  for (const std::string& line : log) {
    const std::string numel = line.substr(0, line.find(" dtype"));
    if (numel.starts_with("reduce_scatter rank 0")) scattered.push_back(numel.substr(numel.find("numel")));
    if (numel.starts_with("all_gather rank 0")) gathered.push_back(numel.substr(numel.find("numel")));
  }
  CHECK(scattered.size() >= 2);
  CHECK(gathered.size() == scattered.size());
  CHECK(count_calls(log, "reduce_scatter") == 3 * scattered.size());
  CHECK(count_calls(log, "all_gather") == 3 * scattered.size());
  CHECK(count_calls(log, "all_reduce") == 3);  // of the norm
  CHECK(reports() == "");
}

TEST_CASE("A sharded step is queued without waiting for a device, and reads nothing") {
  begin_test();
  const auto instance = begin("[0, 1, 0]", adam + sharded);
  for (int64_t step = 0; step < 3; ++step) instance->train(net_batch(9, step), 0.05);
  emulated::drain();
  const emulated::Counters before = emulated::counters();
  for (int64_t step = 0; step < 3; ++step) instance->train(net_batch(9, step), 0.05, STG_CLIP_VALUE, 0.1);
  const emulated::Counters after = emulated::counters();
  CHECK(after.synchronisations == before.synchronisations);
  CHECK(after.host_reads == before.host_reads);
  CHECK(reports() == "");
}

TEST_CASE("Each call of the transport of a sharded step may fail: it is an error, and the strategy can be made anew") {
  uint64_t num_calls = 0;
  {
    begin_test();
    const auto instance = begin("[0, 1]", sgd + sharded);
    emulated::take_transport_log();
    instance->train(net_batch(8, 0), 0.05, STG_CLIP_NORM, 0.1);
    num_calls = emulated::take_transport_log().size();
  }
  CHECK(num_calls >= 20);  // two buckets scattered and gathered, and the norm, each begin, two ranks, end
  for (uint64_t call = 1; call <= num_calls; ++call) {
    begin_test();
    {
      const auto instance = begin("[0, 1]", sgd + sharded);
      emulated::fail_transport_call(call, "a cable was pulled");
      const Error error = error_of([&] { instance->train(net_batch(8, 0), 0.05, STG_CLIP_NORM, 0.1); });
      CAPTURE(call, error.message);
      CHECK_THAT(error.message, Catch::Contains("a cable was pulled"));
      CHECK(instance->status().state == STG_STATE_DRAINING);
    }
    emulated::drain();
  }
}

TEST_CASE("A sharded optimizer without an optimizer is refused, and off an accelerator it is the one that isn't") {
  begin_test();
  const Error error = error_of([] { begin("[0, 1]", sharded); });
  CHECK(error.code == STG_INVALID_ARGUMENT);
  CHECK_THAT(error.message, Catch::Contains("/options/optimizer_sharding") && Catch::Contains("no /optimizer"));
  CHECK_THAT(error_of([] { begin("[0, 1]", sgd + R"(, "options": {"optimizer_sharding": 1})"); }).message,
             Catch::Contains("/options/optimizer_sharding is 1; it must be true or false"));
  const auto mine = on_cpu("data_parallel", 2, sgd + sharded);
  const auto other = on_cpu("data_parallel", 2, sgd + whole);
  for (Instance* instance : {mine.get(), other.get()}) {
    instance->setup(model_of<Wide>().get());
    train(*instance);
  }
  check_same_bits(*mine, *other);
}
