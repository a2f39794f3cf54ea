// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Gradients": sparse ones, as any model may give them.
#include <cmath>
#include <limits>
#include <numeric>

#include "spec/sparse_model.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

std::string config(int num_devices, const std::string& optimizer) {
  return concat("{\"devices\": ", num_devices, optimizer.empty() ? "" : R"(, "optimizer": )", optimizer, "}");
}

std::unique_ptr<ToyModel> table_of(Kind kind, stg_dtype dtype = float32) {
  TableOptions options;
  options.kind = always(kind);
  options.dtype = dtype;
  return table_model(options);
}

std::vector<double> gradient_of(Instance& instance) { return numbers(*find(instance.gradients().root(), "table")); }

// Micro-batches whose shares have some rows in common, none twice in one share.
const std::vector<std::vector<double>> window{{3, 1, 39, 3, 0, 7}, {7, 3, 20, 21, 3, 1}, {5, 39, 1, 1}};

// "table", (4, 2), all 1, with the gradient that the test gives.
std::unique_ptr<ToyModel> model_giving(std::function<ToySparse(const stg_step_context&)> give) {
  return std::make_unique<ToyModel>(std::vector<ToyParameter>{{{"table"}, {4, 2}, std::vector<double>(8, 1)}},
                                    [give](ToyReplica&, const stg_step_context& context, const stg_value&) {
                                      ToyStep step;
                                      step.outputs = scalar(0);
                                      step.sparse_gradients[0] = give(context);
                                      return step;
                                    });
}

}  // namespace

TEST_CASE("sparse gradients are summed over micro-batches and replicas with the bits of dense ones, and divided once") {
  const stg_dtype bfloat16{STG_DTYPE_BFLOAT, 16, 1};
  const stg_dtype float16{STG_DTYPE_FLOAT, 16, 1};
  for (const stg_dtype dtype : {float32, float64, bfloat16, float16}) {
    for (const int num_devices : {1, 2, 3}) {
      std::vector<std::vector<double>> results;
      for (const Kind kind : {Kind::sparse, Kind::dense}) {
        const auto model = table_of(kind, dtype);
        Instance instance("data_parallel", config(num_devices, ""));
        instance.setup(*model);
        for (const auto& batch : window) {
          instance.training_step(batch_of(batch));
          instance.backward(false);
        }
        results.push_back(gradient_of(instance));
        CHECK(gradient_of(instance) == results.back());
      }
      INFO(dtype_name(dtype) << " on " << num_devices);
      CHECK(results[0] == results[1]);
      CHECK(results[0][5 * 39] != 0);
      CHECK(results[0][5 * 38] == 0);
    }
  }
}

TEST_CASE("in mixed precision sparse gradients are weighted, unscaled and looked at for overflows as dense ones are") {
  for (const std::string precision : {"bf16-mixed", "16-mixed"}) {
    for (const bool overflows : {false, true}) {
      std::vector<std::string> results;
      for (const Kind kind : {Kind::sparse, Kind::dense}) {
        const auto model = table_of(kind);
        if (overflows) {
          const auto step = model->on_step;
          model->on_step = [step](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
            ToyStep made = step(replica, context, batch);
            if (context.replica != 1) return made;
            if (!made.gradients[0].empty()) made.gradients[0][5] = INFINITY;
            for (auto& [index, sparse] : made.sparse_gradients) *first_element<float>(sparse.values->view) = INFINITY;
            return made;
          };
        }
        Instance instance("data_parallel",
                          R"({"devices": 3, "optimizer": {"name": "sgd", "lr": 1}, "precision": ")" + precision + "\"}");
        instance.setup(*model);
        instance.accumulate(batch_of({1, 2, 3, 3, 1, 2, 39}));
        const StepOutcome outcome = instance.train(batch_of({39, 7, 1, 20}), 0.1);
        CHECK(outcome.update.outcome == (overflows && precision == "16-mixed" ? STG_UPDATE_SKIPPED_OVERFLOW : STG_UPDATE_DONE));
        if (!overflows) results.push_back(model_bytes(instance.export_state()));
        if (overflows && precision == "16-mixed") CHECK(instance.values("table") == std::vector<double>(200, 1));
        if (!overflows) CHECK(instance.values("table") != std::vector<double>(200, 1));
      }
      if (!overflows) CHECK(results[0] == results[1]);
    }
  }
}

TEST_CASE("a row that stands several times in one sparse gradient counts each time") {
  const auto model = model_giving([](const stg_step_context&) {
    return sparse_rows({3, 0, 3, 3}, {1, 2, 10, 20, 3, 4, 5, 6}, {4, 2});
  });
  for (const int num_devices : {1, 2}) {
    Instance instance("data_parallel", config(num_devices, R"({"name": "sgd"})"));
    instance.setup(*model);
    instance.train(batch_of({1, 1}), 0.5);
    CHECK(instance.values("table") == std::vector<double>{-4, -9, 1, 1, 1, 1, -3.5, -5});
  }
}

TEST_CASE("sparse gradients may have several sparse dimensions, or none") {
  // Entries (3, 0) twice, (0, 1), (2, 1).
  const auto both = [](const stg_step_context&) {
    return ToySparse{tensor_of({3, 0, 3, 2, 0, 1, 0, 1}, {2, 4}, int64), tensor_of({1, 2, 4, 8}, {4}), {4, 2}};
  };
  const auto none = [](const stg_step_context&) {
    return ToySparse{
        tensor_of({}, {0, 2}, int64), tensor_of({1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 1, 1, 1, 1, 1, 1}, {2, 4, 2}), {4, 2}};
  };
  const auto model = model_giving(both);
  const auto whole = model_giving(none);
  for (const std::string optimizer : {R"({"name": "sgd"})", R"({"name": "sgd", "momentum": 0.5})"}) {
    Instance instance("data_parallel", config(2, optimizer));
    instance.setup(*model);
    instance.train(batch_of({1, 1}));
    CHECK(instance.values("table") == std::vector<double>{1, -1, 1, 1, 1, -7, -4, 1});
    instance.teardown();
    instance.setup(*whole);
    instance.train(batch_of({1, 1}));
    CHECK(instance.values("table") == std::vector<double>{-1, -2, -3, -4, -5, -6, -7, -8});
  }
}

TEST_CASE("micro-batches and replicas whose sparse gradients have different sparse dimensions are summed") {
  for (const bool by_replica : {true, false}) {
    bool is_first = true;
    const auto model = model_giving([&](const stg_step_context& context) -> ToySparse {
      if (by_replica ? context.replica == 0 : is_first) return sparse_rows({2}, {1, 2}, {4, 2});
      return {tensor_of({2, 1}, {2, 1}, int64), tensor_of({4}, {1}), {4, 2}};
    });
    Instance instance("data_parallel", config(by_replica ? 2 : 1, R"({"name": "sgd"})"));
    instance.setup(*model);
    if (!by_replica) instance.accumulate(batch_of({1}));
    is_first = false;
    instance.train(by_replica ? batch_of({1, 1}) : batch_of({1}), 2);
    CHECK(instance.values("table") == std::vector<double>{1, 1, 1, 1, 0, -5, 1, 1});
  }
}

TEST_CASE("SGD and Adagrad update the rows of a sparse gradient as PyTorch does, and touch no other") {
  for (const bool is_adagrad : {false, true}) {
    for (const double sign : {1.0, -1.0}) {
      for (const int num_devices : {1, 3}) {
        const auto model = table_of(Kind::sparse);
        // An element that may not be read: infinity - infinity isn't infinity.
        model->parameters[0].values[5 * 38] = std::numeric_limits<double>::infinity();
        Instance instance(
            "data_parallel",
            config(num_devices,
                   concat(is_adagrad ? R"({"name": "adagrad", "lr_decay": 0.1, "initial_accumulator_value": 0.25, "eps": 0)"
                                     : R"({"name": "sgd")",
                          sign < 0 ? R"(, "maximize": true})" : "}")));
        instance.setup(*model);
        std::vector<double> weights = model->parameters[0].values;
        std::vector<double> sums(weights.size(), 0.25);
        const double lr = 0.3;
        for (size_t step = 0; step < window.size(); ++step) {
          instance.train(batch_of(window[step]), lr);
          std::vector<double> gradient(weights.size());
          for (const double x : window[step]) {
            for (int64_t c = 0; c < 5; ++c) {
              gradient[static_cast<size_t>(5 * static_cast<int64_t>(x) + c)] +=
                  sign * table_gradient(x, c) / static_cast<double>(window[step].size());
            }
          }
          for (size_t i = 0; i < weights.size(); ++i) {
            if (gradient[i] == 0) continue;
            sums[i] += gradient[i] * gradient[i];
            weights[i] -=
                is_adagrad ? lr / (1 + static_cast<double>(step) * 0.1) * gradient[i] / std::sqrt(sums[i]) : lr * gradient[i];
          }
        }
        const std::vector<double> moved = instance.values("table");
        for (size_t i = 0; i < weights.size(); ++i) CHECK(moved[i] == Approx(weights[i]).epsilon(1e-5));
      }
    }
  }
}

TEST_CASE("the update of sparse gradients doesn't depend on the number of workers") {
  TableOptions options;
  options.num_rows = 3000;
  options.num_columns = 33;
  const auto model = table_model(options);
  std::vector<double> looked_up(1000);
  std::iota(looked_up.begin(), looked_up.end(), 700);
  for (const std::string optimizer : {R"({"name": "sgd"})", R"({"name": "adagrad"})"}) {
    const auto run = [&](const std::string& strategy, int num_devices, uint64_t clip) {
      Instance instance(strategy, config(num_devices, optimizer));
      instance.setup(*model);
      for (int step = 0; step < 2; ++step) {
        instance.train(batch_of(looked_up), 0.1, clip, 0.01);
      }
      return model_bytes(instance.export_state()) + optimizer_bytes(instance.export_state());
    };
    model->table.split = nullptr;
    for (const uint64_t clip : {STG_CLIP_NONE, STG_CLIP_NORM, STG_CLIP_VALUE}) {
      const std::string expected = run("single_device", 1, clip);
      // All to one replica; the other workers reduce and update their part.
      model->table.split = [](void*, stg_replica*, const stg_tree* batch, uint64_t, stg_tree* shares, uint64_t* num_filled) {
        return guard([&] {
          shares[0] = copy_tree(batch->root).give();
          *num_filled = 1;
        });
      };
      CHECK(run("data_parallel", 1, clip) == expected);
      CHECK(run("data_parallel", 2, clip) == expected);
      CHECK(run("data_parallel", 7, clip) == expected);
    }
  }
}

TEST_CASE("SGD with momentum moves all rows that ever had a sparse gradient, with the bits of dense ones") {
  for (const std::string optimizer :
       {R"({"name": "sgd", "momentum": 0.9})", R"({"name": "sgd", "momentum": 0.9, "nesterov": true, "maximize": true})",
        R"({"name": "sgd", "momentum": 0.5, "dampening": 0.5})"}) {
    for (const int num_devices : {1, 3}) {
      std::vector<std::string> results;
      for (const Kind kind : {Kind::sparse, Kind::dense}) {
        const auto model = table_of(kind);
        Instance instance("data_parallel", config(num_devices, optimizer));
        instance.setup(*model);
        for (const auto& batch : window) instance.train(batch_of(batch), 0.1, STG_CLIP_NORM, 0.5);
        instance.train(batch_of({11}), 0.1);
        results.push_back(model_bytes(instance.export_state()) + optimizer_bytes(instance.export_state()));
      }
      CHECK(results[0] == results[1]);
    }
  }
}

TEST_CASE("optimizers that don't take sparse gradients refuse them before any weight changes") {
  struct Refusal {
    std::string optimizer, name;
  };
  for (const Refusal& refusal :
       std::vector<Refusal>{{R"({"name": "adam"})", "adam"},
                            {R"({"name": "adamw"})", "adamw"},
                            {R"({"name": "rmsprop"})", "rmsprop"},
                            {R"({"name": "sgd", "weight_decay": 0.1})", "sgd with a weight_decay of 0.1"},
                            {R"({"name": "sgd", "weight_decay": 0.1, "momentum": 0.9})", "sgd with a weight_decay of 0.1"},
                            {R"({"name": "adagrad", "weight_decay": 0.1})", "adagrad with a weight_decay"}}) {
    Kind kind = Kind::sparse;
    TableOptions options;
    options.kind = [&kind](const stg_step_context&) { return kind; };
    const auto model = table_model(options);
    model->buffers.push_back({{"calls"}, {1}, {0}});
    const auto step = model->on_step;
    model->on_step = [step](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
      *first_element<float>(replica.buffers[0]->view) += 1;
      return step(replica, context, batch);
    };
    Instance instance("data_parallel", config(2, refusal.optimizer));
    instance.setup(*model);
    const std::string before = model_bytes(instance.export_state());
    for (const int way : {0, 1, 2}) {
      const Error error = error_of([&] {
        if (way == 0) instance.train(batch_of({1, 2}), 0.1, STG_CLIP_NORM, 1);
        instance.training_step(batch_of({1, 2}));
        instance.backward(way == 1);
        instance.optimizer_step(0.1);
      });
      INFO(refusal.optimizer << ", " << error.message);
      CHECK(error.code == STG_FAILED_PRECONDITION);
      CHECK_THAT(error.message, Catch::Contains("table has a sparse gradient") && Catch::Contains(refusal.name) &&
                                    Catch::Contains("sparse=False") && Catch::Contains("adagrad"));
      if (way == 0) CHECK(model_bytes(instance.export_state()) == before);
      CHECK(instance.values("table") == std::vector<double>(200, 1));
      CHECK(instance.status().num_micro_batches == 0);
    }
    // They can be looked at; and dense ones are taken.
    instance.training_step(batch_of({1, 2}));
    instance.backward(false);
    CHECK(gradient_of(instance)[5] == Approx(table_gradient(1, 0) / 2));
    check(instance.api.zero_grad(instance.self, nullptr));
    kind = Kind::dense;
    CHECK(instance.train(batch_of({1, 2}), 0.1).update.outcome == STG_UPDATE_DONE);
    CHECK(instance.values("table")[5] != 1);
  }
}
