// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Gradients": what sparse gradients have to do with the other rules; and what a model may get wrong about them.
#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>

#include "spec/sparse_model.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

std::string config(int num_devices, const std::string& optimizer) {
  return concat("{\"devices\": ", num_devices, optimizer.empty() ? "" : R"(, "optimizer": )", optimizer, "}");
}

// A tensor that counts how often it is released.
struct Counted {
  explicit Counted(TensorPtr from) : memory(std::move(from)), tensor(*memory) {
    tensor.owner = this;
    tensor.deleter = [](stg_tensor* self) { ++static_cast<Counted*>(self->owner)->num_released; };
  }
  TensorPtr memory;
  stg_tensor tensor;
  int num_released = 0;
};

// "table", (4, 2), all 1, whose backward is the test's own; and "other", with a gradient of 1.
class OwnBackward {
 public:
  using Report = std::function<stg_error*(const stg_gradient_sink& sink)>;

  explicit OwnBackward(Report report) : report_(std::move(report)) {
    ToyParameter table{{"table"}, {4, 2}, std::vector<double>(8, 1)};
    model = std::make_unique<ToyModel>(std::vector<ToyParameter>{table, {{"other"}, {1}, {1}}},
                                       [](ToyReplica&, const stg_step_context&, const stg_value&) {
                                         ToyStep step;
                                         step.outputs = scalar(0);
                                         return step;
                                       });
    original_ = model->table;
    model->table.self = this;
    model->table.retain = nullptr;
    model->table.release = nullptr;
    model->table.replicate = [](void* self, const stg_replicate_args* args, stg_replica** out) {
      return of(self).original_.replicate(of(self).model.get(), args, out);
    };
    model->table.destroy_replica = [](void* self, stg_replica* replica) {
      of(self).original_.destroy_replica(of(self).model.get(), replica);
    };
    model->table.describe = [](void* self, stg_replica* replica, stg_model_description* out) {
      return of(self).original_.describe(of(self).model.get(), replica, out);
    };
    model->table.step = [](void* self, stg_replica* replica, const stg_step_context* context, stg_tree* batch,
                           stg_model_step_result* result) {
      return of(self).original_.step(of(self).model.get(), replica, context, batch, result);
    };
    model->table.release_graph = [](void* self, stg_replica* replica, stg_graph* graph) {
      of(self).original_.release_graph(of(self).model.get(), replica, graph);
    };
    model->table.backward = [](void* self, stg_replica* replica, stg_graph* graph, double, uint32_t,
                               const stg_gradient_sink* sink) -> stg_error* {
      of(self).original_.release_graph(of(self).model.get(), replica, graph);
      if (stg_error* error = of(self).report_(*sink)) return error;
      return sink->ready(sink->self, 1, tensor_of({1}, {1}).release(), nullptr);
    };
  }

  std::unique_ptr<ToyModel> model;

 private:
  static OwnBackward& of(void* self) { return *static_cast<OwnBackward*>(self); }

  Report report_;
  stg_model original_{};
};

}  // namespace

TEST_CASE("where one replica's gradient is dense the parameter's is, in whatever order they come") {
  for (const int dense_replica : {0, 1, 2}) {
    for (const std::string optimizer : {R"({"name": "adam"})", R"({"name": "sgd"})", R"({"name": "sgd", "momentum": 0.5})"}) {
      std::vector<std::string> results;
      for (const bool is_mixed : {true, false}) {
        TableOptions options;
        options.kind = [=](const stg_step_context& context) {
          return is_mixed && context.replica != dense_replica ? Kind::sparse : Kind::dense;
        };
        const auto model = table_model(options);
        Instance instance("data_parallel", config(3, optimizer));
        instance.setup(*model);
        instance.train(batch_of({1, 2, 1, 4, 39, 1}), 0.1);
        results.push_back(model_bytes(instance.export_state()) + optimizer_bytes(instance.export_state()));
      }
      CHECK(results[0] == results[1]);
    }
  }
}

TEST_CASE("a micro-batch with a dense gradient makes a window's dense, before or after a sparse one") {
  for (const int64_t dense_batch : {0, 1, 2}) {
    std::vector<std::string> results;
    for (const bool is_mixed : {true, false}) {
      int64_t batch = 0;
      TableOptions options;
      options.kind = [&](const stg_step_context&) { return is_mixed && batch != dense_batch ? Kind::sparse : Kind::dense; };
      const auto model = table_model(options);
      Instance instance("data_parallel", config(2, R"({"name": "adamw"})"));
      instance.setup(*model);
      for (; batch < 2; ++batch) instance.accumulate(batch_of({1, 2, 1, 39}));
      instance.train(batch_of({39, 1, 2}), 0.1);
      results.push_back(model_bytes(instance.export_state()) + optimizer_bytes(instance.export_state()));
    }
    CHECK(results[0] == results[1]);
  }
}

TEST_CASE("a sparse gradient counts as zero on a replica that has none") {
  for (const int without : {0, 1}) {
    TableOptions options;
    options.kind = [=](const stg_step_context& context) { return context.replica == without ? Kind::none : Kind::sparse; };
    const auto model = table_model(options);
    Instance instance("data_parallel", config(2, R"({"name": "sgd"})"));
    instance.setup(*model);
    instance.train(batch_of({1, 1, 1, 1, 1}));
    const double share = without == 0 ? 2.0 / 5 : 3.0 / 5;
    CHECK(instance.values("table")[5] == Approx(1 - table_gradient(1, 0) * share));
    CHECK(instance.values("table")[0] == 1);
  }
}

TEST_CASE("clipping by norm and by value acts on a sparse gradient as on a dense one") {
  for (const uint64_t clip : {STG_CLIP_NORM, STG_CLIP_VALUE}) {
    for (const int num_devices : {1, 3}) {
      std::vector<std::vector<double>> results;
      std::vector<double> norms;
      for (const Kind kind : {Kind::sparse, Kind::dense}) {
        TableOptions options;
        options.kind = always(kind);
        const auto model = table_model(options);
        Instance instance("data_parallel", config(num_devices, R"({"name": "sgd"})"));
        instance.setup(*model);
        norms.push_back(instance.train(batch_of({1, 2, 3, 1, 39, 2, 5}), 1, clip, 0.125).update.gradient_norm);
        results.push_back(instance.values("table"));
      }
      CHECK(results[0][5] != 1);
      for (size_t i = 0; i < results[0].size(); ++i) CHECK(results[0][i] == Approx(results[1][i]).epsilon(1e-6));
      if (clip == STG_CLIP_NORM) CHECK(norms[0] == Approx(norms[1]).epsilon(1e-12));
      double change = 0;
      double largest = 0;
      for (const double value : results[0]) {
        change += (value - 1) * (value - 1);
        largest = std::max(largest, std::abs(value - 1));
      }
      CHECK((clip == STG_CLIP_NORM ? std::sqrt(change) : largest) == Approx(0.125).epsilon(1e-5));
    }
  }
}

TEST_CASE("a sparse gradient without rows is a gradient all the same") {
  OwnBackward own([](const stg_gradient_sink& sink) {
    const std::vector<int64_t> shape{4, 2};
    return sink.ready_sparse(sink.self, 0, tensor_of({}, {1, 0}, int64).release(), tensor_of({}, {0, 2}).release(), shape.data(),
                             2, nullptr);
  });
  for (const std::string optimizer : {R"({"name": "adagrad"})", R"({"name": "sgd"})", R"({"name": "sgd", "momentum": 0.9})"}) {
    Instance instance("data_parallel", config(2, optimizer));
    instance.setup(*own.model);
    instance.train(batch_of({1, 1}), 0.5, STG_CLIP_NORM, 100);
    CHECK(instance.values("table") == std::vector<double>(8, 1));
    CHECK(instance.value("other") == 0.5);
    if (optimizer.find("adagrad") != std::string::npos) {
      const Tree state = instance.export_state();
      const stg_value& slots = *find(*find(*find(state.root(), "optimizer"), "per_parameter"), "table");
      CHECK(numbers(*find(slots, "step")) == std::vector<double>{1});
    }
    instance.training_step(batch_of({1, 1}));
    instance.backward(true);
    CHECK(numbers(*find(instance.gradients().root(), "table")) == std::vector<double>(8, 0));
  }
}

TEST_CASE("gradients gives a sparse gradient as a dense tensor, and the update is the same afterwards") {
  TableOptions options;
  const auto model = table_model(options);
  std::vector<std::string> results;
  for (const bool looks : {true, false}) {
    Instance instance("data_parallel", config(2, R"({"name": "adagrad", "eps": 0})"));
    instance.setup(*model);
    for (const double row : {7.0, 8.0}) {
      instance.training_step(batch_of({row, row, 3}));
      instance.backward(false);
      if (looks) {
        const Tree gradients = instance.gradients();
        const stg_value& table = *find(gradients.root(), "table");
        CHECK(shape(table) == std::vector<int64_t>{40, 5});
        for (int64_t i = 0; i < 200; ++i) {
          const double x = static_cast<double>(i / 5);
          const double count = x == row ? 2 : x == 3 ? 1 : 0;
          CHECK(read_element(table.as.tensor->view, i) == Approx(table_gradient(x, i % 5) * count / 3).margin(1e-7));
        }
      }
      instance.optimizer_step(0.1);
    }
    results.push_back(model_bytes(instance.export_state()));
  }
  CHECK(results[0] == results[1]);
}

TEST_CASE("Adagrad's state is the dense one's, also for sparse gradients, and a resumed run is bitwise the unbroken one") {
  TableOptions options;
  const auto model = table_model(options);
  const std::string adagrad = R"({"name": "adagrad", "initial_accumulator_value": 0.5, "lr_decay": 0.1})";
  Instance whole("data_parallel", config(2, adagrad));
  whole.setup(*model);
  whole.train(batch_of({1, 2, 3}), 0.1);
  const Tree state = whole.export_state();
  const stg_value& sum = *find(*find(*find(*find(state.root(), "optimizer"), "per_parameter"), "table"), "sum");
  CHECK(shape(sum) == std::vector<int64_t>{40, 5});
  CHECK(numbers(sum)[0] == 0.5);
  CHECK(numbers(sum)[5] == Approx(0.5 + std::pow(table_gradient(1, 0) / 3, 2)));
  whole.train(batch_of({3, 39}), 0.1);
  Instance resumed("data_parallel", config(2, adagrad));
  resumed.setup(&model->table, STG_STAGE_FIT, copy_tree(state.root()));
  resumed.train(batch_of({3, 39}), 0.1);
  CHECK(model_bytes(resumed.export_state()) == model_bytes(whole.export_state()));
  CHECK(optimizer_bytes(resumed.export_state()) == optimizer_bytes(whole.export_state()));
}

TEST_CASE("detect_anomaly names a parameter whose sparse gradient has a NaN") {
  OwnBackward own([](const stg_gradient_sink& sink) {
    const std::vector<int64_t> shape{4, 2};
    return sink.ready_sparse(sink.self, 0, tensor_of({2}, {1, 1}, int64).release(),
                             tensor_of({1, std::nan("")}, {1, 2}).release(), shape.data(), 2, nullptr);
  });
  Instance instance("data_parallel", config(2, R"({"name": "sgd"})"));
  instance.setup(*own.model);
  const Error error = error_of([&] {
    instance.training_step(batch_of({1, 1}));
    check(instance.api.backward(instance.self, nullptr, STG_BATCH_LAST_MICRO_BATCH | STG_BATCH_DETECT_ANOMALY));
  });
  CHECK(error.code == STG_OUT_OF_RANGE);
  CHECK_THAT(error.message, Catch::Contains("table") && Catch::Contains("NaN"));
  CHECK(instance.values("table") == std::vector<double>(8, 1));
}

TEST_CASE("a parameter that isn't row-major has the dense gradient that its sparse one says") {
  TableOptions options;
  options.num_rows = 4;
  options.num_columns = 2;
  const auto model = table_model(options);
  static const auto original = model->table.replicate;
  model->table.replicate = [](void* self, const stg_replicate_args* args, stg_replica** out) -> stg_error* {
    if (stg_error* error = original(self, args, out)) return error;
    TensorPtr& table = reinterpret_cast<ToyReplica*>(*out)->parameters[0];
    const std::shared_ptr<stg_tensor> memory{table.release(), TensorRelease{}};
    table = make_strided_tensor(memory, memory->view.data, float32, {4, 2}, {1, 4}, 0, {STG_DEVICE_CPU, 0});
    return nullptr;
  };
  Instance instance("data_parallel", config(2, R"({"name": "adam", "eps": 1e-12})"));
  instance.setup(*model);
  instance.accumulate(batch_of({3, 3}));
  instance.train(batch_of({3, 3}), 0.5);
  for (int64_t c : {0, 1}) {
    CHECK(instance.values("table")[static_cast<size_t>(c)] == 1);
    CHECK(instance.values("table")[static_cast<size_t>(6 + c)] == Approx(1 - std::copysign(0.5, table_gradient(3, c))));
  }
}

TEST_CASE("a sparse gradient that is wrong is an error that names parameter and value, and is released once") {
  struct Mistake {
    std::string text;
    TensorPtr indices, values;
    std::vector<int64_t> shape{4, 2};
    uint64_t index = 0;
    uint64_t num_dims = 2;
    bool has_shape = true;
  };
  const auto good_indices = [] { return tensor_of({1, 3}, {1, 2}, int64); };
  const auto good_values = [] { return tensor_of({1, 2, 3, 4}, {2, 2}); };
  std::vector<Mistake> mistakes;
  const auto add = [&](std::string text, TensorPtr indices, TensorPtr values) -> Mistake& {
    return mistakes.emplace_back(Mistake{std::move(text), std::move(indices), std::move(values)});
  };
  add("the index 4 in dimension 0 (entry 1); the parameter is (4, 2)", tensor_of({1, 4}, {1, 2}, int64), good_values());
  add("the index -1 in dimension 0 (entry 0)", tensor_of({-1, 3}, {1, 2}, int64), good_values());
  add("the index 9223372036854775807", nullptr, good_values()).indices = [] {
    TensorPtr indices = tensor_of({0, 0}, {1, 2}, int64);
    first_element<int64_t>(indices->view)[1] = std::numeric_limits<int64_t>::max();
    return indices;
  }();
  add("the index 2 in dimension 1", tensor_of({0, 0, 0, 2}, {2, 2}, int64), tensor_of({1, 2}, {2}));
  add("int32 indices", tensor_of({1, 3}, {1, 2}, {STG_DTYPE_INT, 32, 1}), good_values());
  add("float32 indices", tensor_of({1, 3}, {1, 2}), good_values());
  add("indices of the shape (2)", tensor_of({1, 3}, {2}, int64), good_values());
  add("indices of the shape (3, 1)", tensor_of({0, 0, 0}, {3, 1}, int64), tensor_of({1}, {1}));
  add("values of the shape (2, 3); with indices of the shape (1, 2) they must be (2, 2)", good_indices(),
      tensor_of({1, 2, 3, 4, 5, 6}, {2, 3}));
  add("values of the shape (3, 2)", good_indices(), tensor_of({1, 2, 3, 4, 5, 6}, {3, 2}));
  add("values of the shape (4)", good_indices(), tensor_of({1, 2, 3, 4}, {4}));
  add("float64 values; the parameter is float32", good_indices(), tensor_of({1, 2, 3, 4}, {2, 2}, float64));
  add("no indices", nullptr, good_values());
  add("no values", good_indices(), nullptr);
  add("is (4, 3); the parameter is (4, 2)", good_indices(), good_values()).shape = {4, 3};
  add("has 1 dimensions", good_indices(), good_values()).num_dims = 1;
  add("has 4611686018427387904 dimensions", good_indices(), good_values()).num_dims = uint64_t{1} << 62;
  add("a null shape", good_indices(), good_values()).has_shape = false;
  add("parameter 2; the model has 2", good_indices(), good_values()).index = 2;
  {
    Mistake& mistake = add("cuda:0", good_indices(), good_values());
    mistake.values->view.device = {STG_DEVICE_CUDA, 0};
    mistake.text = "the values of the sparse gradient of table is on cuda:0";
  }
  for (Mistake& mistake : mistakes) {
    const bool has_indices = mistake.indices != nullptr;
    const bool has_values = mistake.values != nullptr;
    Counted indices(has_indices ? std::move(mistake.indices) : good_indices());
    Counted values(has_values ? std::move(mistake.values) : good_values());
    bool is_wrong = true;
    OwnBackward own([&](const stg_gradient_sink& sink) {
      if (!is_wrong) return sink.ready(sink.self, 0, nullptr, nullptr);
      return sink.ready_sparse(sink.self, mistake.index, has_indices ? &indices.tensor : nullptr,
                               has_values ? &values.tensor : nullptr, mistake.has_shape ? mistake.shape.data() : nullptr,
                               mistake.num_dims, nullptr);
    });
    Instance instance("single_device", config(1, R"({"name": "sgd"})"));
    instance.setup(*own.model);
    const Error error = error_of([&] { instance.train(batch_of({1})); });
    INFO(mistake.text << "; " << error.message);
    CHECK((error.code == STG_INVALID_ARGUMENT || error.code == STG_UNIMPLEMENTED));
    CHECK_THAT(error.message, Catch::Contains(mistake.text) && Catch::Contains("replica 0"));
    if (mistake.index == 0) CHECK_THAT(error.message, Catch::Contains("table"));
    CHECK(indices.num_released == (has_indices ? 1 : 0));
    CHECK(values.num_released == (has_values ? 1 : 0));
    CHECK(instance.values("table") == std::vector<double>(8, 1));
    is_wrong = false;
    instance.train(batch_of({1}));
    CHECK(instance.value("other") == 0);
  }
}

TEST_CASE("a sparse gradient that is reported twice, or of a frozen parameter, is an error") {
  const std::vector<int64_t> shape{4, 2};
  const auto report = [&](const stg_gradient_sink& sink) {
    return sink.ready_sparse(sink.self, 0, tensor_of({1}, {1, 1}, int64).release(), tensor_of({1, 2}, {1, 2}).release(),
                             shape.data(), 2, nullptr);
  };
  OwnBackward twice([&](const stg_gradient_sink& sink) {
    if (stg_error* error = report(sink)) return error;
    return report(sink);
  });
  OwnBackward frozen(report);
  frozen.model->parameters[0].flags &= ~uint64_t{STG_PARAMETER_REQUIRES_GRAD};
  Instance instance("single_device", config(1, R"({"name": "sgd"})"));
  instance.setup(*twice.model);
  CHECK_THAT(error_of([&] { instance.train(batch_of({1})); }).message, Catch::Contains("table was reported twice"));
  instance.teardown();
  instance.setup(*frozen.model);
  const Error error = error_of([&] { instance.train(batch_of({1})); });
  CHECK(error.code == STG_FAILED_PRECONDITION);
  CHECK_THAT(error.message, Catch::Contains("table has a gradient, but was frozen at setup"));
}

TEST_CASE("a model that passes over an error of the sink doesn't train on") {
  for (const bool is_sparse : {true, false}) {
    OwnBackward own([is_sparse](const stg_gradient_sink& sink) -> stg_error* {
      const std::vector<int64_t> shape{4, 2};
      stg_error* error = is_sparse ? sink.ready_sparse(sink.self, 0, tensor_of({9}, {1, 1}, int64).release(),
                                                       tensor_of({1, 2}, {1, 2}).release(), shape.data(), 2, nullptr)
                                   : sink.ready(sink.self, 0, tensor_of({1}, {1}).release(), nullptr);
      REQUIRE(error != nullptr);
      error->release(error);
      return nullptr;
    });
    Instance instance("single_device", config(1, R"({"name": "sgd"})"));
    instance.setup(*own.model);
    CHECK_THAT(error_of([&] { instance.train(batch_of({1})); }).message, Catch::Contains("table"));
    CHECK(instance.value("other") == 1);
  }
}

#ifdef __linux__
TEST_CASE("no replica makes a sparse gradient as large as its parameter") {
  const auto peak_kib = [] {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
      if (word != "VmHWM:") continue;
      int64_t kib = 0;
      status >> kib;
      return kib;
    }
    throw std::runtime_error("no VmHWM in /proc/self/status");
  };
  TableOptions options;
  options.num_rows = int64_t{1} << 20;
  options.num_columns = 16;  // 64 MiB
  const auto model = table_model(options);
  for (const std::string optimizer : {R"({"name": "sgd"})", R"({"name": "adagrad"})"}) {
    Instance instance("data_parallel", config(4, optimizer));
    instance.setup(*model);
    const int64_t before = peak_kib();
    instance.accumulate(batch_of({1, 2, 3, 4}));
    instance.train(batch_of({1, 2, 3, 1048575}));
    CHECK(peak_kib() - before < 32 * 1024);
  }
}
#endif
