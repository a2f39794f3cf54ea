// SPDX-License-Identifier: Apache-2.0
//
// Replicas without initial values (STG_REPLICATE_SKIP_INIT): never other than with them, once their state is written.
#include "torch/runtime/skip_init.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/zeros.h>

#include <thread>

#include "model_fixture.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

// A parameter "w" of many draws, and a class of its own for what else a constructor can do.
struct Drawing : TensorModel {
  explicit Drawing(const nlohmann::json& options) {
    ++num_made;
    const std::string kind = options.value("kind", "plain");
    w = register_parameter("w", at::empty({64, 64}).normal_());
    if (kind == "scaled in place") w.detach().mul_(0.02);
    if (kind == "rows zeroed") w.detach()[3].fill_(0);
    if (kind == "tied") register_parameter("w too", w);
    if (kind == "factory") register_parameter("v", at::randn({8}));
    if (kind == "scaled copy") register_parameter("v", at::randn({8}).mul(0.02));
    if (kind == "read") bound = w.detach().abs().max().item<float>();
    if (kind == "read by pointer") bound = w.detach().const_data_ptr<float>()[0];
    if (kind == "transient buffer") register_buffer("noise", at::empty({8}).uniform_(), /*persistent=*/false);
    if (kind == "kept aside") aside = at::randn({8});
    if (kind == "a view kept") aside = w.detach().view({-1});
    if (kind == "permuted") register_buffer("order", at::randperm(8));
    if (kind == "throws") throw std::runtime_error("no such kind");
  }
  StepOutput training_step(const Batch&, const StepContext&) override {
    at::Tensor loss = at::dropout(w, 0.5, true).sum() + bound;
    if (aside.defined()) loss = loss + aside.sum();
    return {{"loss", loss}};
  }

  static inline int num_made = 0;
  at::Tensor w, aside;
  float bound = 0;
};

std::string options_of(const std::string& kind) { return nlohmann::json{{"kind", kind}}.dump(); }

stg_replicate_args skipping() {
  stg_replicate_args args = replicate_args();
  args.flags = STG_REPLICATE_SKIP_INIT;
  return args;
}

// What a strategy writes: parameters, and persistent buffers.
void write_state(const Replica& from, const Replica& to) {
  const stg_model_description source = from.describe(), target = to.describe();
  REQUIRE(target.num_parameters == source.num_parameters);
  REQUIRE(target.num_buffers == source.num_buffers);
  const auto copy = [](const stg_parameter& a, const stg_parameter& b) {
    CHECK(text_of(a.names[0]) == text_of(b.names[0]));
    CHECK(a.num_names == b.num_names);
    CHECK(a.flags == b.flags);
    if ((a.flags & STG_PARAMETER_PERSISTENT) != 0) view_tensor(*b.tensor).copy_(view_tensor(*a.tensor));
  };
  for (uint64_t i = 0; i < source.num_parameters; ++i) copy(*source.parameters[i], *target.parameters[i]);
  for (uint64_t i = 0; i < source.num_buffers; ++i) copy(*source.buffers[i], *target.buffers[i]);
}

}  // namespace

TEST_CASE("A replica without initial values trains as one with them, once its state is written, whatever its constructor does") {
  const auto [kind, times_made] = GENERATE(table<std::string, int>({
      {"plain", 1},
      {"rows zeroed", 1},
      {"tied", 1},
      {"factory", 1},
      {"scaled in place", 1},
      {"scaled copy", 2},
      {"read", 2},
      {"read by pointer", 2},
      {"transient buffer", 2},
      {"kept aside", 2},
      {"a view kept", 2},
      {"permuted", 2},
  }));
  INFO(kind);
  const Model model = own_model<Drawing>(options_of(kind));
  const Replica whole(model, replicate_args());
  Drawing::num_made = 0;
  const at::Tensor host_generator = at::detail::getDefaultCPUGenerator().get_state();
  const Replica skipped(model, skipping());
  CHECK(at::equal(at::detail::getDefaultCPUGenerator().get_state(), host_generator));
  CHECK(Drawing::num_made == times_made);
  if (times_made == 2) CHECK(at::equal(parameters_of(whole).at("w"), parameters_of(skipped).at("w")));
  write_state(whole, skipped);
  const auto batch = [] { return batch_of(at::zeros({2, 1}), {}); };
  for (int i = 0; i < 2; ++i) {
    ModelStep expected = train(whole, batch()), got = train(skipped, batch());
    CHECK(at::equal(output(got, "loss"), output(expected, "loss")));
    const auto expected_gradients = gradients_of(whole, std::move(expected.graph));
    const auto gradients = gradients_of(skipped, std::move(got.graph));
    CHECK(at::equal(gradients.at(0), expected_gradients.at(0)));
  }
}

TEST_CASE("A replica without initial values has the precision that was asked for") {
  const Model model = own_model<Drawing>();
  stg_replicate_args args = skipping();
  args.floating_dtype = float64;
  const Replica replica(model, args);
  CHECK(parameters_of(replica).at("w").scalar_type() == at::kDouble);
}

TEST_CASE("What a constructor throws is told as ever, with and without initial values") {
  const Model model = own_model<Drawing>(options_of("throws"));
  const auto failure_with = [&](const stg_replicate_args& args) { return failure([&] { const Replica replica(model, args); }); };
  CHECK(failure_with(replicate_args()) == "INTERNAL: no such kind");
  CHECK(failure_with(skipping()) == "INTERNAL: no such kind");
}

TEST_CASE("Where fills are left out the memory is as it was, and nobody reads it") {
  at::Tensor tensor = at::full({4}, 7.0F);
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const SkipInit scope;
  tensor.uniform_().mul_(2).add_(1).zero_();
  CHECK(scope.has_skipped(tensor));
  CHECK(scope.has_skipped(tensor.view({2, 2})));
  CHECK(static_cast<const float*>(storage._mutable_data_ptr_no_checks().get())[3] == 7.0F);
  CHECK_THROWS(tensor.sum());
  CHECK_THROWS(tensor.const_data_ptr<float>());
  CHECK_THROWS(tensor.clone());
  CHECK(scope.is_covered_by({tensor}));
  const at::Tensor view = tensor.narrow(0, 0, 2);
  CHECK_FALSE(scope.is_covered_by({tensor}));
  CHECK(scope.is_covered_by({tensor, view}));
  const at::Tensor other = at::full({2}, 3.0F);  // what isn't random is made as ever
  CHECK(at::equal(other, at::full({2}, 3.0F)));
}

TEST_CASE("Outside the scope, and in other threads, random fills are made") {
  bool is_filled_elsewhere = false;
  {
    const SkipInit scope;
    std::thread([&] { is_filled_elsewhere = !at::equal(at::zeros({4}), at::zeros({4}).uniform_()); }).join();
  }
  CHECK(is_filled_elsewhere);
  CHECK_FALSE(at::equal(at::zeros({4}), at::zeros({4}).uniform_()));
}
