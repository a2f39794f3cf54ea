// SPDX-License-Identifier: Apache-2.0
//
// Operators on an emulated device give what they give on the CPU, forward and backward, without a report.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>

#include <functional>

#include "accelerator/emulated_support.hpp"

namespace {

using Tensors = std::vector<at::Tensor>;

struct Case {
  const char* name;
  Tensors inputs;  // floating ones get a gradient
  std::function<at::Tensor(const Tensors&)> body;
};

at::Tensor random(at::IntArrayRef sizes) { return at::randn(sizes, at::detail::createCPUGenerator(11)); }

at::Tensor indices(std::vector<int64_t> values) { return at::tensor(values); }

std::vector<Case> cases() {
  return {
      {"linear", {random({4, 3}), random({5, 3}), random({5})}, [](const Tensors& x) { return at::linear(x[0], x[1], x[2]); }},
      {"linear of 3 dimensions",
       {random({2, 4, 3}), random({5, 3}), random({5})},
       [](const Tensors& x) { return at::linear(x[0], x[1], x[2]); }},
      {"conv2d",
       {random({2, 3, 8, 8}), random({4, 3, 3, 3}), random({4})},
       [](const Tensors& x) { return at::conv2d(x[0], x[1], x[2], 2, 1); }},
      {"conv2d in groups, channels last",
       {random({2, 4, 6, 6}), random({4, 1, 3, 3})},
       [](const Tensors& x) { return at::conv2d(x[0].contiguous(at::MemoryFormat::ChannelsLast), x[1], {}, 1, 1, 1, 4); }},
      {"conv_transpose2d",
       {random({2, 3, 5, 5}), random({3, 2, 3, 3}), random({2})},
       [](const Tensors& x) { return at::conv_transpose2d(x[0], x[1], x[2], 2); }},
      {"batch_norm",
       {random({4, 3, 5, 5}), random({3}), random({3})},
       [](const Tensors& x) { return at::batch_norm(x[0], x[1], x[2], {}, {}, true, 0.1, 1e-5, false); }},
      {"layer_norm",
       {random({4, 6}), random({6}), random({6})},
       [](const Tensors& x) { return at::layer_norm(x[0], {6}, x[1], x[2]); }},
      {"group_norm",
       {random({2, 4, 3}), random({4}), random({4})},
       [](const Tensors& x) { return at::group_norm(x[0], 2, x[1], x[2]); }},
      {"embedding", {random({7, 3}), indices({1, 4, 1, 6})}, [](const Tensors& x) { return at::embedding(x[0], x[1]); }},
      {"gelu", {random({40})}, [](const Tensors& x) { return at::gelu(x[0]); }},
      {"relu, tanh, sigmoid, silu",
       {random({40})},
       [](const Tensors& x) { return at::relu(x[0]) + at::tanh(x[0]) + at::sigmoid(x[0]) + at::silu(x[0]); }},
      {"softmax", {random({4, 6})}, [](const Tensors& x) { return at::softmax(x[0], 1); }},
      {"attention",
       {random({2, 2, 5, 4}), random({2, 2, 5, 4}), random({2, 2, 5, 4})},
       [](const Tensors& x) { return at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, true); }},
      {"cross_entropy",
       {random({4, 5}), indices({0, 3, 4, 1})},
       [](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1]); }},
      {"cross_entropy with weights, smoothed",
       {random({4, 5}), indices({0, 3, 4, 1}), at::rand({5})},
       [](const Tensors& x) { return at::cross_entropy_loss(x[0], x[1], x[2].detach(), 1, -100, 0.1); }},
      {"mse_loss", {random({4, 5}), random({4, 5}) + 1}, [](const Tensors& x) { return at::mse_loss(x[0], x[1]); }},
      {"binary_cross_entropy_with_logits",
       {random({4, 5}), at::rand({4, 5})},
       [](const Tensors& x) { return at::binary_cross_entropy_with_logits(x[0], x[1].detach()); }},
      {"max_pool2d, avg_pool2d",
       {random({2, 3, 8, 8})},
       [](const Tensors& x) {
         return at::max_pool2d(x[0], 2) + at::avg_pool2d(x[0], 2) + at::adaptive_avg_pool2d(x[0], {4, 4});
       }},
      {"cat, stack, split, chunk",
       {random({4, 3}), random({4, 3})},
       [](const Tensors& x) {
         return at::cat({at::stack({x[0], x[1]}).view({8, 3}), x[0].split(2)[1], x[1].chunk(2)[0]});
       }},
      {"where, clamp, abs, sign",
       {random({4, 3}), random({4, 3})},
       [](const Tensors& x) { return at::where(x[0] > 0, x[0].clamp(-1, 1), x[1].abs() * x[1].sign()); }},
      {"sqrt, exp, log, pow, rsqrt",
       {at::rand({9}) + 1},
       [](const Tensors& x) { return x[0].sqrt() + x[0].exp().log() + x[0].pow(3) + x[0].rsqrt() + x[0].reciprocal(); }},
      {"norm, sum, mean, var, std",
       {random({4, 6})},
       [](const Tensors& x) { return x[0].norm() + x[0].sum(1) + x[0].mean(1) + x[0].var(1) + x[0].std(1); }},
      {"max, min, argmax, topk, sort",
       {random({4, 6})},
       [](const Tensors& x) {
         return std::get<0>(x[0].max(1)) + std::get<0>(x[0].min(1)) + x[0].argmax(1) + std::get<0>(x[0].topk(2, 1)).sum(1) +
                std::get<0>(x[0].sort(1)).narrow(1, 0, 2).sum(1) + x[0].amax(1);
       }},
      {"gather, scatter, index_add, index_select, index",
       {random({4, 6}), indices({2, 0, 3})},
       [](const Tensors& x) {
         const at::Tensor rows = x[0].index_select(0, x[1]);
         const at::Tensor added = at::zeros({4, 6}, x[0].options()).index_add(0, x[1], rows);
         const at::Tensor spread = at::zeros({4, 6}, x[0].options()).scatter(0, x[1].view({3, 1}), rows.narrow(1, 0, 1));
         return added + spread + x[0].gather(0, at::zeros({4, 6}, x[1].options())) + x[0].index({x[1]}).sum();
       }},
      {"index_put",
       {random({4, 6}), indices({2, 0})},
       [](const Tensors& x) {
         return x[0].clone().index_put_({x[1]}, at::ones({2, 6}, x[0].options()));
       }},
      {"matmul, bmm, addmm, einsum",
       {random({2, 3, 4}), random({2, 4, 3}), random({3, 3})},
       [](const Tensors& x) {
         return at::matmul(x[0], x[1]) + at::bmm(x[0], x[1]) + at::addmm(x[2], x[0][0], x[1][0]) +
                at::einsum("bij,bjk->bik", {x[0], x[1]});
       }},
      {"permute, expand, flip, roll, repeat",
       {random({3, 4})},
       [](const Tensors& x) {
         return x[0].permute({1, 0}).contiguous() + x[0].flip(0).t() + x[0].roll(1, 1).t() + x[0][0].expand({3, 4}).t() +
                x[0][1].repeat({3, 1}).t();
       }},
      {"cumsum, tril, masked_fill, lerp",
       {random({4, 4})},
       [](const Tensors& x) { return x[0].cumsum(0).tril() + x[0].masked_fill(x[0] > 1, 0.5) + x[0].lerp(x[0].t(), 0.3); }},
      {"to another type and back", {random({20})}, [](const Tensors& x) { return x[0].to(at::kBFloat16).to(at::kFloat) * 2; }},
      {"upsample, pad",
       {random({1, 2, 4, 4})},
       [](const Tensors& x) {
         return at::upsample_bilinear2d(x[0], {8, 8}, false).sum() + at::upsample_nearest2d(x[0], {8, 8}).sum() +
                at::constant_pad_nd(x[0], {1, 1}) + at::reflection_pad2d(x[0], {1, 1, 0, 0});
       }},
  };
}

}  // namespace

TEST_CASE("emulated operators: Values and gradients are the CPU's") {
  const Fresh fresh;
  emulated::set_delays(5, std::chrono::microseconds(100));
  for (const Case& one : cases()) {
    INFO(one.name);
    const auto run = [&](at::Device where) {
      Tensors inputs;
      for (const at::Tensor& input : one.inputs) {
        inputs.push_back(input.to(where, false, true));
        if (input.is_floating_point()) inputs.back().set_requires_grad(true);
      }
      const at::Tensor out = one.body(inputs);
      (out * at::linspace(0.5, 1.5, out.numel(), out.options().requires_grad(false)).view(out.sizes())).sum().backward();
      Tensors results{out};
      for (const at::Tensor& input : inputs)
        if (input.grad().defined()) results.push_back(input.grad());
      return results;
    };
    const Tensors expected = run(at::kCPU);
    const Tensors found = run(device(1));
    REQUIRE(expected.size() == found.size());
    for (size_t i = 0; i < found.size(); ++i) {
      REQUIRE(found[i].device() == device(1));
      REQUIRE(found[i].strides() == expected[i].strides());
      REQUIRE(at::allclose(on_host(found[i]), expected[i], 1e-4, 1e-5));
    }
    REQUIRE(reports() == "");
  }
}

TEST_CASE("emulated operators: Those on lists and the fused optimizers are the CPU's") {
  const Fresh fresh;
  const auto run = [](at::Device where) {
    const auto list = [&](double shift) { return Tensors{(random({5, 2}) + shift).to(where), (random({7}) * shift).to(where)}; };
    Tensors params = list(1);
    const Tensors grads = list(2);
    Tensors a = list(0.1), b = list(0.2);
    Tensors steps{at::ones({}, where), at::ones({}, where)};
    for (at::Tensor& tensor : b) tensor.abs_();
    const at::Tensor scale = at::full({}, 2.0, where);
    at::Tensor found = at::zeros({}, where);
    at::_fused_sgd_(params, grads, a, 0.1, 0.9, 0.01, 0, false, false, false, scale, found);
    at::_fused_adam_(params, grads, a, b, {}, steps, 0.1, 0.9, 0.99, 0.01, 1e-8, false, false, scale, found);
    at::_fused_adamw_(params, grads, a, b, {}, steps, 0.1, 0.9, 0.99, 0.01, 1e-8, false, false, scale, found);
    at::_fused_adamw_(params, grads, a, b, {}, steps, 0.1, 0.9, 0.99, 0.01, 1e-8, false, false, scale, at::ones({}, where));
    Tensors c = list(3);
    for (at::Tensor& tensor : c) tensor.abs_();
    at::_fused_adam_(params, grads, a, b, c, steps, 0.1, 0.9, 0.99, 0.01, 1e-8, true, false, scale, found);
    at::_fused_adagrad_(params, grads, b, steps, 0.1, 0.01, 0, 1e-10, false, scale, found);
    at::_foreach_mul_(params, 1.5);
    at::_foreach_add_(params, grads, -0.1);
    at::_foreach_addcdiv_(params, grads, b, 0.1);
    Tensors all = at::_foreach_norm(params);
    for (const Tensors& part : {params, a, b, steps, at::_foreach_sqrt(b)}) all.insert(all.end(), part.begin(), part.end());
    at::_amp_foreach_non_finite_check_and_unscale_(params, found, scale);
    all.push_back(found);
    return all;
  };
  const Tensors expected = run(at::kCPU);
  const emulated::Counters before = emulated::counters();
  run(device(0));
  const Tensors found = run(device(0));
  REQUIRE(emulated::counters().host_reads == before.host_reads);
  for (size_t i = 0; i < found.size(); ++i) REQUIRE(at::allclose(on_host(found[i]), expected[i], 1e-5, 1e-6));
  REQUIRE(reports() == "");
}

TEST_CASE("emulated operators: What isn't finite is found") {
  const Fresh fresh;
  at::Tensor x = at::ones({10}, on(0));
  REQUIRE(x.isfinite().all().item<bool>());
  x[3].fill_(std::numeric_limits<float>::infinity());
  REQUIRE_FALSE(x.isfinite().all().item<bool>());
  REQUIRE(x.isinf().any().item<bool>());
  REQUIRE_FALSE(x.isnan().any().item<bool>());
  REQUIRE(at::equal(x, x.clone()));
  REQUIRE(x.nonzero().size(0) == 10);
  REQUIRE(x.masked_select(x > 1).numel() == 1);
}

TEST_CASE("emulated operators: In place, into out= and into views") {
  const Fresh fresh;
  at::Tensor x = at::arange(12, on(0).dtype(at::kFloat)).view({3, 4});
  x.select(1, 1).add_(10).mul_(2);
  x.t().narrow(0, 0, 1).zero_();
  at::Tensor out = at::empty({0}, on(0));
  at::add_out(out, x, x);
  at::abs_out(out, out);
  at::Tensor wrong = at::empty({0}, on(0));
  at::mm_out(wrong, x, x.t());
  at::Tensor host = at::arange(12, at::kFloat).view({3, 4});
  host.select(1, 1).add_(10).mul_(2);
  host.t().narrow(0, 0, 1).zero_();
  REQUIRE(at::equal(on_host(x), host));
  REQUIRE(at::equal(on_host(out), host * 2));
  REQUIRE(at::allclose(on_host(wrong), at::mm(host, host.t())));
  at::Tensor other = at::empty({0}, on(0));
  other.set_(x);
  REQUIRE(other.data_ptr() == x.data_ptr());
  REQUIRE(at::equal(on_host(other.unfold(1, 2, 1)), host.unfold(1, 2, 1)));
}

TEST_CASE("emulated operators: Random numbers are the CPU's for the same seed, and aren't waited for") {
  const Fresh fresh;
  const auto draw = [](at::Device where, at::Generator generator) {
    const auto options = at::TensorOptions().device(where);
    Tensors all{at::randn({50}, generator, options), at::rand({50}, generator, options)};
    all.push_back(at::empty({50}, options).bernoulli_(0.3, generator));
    all.push_back(at::empty({50}, options).normal_(1, 2, generator));
    all.push_back(at::randint(0, 9, {50}, generator, options));
    all.push_back(at::randperm(20, generator, options.dtype(at::kLong)));
    return all;
  };
  at::Generator generator = at::globalContext().getAcceleratorHooksInterface(at::kPrivateUse1).getNewGenerator(1);
  generator.set_current_seed(42);
  const at::Tensor state = generator.get_state();
  const emulated::Counters before = emulated::counters();
  const Tensors found = draw(device(1), generator);
  REQUIRE(emulated::counters().synchronisations == before.synchronisations);
  const Tensors expected = draw(at::kCPU, at::detail::createCPUGenerator(42));
  for (size_t i = 0; i < found.size(); ++i) REQUIRE(at::equal(on_host(found[i]), expected[i]));
  generator.set_state(state);
  REQUIRE(at::equal(on_host(draw(device(1), generator)[0]), expected[0]));
  REQUIRE(at::randn({2}, on(0)).numel() == 2);
}

TEST_CASE("emulated operators: Dropout takes from the device's own generator, as the CPU's does from its") {
  const Fresh fresh;
  const at::Tensor x = at::ones({1000});
  for (const at::Device& where : {device(1), at::Device(at::kCPU)}) {
    at::Generator its = at::globalContext().defaultGenerator(where);
    its.set_current_seed(4);
  }
  at::Tensor there = x.to(device(1)).set_requires_grad(true);
  const at::Tensor dropped = at::dropout(there, 0.4, true);
  dropped.sum().backward();
  REQUIRE(at::allclose(on_host(dropped), at::dropout(x, 0.4, true)));
  REQUIRE(at::equal(there.grad(), dropped));
  REQUIRE(at::equal(at::dropout(there, 0.4, false), there));
}

TEST_CASE("emulated operators: Autocast computes in the lower type, and gradients are in the parameters'") {
  const Fresh fresh;
  const at::ScalarType type = GENERATE(at::kBFloat16, at::kHalf);
  at::Tensor weight = random({5, 3}).to(device(0)).set_requires_grad(true);
  at::Tensor kernel = random({4, 3, 3, 3}).to(device(0)).set_requires_grad(true);
  at::autocast::set_autocast_enabled(at::kPrivateUse1, true);
  at::autocast::set_autocast_dtype(at::kPrivateUse1, type);
  at::autocast::increment_nesting();
  const at::Tensor y = at::linear(random({2, 3}).to(device(0)), weight);
  const at::Tensor z = at::conv2d(random({2, 3, 6, 6}).to(device(0)), kernel);
  const at::Tensor loss = at::mse_loss(y, at::zeros({2, 5}, on(0))) + z.pow(2).mean() +
                          at::cross_entropy_loss(y, at::zeros({2}, on(0).dtype(at::kLong)));
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kPrivateUse1, false);
  loss.backward();
  REQUIRE(y.scalar_type() == type);
  REQUIRE(z.scalar_type() == type);
  REQUIRE(loss.scalar_type() == at::kFloat);
  REQUIRE(weight.grad().scalar_type() == at::kFloat);
  REQUIRE(kernel.grad().isfinite().all().item<bool>());
  REQUIRE(at::linear(random({2, 3}).to(device(0)), weight).scalar_type() == at::kFloat);
  REQUIRE(reports() == "");
}
