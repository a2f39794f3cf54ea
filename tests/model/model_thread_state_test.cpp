// SPDX-License-Identifier: Apache-2.0
//
// What belongs to a thread or a batch: modes, autocast, warnings, ownership.
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <thread>

#include "model_fixture.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

// Tells under which state it was run.
class Telling : public TensorModel {
 public:
  explicit Telling(const nlohmann::json&) : weight_(register_parameter("w", at::ones({3, 3}))) {}

  StepOutput training_step(const Batch& batch, const StepContext&) override {
    if (batch.contains("write")) batch["inputs"].tensor().mul_(2);
    TORCH_WARN("a step is run");
    const at::Tensor made = at::linear(batch["inputs"].tensor(), weight_);
    return {{"loss", made.sum().to(at::kFloat)},
            {"made", made},
            {"inputs", batch["inputs"].tree()},
            {"grad_mode", c10::GradMode::is_enabled()},
            {"inference_mode", c10::InferenceMode::is_enabled()},
            {"num_threads", at::get_num_threads()},
            {"is_training", is_training()}};
  }
  StepOutput validation_step(const Batch& batch, const StepContext& context) override { return training_step(batch, context); }

 private:
  at::Tensor weight_;
};

int64_t told(const ModelStep& step, std::string_view key) { return find(step.outputs.root(), key)->as.i64; }

Tree ones_batch() { return batch_of(at::ones({2, 3}), {}); }

// A host that keeps what is logged.
struct Logging {
  std::string text;
  stg_host table = sized<stg_host>();
  Logging() {
    table.self = &text;
    table.log = [](void* self, uint32_t, stg_string message, const stg_tree*) {
      *static_cast<std::string*>(self) += text_of(message);
    };
  }
};

}  // namespace

TEST_CASE("Gradient mode, inference mode and thread count are those of the step, and the caller's own afterwards") {
  Logging host;
  stg_replicate_args args = replicate_args();
  args.num_threads = 3;
  const Model model = own_model<Telling>("{}", &host.table);
  std::thread([&] {
    const int threads_before = at::get_num_threads();
    const Replica replica(model, args);
    const c10::AutoGradMode off(false);
    const ModelStep trained = train(replica, ones_batch());
    CHECK(told(trained, "grad_mode") == 1);
    CHECK(told(trained, "num_threads") == 3);
    CHECK_FALSE(c10::GradMode::is_enabled());
    const c10::AutoGradMode on(true);
    const ModelStep evaluated = replica.step(step_context(STG_STAGE_VALIDATE, STG_STEP_INFERENCE), ones_batch());
    CHECK(told(evaluated, "grad_mode") == 0);
    CHECK(told(evaluated, "inference_mode") == 1);
    CHECK(evaluated.graph == nullptr);
    CHECK(told(replica.step(step_context(STG_STAGE_VALIDATE, 0), ones_batch()), "grad_mode") == 0);
    CHECK(c10::GradMode::is_enabled());
    CHECK_FALSE(c10::InferenceMode::is_enabled());
    CHECK(at::get_num_threads() == threads_before);
  }).join();
  CHECK_THAT(host.text, Catch::Contains("a step is run"));
}

TEST_CASE(
    "What the calling thread is in, inference mode or autocast, reaches neither a replica's making nor its steps and backward") {
  const auto run = [](bool is_inference, bool is_autocast) {
    const bool before = at::autocast::is_autocast_enabled(at::kCPU);
    at::autocast::set_autocast_enabled(at::kCPU, is_autocast);
    at::Tensor gradient;
    {
      const c10::InferenceMode inference(is_inference);
      const Replica replica(own_model<Telling>(), replicate_args());
      ModelStep step = train(replica, batch_of(at::ones({2, 3}).mul(0.1), {}));
      CHECK(output(step, "made").scalar_type() == at::kFloat);
      gradient = gradients_of(replica, std::move(step.graph)).at(0);
    }
    at::autocast::set_autocast_enabled(at::kCPU, before);
    return gradient;
  };
  const at::Tensor expected = run(false, false);
  CHECK(at::equal(run(true, false), expected));
  CHECK(at::equal(run(false, true), expected));
}

TEST_CASE("Training and evaluation mode are switched") {
  const Replica replica(own_model<Telling>(), replicate_args());
  replica.set_mode(false);
  CHECK(told(train(replica, ones_batch()), "is_training") == 0);
  replica.set_mode(true);
  CHECK(told(train(replica, ones_batch()), "is_training") == 1);
}

TEST_CASE("Autocast is on for the step alone, and sees the weights as they are") {
  const int32_t num_replicas = GENERATE(1, 2);
  const Replica replica(own_model<Telling>(), replicate_args(0, num_replicas));
  stg_step_context context = step_context(STG_STAGE_FIT, STG_STEP_GRADIENT);
  context.autocast_dtype = {STG_DTYPE_BFLOAT, 16, 1};
  CHECK(output(replica.step(context, ones_batch()), "made").scalar_type() == at::kBFloat16);
  CHECK(at::linear(at::ones({1, 3}), at::ones({1, 3}).requires_grad_()).scalar_type() == at::kFloat);
  CHECK(output(train(replica, ones_batch()), "made").scalar_type() == at::kFloat);
  parameters_of(replica).at("w").zero_();
  CHECK(output(replica.step(context, ones_batch()), "loss").item<float>() == 0.0F);
}

namespace {

// A float tensor (2, 3) of ones that counts its releases.
struct Counted {
  std::vector<float> data = std::vector<float>(6, 1.0F);
  std::vector<int64_t> shape{2, 3};
  int num_released = 0;
  stg_tensor tensor{1,    0,
                    this, [](stg_tensor* self) { ++static_cast<Counted*>(self->owner)->num_released; },
                    0,    {data.data(), {STG_DEVICE_CPU, 0}, 2, float32, shape.data(), nullptr, 0}};
  Counted() = default;
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  Tree batch() {
    Dict dict;
    dict.emplace_back("inputs", TensorPtr{&tensor});
    return make_tree(std::move(dict));
  }
};

}  // namespace

TEST_CASE("A moved batch is kept by graph and outputs, and released once when both are gone") {
  const Replica replica(own_model<Telling>(), replicate_args());
  Counted counted;
  ModelStep step = train(replica, counted.batch());
  CHECK(first_element<float>(find(step.outputs.root(), "inputs")->as.tensor->view) == counted.data.data());
  step.outputs = Tree();
  CHECK(counted.num_released == 0);
  gradients_of(replica, std::move(step.graph));
  CHECK(counted.num_released == 1);
}

TEST_CASE("A moved batch is released once on an error, too") {
  const Model model = own_model<Telling>();
  const Replica replica(model, replicate_args());
  Counted counted;
  Tree batch = counted.batch();
  stg_step_context context = step_context(STG_STAGE_FIT, 0);
  context.struct_size = 8;
  auto result = sized<stg_model_step_result>();
  CHECK_THAT(failure([&] { check(model.table().step(model.self(), replica.get(), &context, batch.argument(), &result)); }),
             Catch::Contains("struct_size is 8"));
  CHECK(counted.num_released == 1);
  CHECK(batch.root().type == STG_NONE);
}

TEST_CASE("An output that would alias a borrowed batch is a copy") {
  const Replica replica(own_model<Telling>(), replicate_args());
  Counted counted;
  const Tree owner = counted.batch();
  const ModelStep step = replica.step(step_context(STG_STAGE_VALIDATE, STG_STEP_INFERENCE), Tree::view(owner.root()));
  CHECK(first_element<float>(find(step.outputs.root(), "inputs")->as.tensor->view) != counted.data.data());
  CHECK(counted.num_released == 0);
}

TEST_CASE("A step that writes to a read-only batch is an error that names the place, reading is fine") {
  const Replica replica(own_model<Telling>(), replicate_args());
  Counted counted;
  counted.tensor.flags = STG_TENSOR_READ_ONLY;
  const uint32_t flags = GENERATE(STG_STEP_GRADIENT, STG_STEP_INFERENCE);
  CHECK(output(replica.step(step_context(STG_STAGE_FIT, flags), counted.batch()), "loss").item<float>() == 18.0F);
  Dict writing;
  writing.emplace_back("inputs", TensorPtr{&counted.tensor});
  writing.emplace_back("write", true);
  CHECK_THAT(failure([&] { replica.step(step_context(STG_STAGE_FIT, flags), make_tree(std::move(writing))); }),
             Catch::Contains("training_step wrote to batch[\"inputs\"], which is read-only"));
  CHECK(counted.num_released == 2);
}

namespace {

// Steps that are wrong, one each.
class Wrong : public TensorModel {
 public:
  explicit Wrong(const nlohmann::json& options) : kind_(options["kind"]), w_(register_parameter("w", at::ones({3}))) {
    if (kind_ == "overlap") register_parameter("half", w_.detach().slice(0, 1));
    if (kind_ == "twice") register_parameter("w", at::ones({3}));
    if (kind_ == "no leaf") register_buffer("b", w_.mul(2));
  }
  StepOutput training_step(const Batch&, const StepContext&) override {
    if (kind_ == "rows") return w_.mul(2);
    if (kind_ == "integer") return at::ones({}, at::kLong);
    if (kind_ == "none") return {{"accuracy", 1.0}};
    if (kind_ == "detached") return w_.sum().detach();
    if (kind_ == "sparse") return {{"loss", w_.sum()}, {"extra", at::ones({2, 2}).to_sparse()}};
    if (kind_ == "denominator") return StepOutput(w_.sum()).over("many");
    return w_.sum();
  }

 private:
  std::string kind_;
  at::Tensor w_;
};

}  // namespace

TEST_CASE("What a model gets wrong is told in its words") {
  const auto [kind, text] = GENERATE(table<std::string, std::string>({
      {"rows", "float32 with 1 dimensions; it must be a 0-dim floating tensor"},
      {"integer", "int64 with 0 dimensions"},
      {"none", "gave no loss"},
      {"detached", "a loss without a gradient"},
      {"sparse", "outputs[\"extra\"]: a tensor of layout Sparse"},
      {"denominator", "the step's denominator is a string"},
      {"overlap", "'w' and 'half' share memory"},
      {"twice", "has 'w' twice"},
      {"no leaf", "'b' of model 'own' was computed from other tensors"},
      {"predict", "UNIMPLEMENTED: this model has no predict_step"},
  }));
  const std::string options = "{\"kind\": \"" + kind + "\"}";
  const bool is_predict = kind == "predict";
  const std::string message = failure([&] {
    const Replica replica(own_model<Wrong>(options), replicate_args());
    replica.step(is_predict ? step_context(STG_STAGE_PREDICT, 0) : step_context(STG_STAGE_FIT, STG_STEP_GRADIENT), ones_batch());
  });
  CHECK_THAT(message, Catch::Contains(text));
}

TEST_CASE("fashion_cnn says which label, row and key are wrong, and gives what it promises") {
  const Replica replica(library_model(FASHION_LIBRARY, R"({"channels": 4})"), replicate_args());
  const at::Tensor images = at::ones({5, 28, 28}, at::kByte);
  at::Tensor labels = at::ones({5}, at::kLong);
  const stg_step_context validate = step_context(STG_STAGE_VALIDATE, STG_STEP_INFERENCE);
  const ModelStep validated = replica.step(validate, batch_of(images, labels));
  CHECK(output(validated, "loss").dim() == 0);
  CHECK(output(validated, "accuracy").dim() == 0);
  ModelStep trained = train(replica, batch_of(images, labels));
  CHECK(find(trained.outputs.root(), "accuracy") == nullptr);
  CHECK(gradients_of(replica, std::move(trained.graph)).size() == 8);
  const ModelStep predicted = replica.step(step_context(STG_STAGE_PREDICT, STG_STEP_INFERENCE), batch_of(images, {}));
  REQUIRE(predicted.outputs.root().type == STG_TENSOR);
  CHECK(shape_text(predicted.outputs.root().as.tensor->view) == "(5, 10)");

  labels.select(0, 3).fill_(10);
  CHECK_THAT(failure([&] { train(replica, batch_of(images, labels)); }),
             Catch::Contains("batch[\"targets\"] has the label 10 in row 3; labels are 0 to 9"));
  labels.select(0, 1).fill_(-2);
  CHECK_THAT(failure([&] { train(replica, batch_of(images, labels)); }), Catch::Contains("the label -2 in row 1"));
  labels.fill_(9);
  CHECK_THAT(failure([&] { train(replica, batch_of(images.to(at::kFloat), labels)); }),
             Catch::Contains("batch[\"inputs\"] is float32 (5, 28, 28); the model expects uint8 (any, 28, 28)"));
  CHECK_THAT(failure([&] { train(replica, batch_of(images, labels.slice(0, 1))); }),
             Catch::Contains("batch[\"targets\"] is int64 (4); the model expects int64 (5)"));
}
