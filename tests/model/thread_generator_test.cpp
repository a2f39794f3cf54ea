// SPDX-License-Identifier: Apache-2.0
//
// Random numbers of a thread of its own: reproducible whatever other threads do.
#include "torch/runtime/thread_generator.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/randperm.h>

#include <array>
#include <functional>
#include <thread>
#include <vector>

// Last, since LibTorch has a CHECK, too.
#include "support/catch.hpp"

using stratagem::ThreadGenerator;

namespace {

at::Generator seeded(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

// One of each kind: factories, in-place, composite, with a backward.
std::vector<at::Tensor> draw() {
  const at::Tensor weights = at::ones({500}).requires_grad_();
  const at::Tensor dropped = at::dropout(weights, 0.5, true);
  dropped.sum().backward();
  const at::Tensor ones = at::ones({500});
  return {at::rand({500}),   at::randn({500}), at::randn_like(ones), at::bernoulli(ones.mul(0.5)), at::empty({500}).normal_(),
          at::randperm(500), dropped.detach(), weights.grad()};
}

std::vector<at::Tensor> draw_with(uint64_t seed) {
  const ThreadGenerator scope(seeded(seed));
  return draw();
}

std::array<std::vector<at::Tensor>, 2> draw_in_two_threads() {
  std::array<std::vector<at::Tensor>, 2> drawn;
  std::thread other([&] { drawn[1] = draw_with(2); });
  drawn[0] = draw_with(1);
  other.join();
  return drawn;
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool equal = a.size() == b.size();
  for (size_t i = 0; i < a.size(); ++i) equal = equal && at::equal(a[i], b[i]);
  return equal;
}

}  // namespace

TEST_CASE("Two threads draw the same numbers in every run, and not each other's") {
  const auto first = draw_in_two_threads();
  for (int run = 0; run < 20; ++run) {
    const auto again = draw_in_two_threads();
    REQUIRE(same(first[0], again[0]));
    REQUIRE(same(first[1], again[1]));
  }
  for (size_t i = 0; i < first[0].size(); ++i) {
    INFO("operator " << i);
    CHECK_FALSE(at::equal(first[0][i], first[1][i]));
  }
  CHECK(same(first[0], draw_with(1)));
}

TEST_CASE("A thread's generator gives what LibTorch's own would with the same seed") {
  at::Generator own = seeded(7);
  const at::Tensor expected = at::randn({64}, own);
  const ThreadGenerator scope(seeded(7));
  CHECK(at::equal(at::randn({64}), expected));
}

TEST_CASE("A generator that is given counts, and outside of the scope the process's own does") {
  const at::Tensor expected = at::rand({16}, seeded(3));
  {
    const ThreadGenerator scope(seeded(4));
    CHECK(at::equal(at::rand({16}, seeded(3)), expected));
    {
      const ThreadGenerator inner(seeded(3));
      CHECK(at::equal(at::rand({16}), expected));
    }
    CHECK(at::equal(at::rand({16}), at::rand({16}, seeded(4))));
  }
  CHECK(ThreadGenerator::find(at::Device("cpu")) == nullptr);
  CHECK_FALSE(at::equal(at::rand({16}), at::rand({16})));
}

TEST_CASE("A generator of one device is not given to operators of another") {
  const ThreadGenerator scope(seeded(5));
  CHECK(ThreadGenerator::find(at::Device("cpu")) != nullptr);
  CHECK(ThreadGenerator::find(at::Device("cuda:0")) == nullptr);
  CHECK(at::randn({3}, at::TensorOptions().device("meta")).is_meta());
}
