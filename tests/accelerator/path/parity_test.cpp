// SPDX-License-Identifier: Apache-2.0
//
// What the accelerator path computes is what the CPU path does, on any list of devices, and its streams are in order.
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/view_as_real.h>

#include <map>

#include "accelerator/path/rig.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::string sgd = R"(, "optimizer": {"name": "sgd", "momentum": 0.9})";

struct DeviceList {
  const char* text;
  size_t count;
};
const std::vector<DeviceList> lists{{"[0]", 1},    {"[0, 1]", 2},    {"[2, 0, 1]", 3},   {"[0, 1, 2, 3]", 4},
                                    {"[0, 0]", 2}, {"[1, 0, 1]", 3}, {"[3, 3, 1, 1]", 4}};

// Uneven, and some smaller than the number of devices; or, since a batch norm has no variance of one row, at least 2 rows for each of 4.
const std::vector<int64_t> uneven{8, 7, 2, 9, 1, 5}, large{8, 11, 9, 12, 10, 13};

// A complex matrix, and an odd number of reals before it in its bucket.
class ComplexNet : public TensorModel {
 public:
  explicit ComplexNet(const nlohmann::json&)
      : w_(register_parameter("w", at::randn({3, 6}, at::kComplexFloat))), b_(register_parameter("b", at::randn({3}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor parts = at::view_as_real(w_), x = batch["x"].tensor();
    const at::Tensor real = at::linear(x, parts.select(-1, 0)), imaginary = at::linear(x, parts.select(-1, 1));
    return real.pow(2).add(imaginary.pow(3)).add(b_).sub(batch["y"].tensor()).pow(2).mean();
  }

 private:
  at::Tensor w_, b_;
};

std::vector<double> train(Instance& instance, const stg_model* model, uint64_t clip = STG_CLIP_NONE, double limit = 0,
                          const std::vector<int64_t>& sizes = uneven) {
  instance.setup(model);
  std::vector<double> losses;
  for (int64_t step = 0; step < 6; ++step) {
    const int64_t rows = sizes[static_cast<size_t>(step)];
    if (step == 3) losses.push_back(loss_of(instance, instance.accumulate(net_batch(rows + 3, 100))));
    losses.push_back(loss_of(instance, instance.train(net_batch(rows, step), 0.05, clip, limit)));
  }
  return losses;
}

void compare(const DeviceList& devices, const std::string& more, const char* options = "{}", uint64_t clip = STG_CLIP_NONE,
             double limit = 0, double tolerance = tolerances().float32, const std::vector<int64_t>& sizes = uneven) {
  begin_test();
  INFO(devices.text << more << options);
  const auto mine = on_accelerator("data_parallel", devices.text, more);
  const auto reference = on_cpu("data_parallel", devices.count, more);
  const std::vector<double> losses = train(*mine, model_of<Net>(options).get(), clip, limit, sizes);
  const std::vector<double> expected = train(*reference, model_of<Net>(options).get(), clip, limit, sizes);
  REQUIRE(losses.size() == expected.size());
  for (size_t i = 0; i < losses.size(); ++i) CHECK(losses[i] == Approx(expected[i]).epsilon(tolerance));
  const Tree state = mine->export_state();
  CHECK(distance(state, reference->export_state()) < tolerance);
  CHECK(reports() == "");
}

}  // namespace

TEST_CASE("On an accelerator training gives what it gives on the CPU, on any list of devices") {
  for (const DeviceList& devices : lists) compare(devices, sgd);
}

TEST_CASE("On an accelerator every optimizer gives what it gives on the CPU, and its state") {
  for (const char* optimizer :
       {R"({"name": "sgd"})", R"({"name": "sgd", "momentum": 0.9, "nesterov": true, "weight_decay": 0.01})",
        R"({"name": "adam", "amsgrad": true})", R"({"name": "adamw"})",
        R"({"name": "rmsprop", "momentum": 0.5, "centered": true})",
        R"({"name": "adagrad", "initial_accumulator_value": 0.1})"}) {
    compare({"[0, 1, 1]", 3}, concat(R"(, "optimizer": )", optimizer));
  }
}

TEST_CASE("On an accelerator clipping gives what it gives on the CPU") {
  compare({"[0, 1]", 2}, sgd, "{}", STG_CLIP_NORM, 0.3);
  compare({"[0]", 1}, sgd, "{}", STG_CLIP_NORM, 0.3);
  compare({"[0, 1]", 2}, sgd, "{}", STG_CLIP_VALUE, 0.05);
}

TEST_CASE("On an accelerator buffers are the root's, and a parameter without a gradient stays as it is") {
  for (const DeviceList& devices : lists)
    compare(devices, sgd, R"({"norm": true, "unused": true})", STG_CLIP_NONE, 0, tolerances().float32, large);
}

TEST_CASE("On an accelerator complex gradients are reduced as pairs of reals") {
  for (const DeviceList& devices : lists) {
    begin_test();
    INFO(devices.text);
    const std::string more = R"(, "precision": "32-true")";
    const auto mine = on_accelerator("data_parallel", devices.text, more);
    const auto reference = on_cpu("data_parallel", devices.count, more);
    std::vector<std::map<std::string, at::Tensor>> gradients(2);
    for (const size_t which : {0, 1}) {
      Instance& instance = which == 0 ? *mine : *reference;
      instance.setup(model_of<ComplexNet>().get());
      instance.accumulate(net_batch(5, 0));
      instance.accumulate(net_batch(8, 1));
      const Tree tree = on_host(instance, instance.gradients());
      for (const char* name : {"w", "b"}) gradients[which][name] = view_tensor(*find(tree.root(), name)->as.tensor).clone();
    }
    for (const auto& [name, gradient] : gradients[0]) {
      const at::Tensor& expected = gradients[1][name];
      CHECK(gradient.scalar_type() == (name == "w" ? at::kComplexFloat : at::kFloat));
      CHECK(gradient.sub(expected).abs().max().item<float>() < tolerances().float32 * expected.abs().max().item<float>());
    }
    CHECK(reports() == "");
  }
}

TEST_CASE("On an accelerator 64-true is as near to the CPU as double can be") {
  compare({"[0, 1, 0]", 3}, sgd + R"(, "precision": "64-true")", "{}", STG_CLIP_NORM, 0.3, tolerances().float64);
}

TEST_CASE("On an accelerator small buckets give the same as large ones") {
  compare({"[0, 1, 2]", 3}, sgd + R"(, "options": {"bucket_mib": 0, "first_bucket_mib": 0})");
}

TEST_CASE("On an accelerator a sharded optimizer gives what one on the CPU does") {
  const std::string sharded = R"(, "options": {"optimizer_sharding": true, "bucket_mib": 0.0001, "first_bucket_mib": 0.0001})";
  for (const DeviceList& devices : lists)
    compare(devices, R"(, "optimizer": {"name": "adam"})" + sharded, "{}", STG_CLIP_NORM, 0.3);
}

TEST_CASE("single_device on an accelerator is data_parallel on one device, to the bit") {
  begin_test();
  const auto single = on_accelerator("single_device", "[1]", sgd);
  const auto parallel = on_accelerator("data_parallel", "[1]", sgd);
  train(*single, model_of<Net>().get());
  train(*parallel, model_of<Net>().get());
  CHECK(model_bytes(single->export_state()) == model_bytes(parallel->export_state()));
  CHECK(reports() == "");
}

TEST_CASE("On an accelerator evaluation and prediction are gathered on the root, in the order of the batch") {
  begin_test();
  const auto mine = on_accelerator("data_parallel", "[1, 0, 1]", sgd);
  const auto reference = on_cpu("data_parallel", 3, sgd);
  for (Instance* instance : {mine.get(), reference.get()}) instance->setup(model_of<Net>(R"({"norm": true})").get());
  StepOutcome predicted = mine->predict(net_batch(8, 3));
  const stg_device root = predicted.outputs.root().as.tensor->view.device;
  CHECK(root.kind == accelerator_device(1).kind);
  CHECK(root.index == accelerator_device(1).index);
  const std::vector<double> rows = numbers(on_host(*mine, std::move(predicted.outputs)).root());
  const std::vector<double> expected = numbers(reference->predict(net_batch(8, 3)).outputs.root());
  REQUIRE(rows.size() == expected.size());
  for (size_t i = 0; i < rows.size(); ++i) CHECK(rows[i] == Approx(expected[i]).epsilon(tolerances().float32));
  CHECK(reports() == "");
}

TEST_CASE("A state goes from the CPU to an accelerator and back, and training goes on with it") {
  begin_test();
  const auto cpu = on_cpu("data_parallel", 2, sgd);
  const auto device = on_accelerator("data_parallel", "[0, 1]", sgd);
  const auto back = on_cpu("data_parallel", 2, sgd);
  const auto straight = on_cpu("data_parallel", 2, sgd);
  const ModelPtr model = model_of<Net>();
  train(*cpu, model.get());
  train(*straight, model.get());
  device->setup(model.get(), STG_STAGE_FIT, cpu->export_state());
  CHECK(model_bytes(device->export_state()) == model_bytes(cpu->export_state()));
  CHECK(optimizer_bytes(device->export_state()) == optimizer_bytes(cpu->export_state()));
  device->train(net_batch(6, 50), 0.05);
  straight->train(net_batch(6, 50), 0.05);
  back->setup(model.get(), STG_STAGE_FIT, device->export_state());
  back->train(net_batch(6, 51), 0.05);
  straight->train(net_batch(6, 51), 0.05);
  CHECK(distance(back->export_state(), straight->export_state()) < tolerances().float32);
  CHECK(reports() == "");
}
