// SPDX-License-Identifier: Apache-2.0
//
// Training on emulated devices: parameters that were moved, several devices, hooks that overlap with backward.
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <thread>

#include "accelerator/emulated_support.hpp"

namespace {

struct Model {
  std::vector<at::Tensor> parameters;

  explicit Model(uint64_t seed) {
    const auto random = [generator = at::detail::createCPUGenerator(seed)](at::IntArrayRef sizes) {
      return (at::randn(sizes, generator) * 0.3).set_requires_grad(true);
    };
    parameters = {random({4, 1, 3, 3}), random({4}), random({4}), random({4}), random({3, 36}), random({3})};
  }

  at::Tensor loss(const at::Tensor& x, const at::Tensor& y) const {
    const auto& p = parameters;
    at::Tensor hidden = at::conv2d(x, p[0], p[1], 1, 1);
    hidden = at::relu(at::batch_norm(hidden, p[2], p[3], {}, {}, true, 0.1, 1e-5, false));
    return at::cross_entropy_loss(at::linear(at::max_pool2d(hidden, 2).flatten(1), p[4], p[5]), y);
  }

  // The same tensors, with other memory: what a strategy does with parameters that it was given.
  void move_to(const at::Device& where) const {
    for (const at::Tensor& parameter : parameters)
      parameter.unsafeGetTensorImpl()->shallow_copy_from(parameter.detach().to(where).getIntrusivePtr());
  }

  void step() const {
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters) {
      parameter.sub_(parameter.grad(), 0.1);
      parameter.mutable_grad() = at::Tensor();
    }
  }
};

std::pair<at::Tensor, at::Tensor> batch(int64_t seed) {
  return {at::randn({6, 1, 6, 6}, at::detail::createCPUGenerator(static_cast<uint64_t>(seed))), at::arange(6) % 3};
}

void train(const Model& model, const at::Device& where) {
  for (int i = 0; i < 3; ++i) {
    const auto [x, y] = batch(i);
    model.loss(x.to(where), y.to(where)).backward();
    model.step();
  }
}

void require_close(const Model& found, const Model& expected) {
  for (size_t i = 0; i < expected.parameters.size(); ++i)
    REQUIRE(at::allclose(on_host(found.parameters[i].detach()), expected.parameters[i].detach(), 1e-4, 1e-5));
}

class Hook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit Hook(std::function<void(const at::Tensor&)> body) : body_(std::move(body)) {}
  void operator()(const torch::autograd::Variable& tensor) override { body_(tensor); }

 private:
  std::function<void(const at::Tensor&)> body_;
};

}  // namespace

TEST_CASE("emulated autograd: Parameters that were moved train as on the CPU") {
  const Fresh fresh;
  emulated::set_delays(1, std::chrono::microseconds(200));
  const Model expected(5);
  train(expected, at::kCPU);
  const Model model(5);
  model.move_to(device(0));
  REQUIRE(model.parameters[0].device() == device(0));
  REQUIRE(model.parameters[0].requires_grad());
  REQUIRE(model.parameters[0].is_leaf());
  train(model, device(0));
  require_close(model, expected);
  model.move_to(at::kCPU);
  const auto [x, y] = batch(9);
  REQUIRE(model.loss(x, y).item<float>() == Approx(expected.loss(x, y).item<float>()));
  REQUIRE(reports() == "");
}

TEST_CASE("emulated autograd: Two devices train at once, each on a stream and a thread of its own") {
  const Fresh fresh;
  emulated::set_delays(2, std::chrono::microseconds(200));
  const Model expected(5);
  train(expected, at::kCPU);
  const std::vector<Model> models{Model(5), Model(5)};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i)
    threads.emplace_back([&, i] {
      const c10::Stream stream = new_stream(i);
      const c10::StreamGuard guard(stream);
      models[i].move_to(device(i));
      train(models[i], device(i));
      stream.synchronize();
    });
  for (std::thread& thread : threads) thread.join();
  REQUIRE(reports() == "");
  emulated::share_host_clock(true);
  synchronize(0);
  synchronize(1);
  for (const Model& model : models) require_close(model, expected);
  emulated::share_host_clock(false);
  REQUIRE(reports() == "");
}

TEST_CASE("emulated autograd: Backward runs on the stream of forward, and a missing wait before the optimizer is reported") {
  const Fresh fresh;
  const bool waits = GENERATE(true, false);
  const Model model(5);
  model.move_to(device(0));
  synchronize(0);
  const c10::Stream side = new_stream(0);
  {
    const c10::StreamGuard guard(side);
    const auto [x, y] = batch(1);
    model.loss(x.to(device(0)), y.to(device(0))).backward();
  }
  REQUIRE(reports() == "");
  if (waits) order(side, default_stream(0));
  for (const at::Tensor& parameter : model.parameters)
    parameter.grad().record_stream(default_stream(0));  // where `step` lets them go
  model.step();
  REQUIRE((reports() == "") == waits);
  synchronize(0);
}

TEST_CASE("emulated autograd: Hooks fire while the device is still at work") {
  const Fresh fresh;
  const Model model(5);
  model.move_to(device(0));
  int num_while_busy = 0;
  for (const at::Tensor& parameter : model.parameters)
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Hook>([&](const at::Tensor&) {
                                                     if (!emulated::is_idle(default_stream(0))) ++num_while_busy;
                                                   }));
  const auto [x, y] = batch(1);
  const at::Tensor there = x.to(device(0));
  const at::Tensor labels = y.to(device(0));
  const emulated::Gate gate(default_stream(0));
  const emulated::Counters before = emulated::counters();
  model.loss(there, labels).backward();
  REQUIRE(num_while_busy == 6);
  REQUIRE(emulated::counters().synchronisations == before.synchronisations);
  REQUIRE(reports() == "");
}

TEST_CASE("emulated autograd: A step that was made before needs no new memory, no wait and no read") {
  const Fresh fresh;
  const Model model(5);
  model.move_to(device(0));
  const auto [x, y] = batch(1);
  const at::Tensor there = x.to(device(0));
  const at::Tensor labels = y.to(device(0));
  emulated::Counters before;
  for (int i = 0; i < 4; ++i) {
    if (i == 2) before = emulated::counters();
    model.loss(there, labels).backward();
    model.step();
  }
  const emulated::Counters after = emulated::counters();
  REQUIRE(after.new_blocks == before.new_blocks);
  REQUIRE(after.synchronisations == before.synchronisations);
  REQUIRE(after.host_reads == before.host_reads);
}
