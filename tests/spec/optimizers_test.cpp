// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Construction": the optimizers' arithmetic, against PyTorch's formulas written out.
#include <cmath>

#include "spec/instance.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

struct Recipe {
  std::string json;
  std::string name;
  double weight_decay = 0, momentum = 0, dampening = 0;
  bool nesterov = false, maximize = false, amsgrad = false;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double alpha = 0.99, lr_decay = 0, initial_accumulator_value = 0;
  bool centered = false;
};

// One element, as torch.optim's documentation has it.
class Reference {
 public:
  explicit Reference(const Recipe& recipe, double weight) : r(recipe), w(weight), v(recipe.initial_accumulator_value) {}

  void update(double g, double lr) {
    ++step;
    if (r.maximize) g = -g;
    if (r.name == "sgd") return update_sgd(g, lr);
    if (r.name == "rmsprop") return update_rmsprop(g, lr);
    if (r.name == "adagrad") return update_adagrad(g, lr);
    update_adam(g, lr);
  }

  Recipe r;
  double w;

 private:
  void update_sgd(double g, double lr) {
    g += r.weight_decay * w;
    if (r.momentum != 0) {
      buffer = step == 1 ? g : r.momentum * buffer + (1 - r.dampening) * g;
      g = r.nesterov ? g + r.momentum * buffer : buffer;
    }
    w -= lr * g;
  }

  void update_adam(double g, double lr) {
    if (r.name == "adamw") {
      w -= lr * r.weight_decay * w;
    } else {
      g += r.weight_decay * w;
    }
    m = r.beta1 * m + (1 - r.beta1) * g;
    v = r.beta2 * v + (1 - r.beta2) * g * g;
    largest = std::max(largest, v);
    const double second = (r.amsgrad ? largest : v) / (1 - std::pow(r.beta2, step));
    w -= lr * (m / (1 - std::pow(r.beta1, step))) / (std::sqrt(second) + r.eps);
  }

  void update_rmsprop(double g, double lr) {
    g += r.weight_decay * w;
    v = r.alpha * v + (1 - r.alpha) * g * g;
    m = r.centered ? r.alpha * m + (1 - r.alpha) * g : 0;
    buffer = r.momentum * buffer + g / (std::sqrt(v - m * m) + r.eps);
    w -= lr * buffer;
  }

  void update_adagrad(double g, double lr) {
    g += r.weight_decay * w;
    v += g * g;
    w -= lr / (1 + (step - 1) * r.lr_decay) * g / (std::sqrt(v) + r.eps);
  }

  int step = 0;
  double v;
  double buffer = 0, m = 0, largest = 0;
};

std::vector<Recipe> recipes() {
  Recipe sgd{R"({"name": "sgd"})", "sgd"};
  Recipe momentum{R"({"name": "sgd", "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1})", "sgd"};
  momentum.momentum = 0.8;
  momentum.dampening = 0.3;
  momentum.weight_decay = 0.1;
  Recipe nesterov{R"({"name": "sgd", "momentum": 0.8, "nesterov": true, "maximize": true})", "sgd"};
  nesterov.momentum = 0.8;
  nesterov.nesterov = nesterov.maximize = true;
  Recipe adam{R"({"name": "adam", "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1})", "adam"};
  adam.beta1 = 0.8;
  adam.beta2 = 0.95;
  adam.eps = 1e-6;
  adam.weight_decay = 0.1;
  Recipe adamw{R"({"name": "adamw"})", "adamw"};
  adamw.weight_decay = 0.01;
  Recipe amsgrad{R"({"name": "adamw", "amsgrad": true, "maximize": true, "weight_decay": 0})", "adamw"};
  amsgrad.amsgrad = amsgrad.maximize = true;
  Recipe rmsprop{R"({"name": "rmsprop"})", "rmsprop"};
  Recipe centered{
      R"({"name": "rmsprop", "alpha": 0.9, "eps": 1e-5, "momentum": 0.7, "centered": true, "weight_decay": 0.1, "maximize": true})",
      "rmsprop"};
  centered.alpha = 0.9;
  centered.eps = 1e-5;
  centered.momentum = 0.7;
  centered.weight_decay = 0.1;
  centered.centered = centered.maximize = true;
  Recipe adagrad{R"({"name": "adagrad"})", "adagrad"};
  adagrad.eps = 1e-10;
  Recipe decaying{
      R"({"name": "adagrad", "lr_decay": 0.1, "eps": 1e-6, "initial_accumulator_value": 0.3, "weight_decay": 0.1, "maximize": true})",
      "adagrad"};
  decaying.lr_decay = 0.1;
  decaying.eps = 1e-6;
  decaying.initial_accumulator_value = 0.3;
  decaying.weight_decay = 0.1;
  decaying.maximize = true;
  return {sgd, momentum, nesterov, adam, adamw, amsgrad, rmsprop, centered, adagrad, decaying};
}

constexpr int64_t num_elements = 10007;  // over two cuts at 4096, and a tail

double gradient_of(int64_t element, int step) {
  return std::sin(0.37 * static_cast<double>(element) + step) * (step == 2 ? 0.1 : 1.0);
}

}  // namespace

TEST_CASE("SGD, Adam, AdamW, RMSprop and Adagrad do what PyTorch's formulas say, on any number of devices") {
  std::vector<double> initial(num_elements);
  for (size_t i = 0; i < initial.size(); ++i) initial[i] = 1 + 0.0001 * static_cast<double>(i);
  for (const Recipe& recipe : recipes()) {
    for (const int num_devices : {1, 3}) {
      int step = 0;
      std::vector<ToyParameter> parameters{{{"weight"}, {num_elements}, initial}, {{"late"}, {1}, {1}}};
      ToyModel model(parameters, [&step](ToyReplica&, const stg_step_context&, const stg_value&) {
        ToyStep made;
        made.outputs = scalar(0);
        made.gradients.resize(2);
        for (int64_t i = 0; i < num_elements; ++i) made.gradients[0].push_back(gradient_of(i, step));
        if (step > 0) made.gradients[1] = {0.5};  // its first gradient comes a step later
        return made;
      });
      Instance instance("data_parallel",
                        concat("{\"devices\": ", num_devices, R"(, "precision": "64-true", "optimizer": )", recipe.json, "}"));
      instance.setup(model);
      std::vector<Reference> references;
      for (const double value : initial) references.emplace_back(recipe, value);
      Reference late(recipe, 1);
      for (; step < 4; ++step) {
        instance.train(batch_of({1, 2, 3, 4}), 0.01);
        for (int64_t i = 0; i < num_elements; ++i) references[static_cast<size_t>(i)].update(gradient_of(i, step), 0.01);
        if (step > 0) late.update(0.5, 0.01);
      }
      INFO(recipe.json << " on " << num_devices);
      const std::vector<double> weights = instance.values("weight");
      double worst = 0;
      for (size_t i = 0; i < weights.size(); ++i) worst = std::max(worst, std::abs(weights[i] - references[i].w));
      CHECK(worst < 1e-12);
      CHECK(instance.value("late") == Approx(late.w).epsilon(1e-12));
    }
  }
}

TEST_CASE("half-precision parameters are reduced in float32 and updated in their own type") {
  for (const stg_dtype dtype : {stg_dtype{STG_DTYPE_FLOAT, 16, 1}, stg_dtype{STG_DTYPE_BFLOAT, 16, 1}}) {
    const auto model = linear_model(1, dtype);
    Instance instance("data_parallel", R"({"devices": 2, "optimizer": {"name": "sgd"}})");
    instance.setup(*model);
    instance.train(batch_of({0.25, 0.5, 0.75}), 0.5);
    CHECK(instance.value("weight") == 0.75);
    instance.accumulate(batch_of({0.5, 0.5}));
    instance.train(batch_of({0.5, 0.5}), 0.5, STG_CLIP_NORM, 0.25);
    CHECK(instance.value("weight") == 0.625);
  }
}

TEST_CASE("a parameter whose memory order isn't row-major is updated where it lies") {
  // (2, 3) with strides (1, 2), and gradients that come row-major.
  std::vector<ToyParameter> parameters{{{"weight"}, {2, 3}, {0, 0, 0, 0, 0, 0}}};
  ToyModel model(parameters, [](ToyReplica&, const stg_step_context&, const stg_value&) {
    ToyStep step;
    step.outputs = scalar(0);
    step.gradients = {{1, 2, 3, 4, 5, 6}};
    return step;
  });
  static const auto original = model.table.replicate;
  model.table.replicate = [](void* self, const stg_replicate_args* args, stg_replica** out) -> stg_error* {
    if (stg_error* error = original(self, args, out)) return error;
    TensorPtr& weight = reinterpret_cast<ToyReplica*>(*out)->parameters[0];
    const std::shared_ptr<stg_tensor> memory{weight.release(), TensorRelease{}};
    weight = make_strided_tensor(memory, memory->view.data, float32, {2, 3}, {1, 2}, 0, {STG_DEVICE_CPU, 0});
    return nullptr;
  };
  for (const int num_devices : {1, 2}) {
    Instance instance("data_parallel",
                      concat("{\"devices\": ", num_devices, R"(, "optimizer": {"name": "sgd", "momentum": 0.5}})"));
    instance.setup(model);
    for (int step = 0; step < 2; ++step) {
      instance.accumulate(batch_of({1, 1}));
      instance.train(batch_of({1, 1}));
    }
    CHECK(instance.values("weight") == std::vector<double>{-2.5, -5, -7.5, -10, -12.5, -15});
    const Tree state = instance.export_state(0);
    CHECK(numbers(*find(*find(*find(*find(state.root(), "optimizer"), "per_parameter"), "weight"), "momentum_buffer")) ==
          std::vector<double>{1.5, 3, 4.5, 6, 7.5, 9});
  }
}
