// SPDX-License-Identifier: Apache-2.0
//
// The model SDK, seen through the ABI: what a strategy relies on.
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <thread>

#include "model_fixture.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

Model mlp(const std::string& options = "{}") { return library_model(MLP_LIBRARY, options); }

// A step's loss and its gradients by index.
struct Trained {
  at::Tensor loss;
  std::map<uint64_t, at::Tensor> gradients;
};

Trained train_once(const Replica& replica, const Rows& rows, double scale = 1) {
  ModelStep step = train(replica, rows.batch());
  at::Tensor loss = output(step, "loss");
  return {loss, gradients_of(replica, std::move(step.graph), scale)};
}

bool same(const Trained& a, const Trained& b) {
  bool equal = at::equal(a.loss, b.loss) && a.gradients.size() == b.gradients.size();
  for (const auto& [index, gradient] : a.gradients) equal = equal && at::equal(gradient, b.gradients.at(index));
  return equal;
}

// Two layers, computed with LibTorch alone from the replica's weights.
Trained reference(const Replica& replica, const Rows& rows) {
  std::vector<at::Tensor> weights;
  const auto found = parameters_of(replica);
  for (const char* name : {"layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias"}) {
    weights.push_back(found.at(name).clone().requires_grad_());
  }
  const at::Tensor hidden = at::relu(at::linear(rows.inputs, weights[0], weights[1]));
  const at::Tensor loss = at::cross_entropy_loss(at::linear(hidden, weights[2], weights[3]), rows.targets);
  loss.backward();
  Trained result{loss.detach(), {}};
  for (uint64_t i = 0; i < weights.size(); ++i) result.gradients[i] = weights[i].grad();
  return result;
}

}  // namespace

TEST_CASE("A step and its backward are bitwise those of a plain LibTorch loop, step after step") {
  const Replica replica(mlp(), replicate_args());
  const Rows rows;
  for (int i = 0; i < 3; ++i) {
    const Trained expected = reference(replica, rows);
    const Trained got = train_once(replica, rows);
    CHECK(same(got, expected));
    uint64_t index = 0;
    for (const char* name : {"layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias"}) {
      parameters_of(replica).at(name).sub_(got.gradients.at(index++), 0.5);
    }
  }
}

TEST_CASE("The scale multiplies every gradient and leaves the loss alone") {
  const Replica replica(mlp(), replicate_args());
  const Rows rows;
  const Trained once = train_once(replica, rows);
  const Trained scaled = train_once(replica, rows, 1024);
  CHECK(at::equal(once.loss, scaled.loss));
  for (const auto& [index, gradient] : once.gradients) CHECK(at::equal(gradient.mul(1024), scaled.gradients.at(index)));
}

TEST_CASE("Initial weights depend on the seed alone, and are those of a bare LibTorch with that seed") {
  const Model model = mlp();
  const Replica first(model, replicate_args(0, 2, 5));
  const Replica second(model, replicate_args(1, 2, 5));
  const Replica other(model, replicate_args(0, 2, 6));
  for (const auto& [name, weights] : parameters_of(first)) {
    INFO(name);
    CHECK(at::equal(weights, parameters_of(second).at(name)));
    CHECK_FALSE(at::equal(weights, parameters_of(other).at(name)));
  }
  CHECK(at::equal(parameters_of(first).at("layer0.weight"), at::zeros({8, 4}).uniform_(-0.5, 0.5, seeded(5))));
}

TEST_CASE("Each storage is described once with all its names, flags tell frozen and transient ones") {
  const Replica replica(mlp(R"({"sizes": [4, 4, 4], "tied": true, "frozen": true, "buffers": true})"), replicate_args());
  const stg_model_description description = replica.describe();
  REQUIRE(description.num_parameters == 3);
  const stg_parameter& tied = *description.parameters[0];
  REQUIRE(tied.num_names == 2);
  CHECK(text_of(tied.names[0]) == "layer0.weight");
  CHECK(text_of(tied.names[1]) == "layer1.weight");
  CHECK(tied.flags == (STG_PARAMETER_REQUIRES_GRAD | STG_PARAMETER_PERSISTENT | STG_PARAMETER_PINNED));
  CHECK(description.parameters[1]->flags == (STG_PARAMETER_PERSISTENT | STG_PARAMETER_PINNED));
  REQUIRE(description.num_buffers == 3);
  CHECK(text_of(description.buffers[1]->names[0]) == "running_mean");
  CHECK(text_of(description.buffers[2]->names[0]) == "scratch");
  CHECK(description.buffers[2]->flags == STG_PARAMETER_PINNED);
  CHECK(description.loss_kind == STG_LOSS_MEAN);
  CHECK(Replica(mlp(R"({"loss": "sum"})"), replicate_args()).describe().loss_kind == STG_LOSS_SUM);
}

TEST_CASE("A tied parameter gets one gradient, a frozen one none, an unused one a null") {
  const Replica replica(mlp(R"({"sizes": [4, 4, 4], "tied": true, "frozen": true, "unused": true})"), replicate_args());
  const Rows rows;
  const Trained trained = train_once(replica, rows);
  CHECK(trained.gradients.size() == 3);  // tied weight, second bias, unused
  CHECK(trained.gradients.at(0).sizes() == at::IntArrayRef({4, 4}));
  CHECK(trained.gradients.count(1) == 0);
  CHECK_FALSE(trained.gradients.at(3).defined());
}

namespace {

// Remembers where autograd put the gradient.
class Watching : public TensorModel {
 public:
  explicit Watching(const nlohmann::json&) : weight_(register_parameter("w", at::ones({64, 64}))) {
    weight_.register_hook([](const at::Tensor& gradient) {
      where = gradient.data_ptr();
      return at::Tensor();
    });
  }
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    return batch["inputs"].tensor().matmul(weight_.t()).square().mean();
  }
  static inline void* where = nullptr;

 private:
  at::Tensor weight_;
};

}  // namespace

TEST_CASE("A gradient is handed over without a copy, and nobody else refers to it") {
  const Replica replica(own_model<Watching>(), replicate_args());
  for (int i = 0; i < 2; ++i) {
    ModelStep step = train(replica, batch_of(at::ones({4, 64}), {}));
    replica.backward(std::move(step.graph), 1, [&](uint64_t, TensorPtr gradient) {
      REQUIRE(gradient != nullptr);
      CHECK(first_element(gradient->view) == Watching::where);
      const at::Tensor adopted = to_tensor(std::move(gradient));
      CHECK(adopted.storage().use_count() == 1);
    });
  }
}

namespace {

// Trains its second parameter from the second step on. Backward begins with what was computed last, so it reaches that one first.
class Thawing : public TensorModel {
 public:
  explicit Thawing(const nlohmann::json&)
      : first_(register_parameter("first", at::ones({2}))), second_(register_parameter("second", at::ones({2}), false)) {}
  StepOutput training_step(const Batch&, const StepContext& context) override {
    if (context.global_step == 1) second_.set_requires_grad(true);
    const at::Tensor early = first_.exp().exp().sum();
    return second_.sum().add(early);
  }

 private:
  at::Tensor first_;
  at::Tensor second_;
};

// An embedding with a sparse gradient.
class Sparse : public TensorModel {
 public:
  explicit Sparse(const nlohmann::json&) : table_(register_parameter("table", at::ones({4, 2}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    return at::embedding(table_, batch["inputs"].tensor(), -1, false, /*sparse=*/true).sum();
  }

 private:
  at::Tensor table_;
};

}  // namespace

TEST_CASE("A parameter that is thawed during training gets its gradient") {
  const Replica replica(own_model<Thawing>(), replicate_args());
  ModelStep step = train(replica, batch_of(at::ones({1}), {}));
  CHECK(gradients_of(replica, std::move(step.graph)).size() == 1);
  stg_step_context later = step_context(STG_STAGE_FIT, STG_STEP_GRADIENT);
  later.global_step = 1;
  for (int i = 0; i < 2; ++i) {
    step = replica.step(later, batch_of(at::ones({1}), {}));
    CHECK(at::equal(gradients_of(replica, std::move(step.graph)).at(1), at::ones({2})));
    // What a failed backward has left behind is not added to the next one.
    step = replica.step(later, batch_of(at::ones({1}), {}));
    CHECK_THROWS(replica.backward(std::move(step.graph), 1, [](uint64_t, TensorPtr) { throw Error{STG_ABORTED, "enough"}; }));
  }
}

TEST_CASE("A sparse gradient goes to a sink that takes them, coalesced, and is made dense for others") {
  const Model model = own_model<Sparse>();
  const Replica replica(model, replicate_args());
  const at::Tensor rows = at::ones({3}, at::kLong);
  ModelStep step = train(replica, batch_of(rows, {}));
  const at::Tensor dense = gradients_of(replica, std::move(step.graph)).at(0);
  CHECK(dense.sum().item<float>() == 6.0F);
  CHECK(dense.select(0, 1).sum().item<float>() == 6.0F);

  struct Taken {
    at::Tensor indices;
    at::Tensor values;
    std::vector<int64_t> shape;
  } taken;
  auto sink = sized<stg_gradient_sink>();
  sink.self = &taken;
  sink.ready = [](void*, uint64_t, stg_tensor*, const stg_stream*) { return to_abi(internal("not sparse")); };
  sink.ready_sparse = [](void* self, uint64_t, stg_tensor* indices, stg_tensor* values, const int64_t* shape, uint64_t num_dims,
                         const stg_stream*) -> stg_error* {
    *static_cast<Taken*>(self) = {to_tensor(TensorPtr(indices)), to_tensor(TensorPtr(values)), {shape, shape + num_dims}};
    return nullptr;
  };
  step = train(replica, batch_of(rows, {}));
  check(model.table().backward(model.self(), replica.get(), step.graph.release(), 1, 0, &sink));
  CHECK(taken.indices.sizes() == at::IntArrayRef({1, 1}));
  CHECK(at::equal(taken.values, at::ones({1, 2}).mul(3)));
  CHECK(taken.shape == std::vector<int64_t>{4, 2});
}

TEST_CASE("Replicas in two threads draw reproducible dropout, each its own") {
  const Model model = mlp(R"({"dropout": 0.5, "sizes": [4, 64, 3]})");
  const Rows rows;
  const auto run = [&] {
    std::vector<Trained> results(2);
    const auto work = [&](int32_t index) {
      const Replica replica(model, replicate_args(index, 2));
      train_once(replica, rows);
      results[static_cast<size_t>(index)] = train_once(replica, rows);
    };
    std::thread other(work, 1);
    work(0);
    other.join();
    return results;
  };
  const auto expected = run();
  CHECK_FALSE(same(expected[0], expected[1]));
  for (int i = 0; i < 10; ++i) {
    const auto again = run();
    REQUIRE(same(again[0], expected[0]));
    REQUIRE(same(again[1], expected[1]));
  }
}

TEST_CASE("A generator's state brings its numbers back") {
  const Model model = mlp(R"({"dropout": 0.5, "sizes": [4, 64, 3]})");
  const Replica replica(model, replicate_args());
  const Rows rows;
  train_once(replica, rows);
  stg_tree state{};
  check(model.table().get_generator_state(model.self(), replica.get(), &state));
  const Tree owned(state);
  REQUIRE(owned.root().type == STG_BYTES);
  const Trained expected = train_once(replica, rows);
  CHECK_FALSE(same(train_once(replica, rows), expected));
  check(model.table().set_generator_state(model.self(), replica.get(), owned.root().as.bytes, owned.root().count));
  CHECK(same(train_once(replica, rows), expected));
  CHECK_THAT(failure([&] { check(model.table().set_generator_state(model.self(), replica.get(), owned.root().as.bytes, 7)); }),
             Catch::Contains("INVALID_ARGUMENT") && Catch::Contains("7 bytes"));
}

TEST_CASE("Double precision takes in floating parameters, buffers and batches, and leaves integers alone") {
  stg_replicate_args args = replicate_args();
  args.floating_dtype = float64;
  const Replica replica(mlp(R"({"buffers": true})"), args);
  const stg_model_description description = replica.describe();
  for (uint64_t i = 0; i < description.num_parameters; ++i)
    CHECK(same_dtype(description.parameters[i]->tensor->view.dtype, float64));
  CHECK(same_dtype(description.buffers[0]->tensor->view.dtype, int64));
  CHECK(same_dtype(description.buffers[1]->tensor->view.dtype, float64));
  const Replica single(mlp(R"({"buffers": true})"), replicate_args());
  for (const auto& [name, weights] : parameters_of(replica))
    CHECK(at::equal(weights, parameters_of(single).at(name).to(at::kDouble)));
  const Trained trained = train_once(replica, Rows());
  CHECK(trained.loss.scalar_type() == at::kDouble);
  CHECK(trained.gradients.at(0).scalar_type() == at::kDouble);
  args.floating_dtype = int64;
  CHECK_THAT(failure([&] { Replica(mlp(), args); }), Catch::Contains("int64"));
}

TEST_CASE("A bound parameter lives in the strategy's memory, and its gradient is written there") {
  const Model model = mlp();
  const Replica replica(model, replicate_args());
  const Rows rows;
  const Trained expected = train_once(replica, rows);
  at::Tensor weights = parameters_of(replica).at("layer0.weight").clone();
  at::Tensor gradient = at::ones({8, 4});
  const auto bind = [&](uint64_t index, const at::Tensor& storage, const at::Tensor& slot) {
    const TensorPtr storage_handle = to_dlpack(storage);
    const TensorPtr slot_handle = slot.defined() ? to_dlpack(slot) : nullptr;
    check(model.table().bind(model.self(), replica.get(), index, storage_handle.get(), slot_handle.get()));
  };
  bind(0, weights, gradient);
  CHECK(parameters_of(replica).at("layer0.weight").data_ptr() == weights.data_ptr());
  const Trained bound = train_once(replica, rows);
  CHECK(same(bound, expected));
  CHECK(bound.gradients.at(0).data_ptr() == gradient.data_ptr());
  CHECK(at::equal(gradient, expected.gradients.at(0)));
  weights.mul_(2);
  check(model.table().parameters_changed(model.self(), replica.get()));
  CHECK(same(train_once(replica, rows), reference(replica, rows)));
  CHECK_FALSE(at::equal(train_once(replica, rows).loss, expected.loss));

  CHECK_THAT(failure([&] { bind(0, at::zeros({4, 8}), {}); }), Catch::Contains("layer0.weight") && Catch::Contains("(4, 8)"));
  CHECK_THAT(failure([&] { bind(9, weights, {}); }), Catch::Contains("index 9"));
  const TensorPtr read_only = to_dlpack(weights);
  read_only->flags = STG_TENSOR_READ_ONLY;
  CHECK_THAT(failure([&] { check(model.table().bind(model.self(), replica.get(), 0, read_only.get(), nullptr)); }),
             Catch::Contains("read-only"));
}

TEST_CASE("Replicas that are bound to one memory see each other's update") {
  const Model model = mlp();
  const Replica first(model, replicate_args(0, 2));
  const Replica second(model, replicate_args(1, 2));
  const stg_model_description description = first.describe();
  for (uint64_t i = 0; i < description.num_parameters; ++i) {
    check(model.table().bind(model.self(), second.get(), i, description.parameters[i]->tensor, nullptr));
  }
  parameters_of(first).at("layer1.bias").add_(1);
  const Rows rows;
  CHECK(same(train_once(second, rows), train_once(first, rows)));
}

TEST_CASE("A model that throws gives its text, replica and device, and the next step works") {
  const auto [fault, text, code] = GENERATE(table<std::string, std::string, uint32_t>({
      {"runtime_error", "this replica was told to fail", STG_INTERNAL},
      {"c10_error", "this replica was told to fail in LibTorch", STG_INTERNAL},
      {"int", "no std::exception", STG_UNKNOWN},
  }));
  const Model model = mlp(R"({"fault_replica": 1, "fault_step": 0, "fault": ")" + fault + "\"}");
  const Replica replica(model, replicate_args(1, 2));
  const Rows rows;
  stg_step_context context = step_context(STG_STAGE_FIT, STG_STEP_GRADIENT, 1);
  try {
    replica.step(context, rows.batch());
    FAIL("the step should have failed");
  } catch (const Error& error) {
    CHECK_THAT(error.message, Catch::Contains(text));
    CHECK(error.code == code);
    CHECK(error.replica == 1);
    CHECK(error.device.index == 1);
  }
  context.global_step = 1;
  ModelStep next = replica.step(context, rows.batch());
  CHECK(gradients_of(replica, std::move(next.graph)).size() == 4);
}

TEST_CASE("A NaN is an error that names it, where that was asked for") {
  const Replica replica(mlp(R"({"fault": "nan"})"), replicate_args());
  const Rows rows;
  CHECK_THAT(
      failure([&] { replica.step(step_context(STG_STAGE_FIT, STG_STEP_GRADIENT | STG_STEP_DETECT_ANOMALY), rows.batch()); }),
      Catch::Contains("outputs[\"loss\"] has a NaN"));
  CHECK(output(train(replica, rows.batch()), "loss").isnan().item<bool>());
  const Replica sound(mlp(R"({"sizes": [4, 3]})"), replicate_args());
  ModelStep step = sound.step(step_context(STG_STAGE_FIT, STG_STEP_GRADIENT | STG_STEP_DETECT_ANOMALY), rows.batch());
  CHECK_THAT(failure([&] { gradients_of(sound, std::move(step.graph), std::nan("")); }),
             Catch::Contains("the gradient of 'layer0."));
}

TEST_CASE("A parameter without a shape, options that are no object, and wrong batches are refused by name") {
  CHECK_THAT(failure([] { Replica(mlp(R"({"shapeless": true})"), replicate_args()); }), Catch::Contains("shapeless.weight"));
  CHECK_THAT(failure([] { mlp("[1]"); }), Catch::Contains("INVALID_ARGUMENT") && Catch::Contains("[1]"));
  const Replica replica(mlp(), replicate_args());
  CHECK_THAT(failure([&] { train(replica, make_tree(Dict{})); }), Catch::Contains("training_step: batch has no \"inputs\""));
  CHECK_THAT(failure([&] { train(replica, make_tree(Value(3.5))); }), Catch::Contains("batch is a number"));
  CHECK_THAT(failure([&] { replica.step(step_context(7, 0), Rows().batch()); }), Catch::Contains("stage 7"));
  CHECK_THAT(failure([&] { replica.step(step_context(0, 64), Rows().batch()); }), Catch::Contains("UNIMPLEMENTED"));
}

TEST_CASE("An error from the sink ends backward, comes back, and leaves nothing for the next one") {
  const Replica replica(mlp(), replicate_args());
  const Rows rows;
  const Trained expected = train_once(replica, rows);
  for (const uint64_t at_index : {0U, 2U}) {
    ModelStep step = train(replica, rows.batch());
    try {
      replica.backward(std::move(step.graph), 1, [at_index](uint64_t index, TensorPtr) {
        if (index == at_index) throw Error{STG_ABORTED, "enough"};
      });
      FAIL("backward should have failed");
    } catch (const Error& error) {
      CHECK(error.code == STG_ABORTED);
      CHECK_THAT(error.message,
                 Catch::Contains(at_index == 0 ? "layer0.weight" : "layer1.weight") && Catch::Contains("not taken"));
      REQUIRE(error.cause != nullptr);
      CHECK(text_of(error.cause->message) == "enough");
    }
  }
  CHECK(same(train_once(replica, rows), expected));
}

TEST_CASE("A dropped graph leaves the next step as it would have been") {
  const Replica replica(mlp(), replicate_args());
  const Rows rows;
  const Trained expected = train_once(replica, rows);
  { const ModelStep dropped = train(replica, rows.batch()); }
  CHECK(same(train_once(replica, rows), expected));
}

TEST_CASE("Several models and libraries in one process don't disturb each other") {
  const Rows rows;
  const Replica plain(mlp(), replicate_args());
  const Trained expected = train_once(plain, rows);
  const Replica toy(library_model(TOY_LIBRARY, R"({"weight": 2})"), replicate_args());
  ModelStep step = train(toy, batch_of(at::ones({3}).mul(5), {}));
  CHECK(output(step, "loss").item<float>() == 10.0F);
  CHECK(gradients_of(toy, std::move(step.graph)).at(0).item<float>() == 5.0F);
  CHECK(same(train_once(plain, rows), expected));
}

TEST_CASE("A step that reports a denominator gives it as a tensor or a number") {
  const Replica toy(library_model(TOY_LIBRARY, R"({"weight": 1})"), replicate_args());
  Dict batch;
  batch.emplace_back("inputs", to_dlpack(at::ones({4}).mul(3)));
  batch.emplace_back("mask", to_dlpack(at::ones({4}).cumsum(0).le(3)));
  const ModelStep step = train(toy, make_tree(std::move(batch)));
  REQUIRE(step.denominator.type == STG_TENSOR);
  CHECK(read_element(step.denominator.as.tensor->view, 0) == 3);
  CHECK(output(step, "loss").item<float>() == 3.0F);
}
