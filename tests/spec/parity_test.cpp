// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Equality": data_parallel on several devices against single_device, with models on LibTorch. In float32 training
// itself amplifies rounding, so there each step is compared from equal weights; in float64 fifty steps are compared freely.
#include <random>

#include "spec/distance.hpp"
#include "spec/instance.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

struct Case {
  std::string name;
  const stg_model* model;
  std::function<Tree(std::mt19937&)> batch;
};

TensorPtr random_classes(std::mt19937& random, int64_t rows, int64_t num_classes) {
  TensorPtr targets = allocate_tensor(int64, {rows});
  for (int64_t i = 0; i < rows; ++i) first_element<int64_t>(targets->view)[i] = static_cast<int64_t>(random()) % num_classes;
  return targets;
}

Tree mlp_batch(std::mt19937& random) {
  const int64_t rows = 23;  // a multiple of no device count
  TensorPtr inputs = allocate_tensor(float32, {rows, 6});
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < rows * 6; ++i) first_element<float>(inputs->view)[i] = normal(random);
  Dict batch;
  batch.emplace_back("inputs", std::move(inputs));
  batch.emplace_back("targets", random_classes(random, rows, 4));
  return make_tree(std::move(batch));
}

Tree cnn_batch(std::mt19937& random) {
  const int64_t rows = 9;
  TensorPtr inputs = allocate_tensor(uint8, {rows, 28, 28});
  for (int64_t i = 0; i < rows * 28 * 28; ++i) first_element<uint8_t>(inputs->view)[i] = static_cast<uint8_t>(random());
  Dict batch;
  batch.emplace_back("inputs", std::move(inputs));
  batch.emplace_back("targets", random_classes(random, rows, 10));
  return make_tree(std::move(batch));
}

std::vector<Case> cases() {
  static const stg_model* mlp = make_model(load_plugin(MLP_PLUGIN), "mlp",
                                           R"({"sizes": [6, 70, 70, 4], "activation": "tanh", "tied": true, "unused": true})")
                                    .release();
  static const stg_model* cnn = make_model(load_plugin(FASHION_CNN_PLUGIN), "fashion_cnn", R"({"channels": 2})").release();
  return {{"mlp", mlp, mlp_batch}, {"fashion_cnn", cnn, cnn_batch}};
}

const std::vector<std::string> optimizers{R"({"name": "sgd", "momentum": 0.9, "weight_decay": 0.01})", R"({"name": "adamw"})"};

std::string config(const std::string& optimizer, int num_devices, const std::string& precision) {
  // One thread per replica: OpenMP's waiting is slow where other programs share the cores.
  return concat("{\"devices\": ", num_devices, ", \"threads\": ", num_devices, ", \"seed\": 3, \"precision\": \"", precision,
                "\", \"optimizer\": ", optimizer, "}");
}

double lr_of(const std::string& optimizer) { return optimizer.find("sgd") != std::string::npos ? 0.05 : 1e-3; }

}  // namespace

TEST_CASE("in 64-true, 2, 3 and 7 devices equal one device over 50 steps") {
  for (const Case& c : cases()) {
    for (const std::string& optimizer : optimizers) {
      for (const int num_devices : {2, 3, 7}) {
        std::mt19937 random(11);
        Instance one("single_device", config(optimizer, 1, "64-true"));
        Instance several("data_parallel", config(optimizer, num_devices, "64-true"));
        one.setup(c.model);
        several.setup(c.model);
        for (int step = 0; step < 50; ++step) {
          Tree batch = c.batch(random);
          const double loss = one.train(Tree::view(batch.root()), lr_of(optimizer)).loss();
          CHECK(several.train(std::move(batch), lr_of(optimizer)).loss() == Approx(loss).epsilon(1e-10));
        }
        INFO(c.name << ", " << optimizer << ", " << num_devices << " devices, seed 11");
        CHECK(distance(*find(several.export_state().root(), "model"), *find(one.export_state().root(), "model")) < 1e-9);
      }
    }
  }
}

TEST_CASE("each step's gradients on 2, 3 and 7 devices equal one device's from equal weights") {
  const auto [precision, tolerance] = GENERATE(table<std::string, double>({{"32-true", 1e-5}, {"64-true", 1e-12}}));
  for (const Case& c : cases()) {
    for (const std::string& optimizer : optimizers) {
      for (const int num_devices : {2, 3, 7}) {
        std::mt19937 random(12);
        Instance one("single_device", config(optimizer, 1, precision));
        Instance several("data_parallel", config(optimizer, num_devices, precision));
        one.setup(c.model);
        several.setup(c.model);
        for (int step = 0; step < 6; ++step) {
          several.import_state(one.export_state(0));
          Tree batch = c.batch(random);
          one.training_step(Tree::view(batch.root()));
          several.training_step(std::move(batch));
          one.backward(true);
          several.backward(true);
          INFO(c.name << ", " << optimizer << ", " << num_devices << " devices, step " << step << ", seed 12");
          CHECK(distance(several.gradients().root(), one.gradients().root()) < tolerance);
          one.optimizer_step(lr_of(optimizer));
          several.optimizer_step(lr_of(optimizer));
          CHECK(distance(*find(several.export_state(0).root(), "model"), *find(one.export_state(0).root(), "model")) < 1e-4);
        }
      }
    }
  }
}

TEST_CASE(
    "in mixed precision each step's gradients on 2, 3 and 7 devices equal one device's but for what rounding does to that one") {
  const auto [precision, tolerance] = GENERATE(table<std::string, double>({{"16-mixed", 3e-3}, {"bf16-mixed", 1e-2}}));
  const std::string optimizer = optimizers[0];
  for (const Case& c : cases()) {
    for (const int num_devices : {2, 3, 7}) {
      std::mt19937 random(12);
      Instance exact("single_device", config(optimizer, 1, "32-true"));
      Instance one("single_device", config(optimizer, 1, precision));
      Instance several("data_parallel", config(optimizer, num_devices, precision));
      for (Instance* instance : {&exact, &one, &several}) instance->setup(c.model);
      // The scale that training begins with is too large for the CNN.
      if (precision == "16-mixed") one.import_state(with_scaler(one.export_state(), 4096, 0));
      for (int step = 0; step < 6; ++step) {
        several.import_state(one.export_state(0));
        exact.import_state(one.export_state(0));
        const Tree batch = c.batch(random);
        for (Instance* instance : {&exact, &one, &several}) {
          instance->training_step(Tree::view(batch.root()));
          instance->backward(true);
        }
        // Of tensors whose sums cancel, rounding to 8 or 11 bits leaves little, on one device as well.
        const double error = distance(one.gradients().root(), exact.gradients().root());
        const double difference = distance(several.gradients().root(), one.gradients().root());
        INFO(c.name << ", " << precision << ", " << num_devices << " devices, step " << step << ", seed 12");
        CHECK(difference < std::max(tolerance, 1.5 * error));
        CHECK(error > 1e-5);  // or it isn't mixed
        CHECK(one.optimizer_step(lr_of(optimizer)).outcome == STG_UPDATE_DONE);
      }
    }
  }
}

TEST_CASE("data_parallel on one device equals single_device bitwise, with models on LibTorch") {
  for (const Case& c : cases()) {
    for (const std::string& optimizer : optimizers) {
      std::mt19937 random(13);
      Instance one("single_device", config(optimizer, 1, "32-true"));
      Instance parallel("data_parallel", config(optimizer, 1, "32-true"));
      one.setup(c.model);
      parallel.setup(c.model);
      for (int step = 0; step < 10; ++step) {
        Tree batch = c.batch(random);
        one.train(Tree::view(batch.root()), lr_of(optimizer), STG_CLIP_NORM, 0.7);
        parallel.train(std::move(batch), lr_of(optimizer), STG_CLIP_NORM, 0.7);
      }
      CHECK(model_bytes(one.export_state()) == model_bytes(parallel.export_state()));
      CHECK(optimizer_bytes(one.export_state()) == optimizer_bytes(parallel.export_state()));
    }
  }
}

TEST_CASE("with dropout a run on two devices is reproducible bitwise, with one intra-op thread per replica and with two") {
  const ModelPtr model = make_model(load_plugin(MLP_PLUGIN), "mlp", R"({"sizes": [6, 64, 4], "dropout": 0.5})");
  for (const int num_threads : {2, 4}) {
    std::vector<std::string> results;
    for (int run = 0; run < 3; ++run) {
      std::mt19937 random(14);
      Instance instance("data_parallel",
                        concat("{\"devices\": 2, \"threads\": ", num_threads, ", \"optimizer\": ", optimizers[0], "}"));
      instance.setup(model.get());
      for (int step = 0; step < 5; ++step) instance.train(mlp_batch(random), 0.1);
      results.push_back(model_bytes(instance.export_state()));
    }
    CHECK(results[0] == results[1]);
    CHECK(results[0] == results[2]);
  }
}

TEST_CASE("accumulated, clipped and resumed training on LibTorch models is the same as unbroken") {
  for (const Case& c : cases()) {
    std::mt19937 random(15);
    std::vector<Tree> batches;
    for (int i = 0; i < 8; ++i) batches.push_back(c.batch(random));
    const auto run = [&](Instance& instance, size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        Tree batch = Tree::view(batches[i].root());
        if (i % 2 == 0) {
          instance.accumulate(std::move(batch));
        } else {
          instance.train(std::move(batch), 0.01, STG_CLIP_NORM, 0.5);
        }
      }
    };
    Instance whole("data_parallel", config(optimizers[1], 2, "32-true"));
    whole.setup(c.model);
    run(whole, 0, 8);
    Instance first("data_parallel", config(optimizers[1], 2, "32-true"));
    first.setup(c.model);
    run(first, 0, 4);
    Instance second("data_parallel", config(optimizers[1], 2, "32-true"));
    second.setup(c.model, STG_STAGE_FIT, first.export_state());
    run(second, 4, 8);
    CHECK(model_bytes(second.export_state()) == model_bytes(whole.export_state()));
  }
}

TEST_CASE("faults of LibTorch models are told with replica, device and text, and the next batch works") {
  for (const std::string fault : {"runtime_error", "c10_error", "int"}) {
    const std::string options =
        R"({"sizes": [6, 8, 4], "buffers": true, "fault_replica": 1, "fault_step": 0, "fault": ")" + fault + "\"}";
    const ModelPtr model = make_model(load_plugin(MLP_PLUGIN), "mlp", options);
    std::mt19937 random(16);
    Instance instance("data_parallel", config(optimizers[0], 2, "32-true"));
    instance.setup(model.get());
    const std::string before = model_bytes(instance.export_state());
    const Error error = error_of([&] { instance.train(mlp_batch(random), 0.1); });
    CHECK(error.replica == 1);
    CHECK(error.device.index == 1);
    if (fault != "int") CHECK_THAT(error.message, Catch::Contains("told to fail"));
    CHECK(model_bytes(instance.export_state()) == before);
    Tree batch = mlp_batch(random);
    stg_update_args update = sized<stg_update_args>();
    update.lr = 0.1;
    stg_step_args args = sized<stg_step_args>();
    args.batch = batch.argument();
    args.global_step = 1;
    args.flags = STG_BATCH_LAST_MICRO_BATCH;
    args.update = &update;
    stg_step_result result = sized<stg_step_result>();
    check(instance.api.train_batch(instance.self, nullptr, &args, &result, nullptr));
    const Tree outputs{result.outputs};
    CHECK(model_bytes(instance.export_state()) != before);
  }
}
