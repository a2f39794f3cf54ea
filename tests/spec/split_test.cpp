// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Splitting a batch".
#include <algorithm>
#include <mutex>

#include "spec/instance.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

// What each replica got of a batch: rows of "x" (or of the batch itself), and what its context said.
struct Recorder {
  std::mutex mutex;
  std::map<int32_t, int64_t> rows;
  std::map<int32_t, stg_step_context> contexts;

  std::vector<int64_t> sizes() const {
    std::vector<int64_t> list;
    for (const auto& [replica, count] : rows) list.push_back(count);
    return list;
  }
};

// Echoes its share.
std::unique_ptr<ToyModel> echo_model(Recorder& recorder) {
  std::vector<ToyParameter> parameters{{{"weight"}, {1}, {0}}};
  return std::make_unique<ToyModel>(
      parameters, [&recorder](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
        const stg_value* x = batch.type == STG_DICT ? find(batch, "x") : batch.type == STG_TENSOR ? &batch : &batch.as.items[0];
        {
          const std::lock_guard lock(recorder.mutex);
          const bool has_rows = x->type == STG_TENSOR && x->as.tensor->view.num_dims > 0;
          recorder.rows[context.replica] = has_rows ? x->as.tensor->view.shape[0] : -1;
          recorder.contexts[context.replica] = context;
        }
        ToyStep step;
        if (context.stage == STG_STAGE_FIT) {
          step.outputs = scalar(0);
          step.gradients = {{1}};
        } else {
          step.outputs = take(copy_tree(batch));
        }
        if (replica.args.device.index != context.device.index) throw internal("a step on another replica's device");
        return step;
      });
}

std::vector<int64_t> sizes(int64_t num_rows, int num_devices, const std::string& split) {
  Recorder recorder;
  const auto model = echo_model(recorder);
  Instance instance("data_parallel", concat("{\"devices\": ", num_devices, ", \"options\": {\"split\": \"", split, "\"}}"));
  instance.setup(*model, STG_STAGE_VALIDATE);
  instance.validate(batch_of(std::vector<double>(static_cast<size_t>(num_rows))));
  return recorder.sizes();
}

using Sizes = std::vector<int64_t>;

}  // namespace

TEST_CASE("balanced shares differ by at most one row") {
  CHECK(sizes(9, 4, "balanced") == Sizes{3, 2, 2, 2});
  CHECK(sizes(10, 4, "balanced") == Sizes{3, 3, 2, 2});
  CHECK(sizes(5, 4, "balanced") == Sizes{2, 1, 1, 1});
  CHECK(sizes(20, 8, "balanced") == Sizes{3, 3, 3, 3, 2, 2, 2, 2});
}

TEST_CASE("chunks have ceil(B/N) rows") {
  CHECK(sizes(9, 4, "chunk") == Sizes{3, 3, 3});
  CHECK(sizes(10, 4, "chunk") == Sizes{3, 3, 3, 1});
  CHECK(sizes(5, 4, "chunk") == Sizes{2, 2, 1});
  CHECK(sizes(20, 8, "chunk") == Sizes{3, 3, 3, 3, 3, 3, 2});
}

TEST_CASE("a batch smaller than the device count uses fewer replicas") {
  for (const std::string split : {"balanced", "chunk"}) {
    CHECK(sizes(3, 8, split) == Sizes{1, 1, 1});
    CHECK(sizes(1, 2, split) == Sizes{1});
  }
}

TEST_CASE("compat lightning implies chunk, and contradicting it is an error") {
  Recorder recorder;
  const auto model = echo_model(recorder);
  Instance instance("data_parallel", R"({"devices": 4, "options": {"compat": "lightning"}})");
  instance.setup(*model, STG_STAGE_VALIDATE);
  instance.validate(batch_of(std::vector<double>(9)));
  CHECK(recorder.sizes() == Sizes{3, 3, 3});
  const Error error = error_of([] { Instance("data_parallel", R"({"options": {"compat": "lightning", "split": "balanced"}})"); });
  CHECK(error.code == STG_INVALID_ARGUMENT);
  CHECK_THAT(error.message, Catch::Contains("/options/split"));
}

TEST_CASE("lists of plain leaves, numbers and 0-dim tensors are shared by all replicas") {
  std::mutex mutex;
  std::map<int32_t, std::vector<int64_t>> shapes;
  int num_good = 0;
  std::vector<ToyParameter> parameters{{{"weight"}, {1}, {0}}};
  ToyModel model(parameters, [&](ToyReplica&, const stg_step_context& context, const stg_value& batch) {
    const std::lock_guard lock(mutex);
    shapes[context.replica] = shape(*find(batch, "x"));
    const stg_value& names = *find(batch, "names");
    const bool has_names = names.type == STG_LIST && names.count == 4 && text_of(names.as.items[3]) == "d";
    const bool has_scale = find(batch, "scale")->type == STG_DOUBLE && find(batch, "scale")->as.f64 == 2.0;
    const bool has_y = shape(*find(batch, "y")).empty() && element(batch, "y", 0) == 5;
    if (has_names && has_scale && has_y) ++num_good;
    return ToyStep{};
  });
  Instance instance("data_parallel", R"({"devices": 2})");
  instance.setup(model, STG_STAGE_PREDICT);
  Dict batch;
  batch.emplace_back("x", tensor_of({1, 2, 3, 4, 5, 6, 7, 8}, {4, 2}));
  List names;
  for (const char* name : {"a", "b", "c", "d"}) names.emplace_back(name);
  batch.emplace_back("names", std::move(names));
  batch.emplace_back("scale", 2.0);
  batch.emplace_back("y", scalar(5));
  instance.predict(make_tree(std::move(batch)));
  CHECK(shapes == std::map<int32_t, std::vector<int64_t>>{{0, {2, 2}}, {1, {2, 2}}});
  CHECK(num_good == 2);
}

TEST_CASE("each replica sees its own device and row, in trees of every kind") {
  const auto rows = [] { return tensor_of({0, 1}, {2, 1}); };
  std::vector<Tree> batches;
  batches.push_back(make_tree(rows()));
  Dict dict;
  dict.emplace_back("x", rows());
  batches.push_back(make_tree(std::move(dict)));
  List list;
  list.emplace_back(rows());
  batches.push_back(make_tree(std::move(list)));
  Tuple tuple;
  tuple.items.emplace_back(rows());
  batches.push_back(make_tree(std::move(tuple)));

  Recorder recorder;
  const auto model = echo_model(recorder);
  Instance instance("data_parallel", R"({"devices": [5, 3]})");
  instance.setup(*model, STG_STAGE_PREDICT);
  for (Tree& batch : batches) {
    const uint32_t type = batch.root().type;
    const StepOutcome outcome = instance.predict(std::move(batch));
    REQUIRE(outcome.outputs.root().type == type);
    for_each_leaf(outcome.outputs.root(), [](const KeyPath&, const stg_value& leaf) {
      CHECK(numbers(leaf) == std::vector<double>{0, 1});
      CHECK(shape(leaf) == std::vector<int64_t>{2, 1});
    });
    CHECK(recorder.sizes() == Sizes{1, 1});
    CHECK(recorder.contexts[0].device.index == 5);
    CHECK(recorder.contexts[1].device.index == 3);
    CHECK(recorder.contexts[1].num_replicas == 2);
  }
}

TEST_CASE("leaves that disagree about the rows are an error naming both key paths") {
  const auto model = linear_model();
  for (const std::string strategy : {"single_device", "data_parallel"}) {
    Instance instance(strategy, R"({"devices": 1, "optimizer": {"name": "sgd"}})");
    instance.setup(*model);
    Dict batch;
    batch.emplace_back("x", tensor_of(std::vector<double>(8), {8}));
    batch.emplace_back("y", tensor_of(std::vector<double>(6), {6}));
    const Error error = error_of([&] { instance.train(make_tree(std::move(batch))); });
    CHECK(error.code == STG_INVALID_ARGUMENT);
    CHECK_THAT(error.message, Catch::Contains("[\"x\"] has 8") && Catch::Contains("[\"y\"] has 6"));
    instance.train(batch_of({1, 2}));
    CHECK(instance.value("weight") == -1.5);
  }
}

TEST_CASE("a batch with no tensor runs once, on the root, with a warning once") {
  LoggingHost host;
  int num_runs = 0;
  std::vector<ToyParameter> parameters{{{"weight"}, {1}, {0}}};
  ToyModel model(parameters, [&](ToyReplica&, const stg_step_context& context, const stg_value&) {
    if (context.replica != 0) throw internal("not on the root");
    ++num_runs;
    ToyStep step;
    step.outputs = scalar(0);
    step.gradients = {{1}};
    return step;
  });
  Instance instance("data_parallel", R"({"devices": 3, "optimizer": {"name": "sgd"}})", &host.table);
  instance.setup(model);
  for (int i = 0; i < 2; ++i) {
    Dict batch;
    batch.emplace_back("x", int64_t{1});
    const StepOutcome outcome = instance.train(make_tree(std::move(batch)));
    CHECK(outcome.weights == std::vector<double>{1});
  }
  CHECK(num_runs == 2);
  CHECK(host.messages.size() == 1);
  CHECK(instance.value("weight") == -2);
}

TEST_CASE("a batch of zero rows is an error in training and runs on the root alone in evaluation") {
  Recorder recorder;
  const auto model = echo_model(recorder);
  Instance instance("data_parallel", R"({"devices": 2, "optimizer": {"name": "sgd"}})");
  instance.setup(*model);
  const Error error = error_of([&] { instance.train(batch_of({})); });
  CHECK(error.code == STG_INVALID_ARGUMENT);
  CHECK_THAT(error.message, Catch::Contains("no rows"));
  const StepOutcome outcome = instance.validate(batch_of({}));
  CHECK(recorder.rows == std::map<int32_t, int64_t>{{0, 0}});
  CHECK(shape(*find(outcome.outputs.root(), "x")) == std::vector<int64_t>{0});
}

TEST_CASE("strided and offset batches are split by their strides") {
  Recorder recorder;
  const auto model = echo_model(recorder);
  Instance instance("data_parallel", R"({"devices": 2})");
  instance.setup(*model, STG_STAGE_PREDICT);
  // Columns 1.. of a row-major (3, 4), transposed: (3, 3) with strides (1, 4).
  std::vector<double> values(12);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i);
  const std::shared_ptr<stg_tensor> whole{tensor_of(values, {3, 4}).release(), TensorRelease{}};
  TensorPtr view =
      make_strided_tensor(whole, whole->view.data, float32, {3, 3}, {1, 4}, STG_TENSOR_READ_ONLY, {STG_DEVICE_CPU, 0});
  view->view.byte_offset = 4;
  const StepOutcome outcome = instance.predict(make_tree(std::move(view)));
  CHECK(numbers(outcome.outputs.root()) == std::vector<double>{1, 5, 9, 2, 6, 10, 3, 7, 11});
  CHECK(recorder.sizes() == Sizes{2, 1});
}

TEST_CASE("64-true makes floating leaves and parameters float64 and leaves integers") {
  std::mutex mutex;
  std::vector<std::string> types;
  std::vector<ToyParameter> parameters{{{"weight"}, {1}, {0.1}}};
  ToyModel model(parameters, [&](ToyReplica& replica, const stg_step_context&, const stg_value& batch) {
    const std::lock_guard lock(mutex);
    for (const char* key : {"x", "i", "s"}) types.push_back(dtype_name(find(batch, key)->as.tensor->view.dtype));
    types.push_back(dtype_name(replica.parameters[0]->view.dtype));
    if (element(batch, "x", 0) != 0.5) types.emplace_back("another value");
    return ToyStep{};
  });
  for (const std::string strategy : {"single_device", "data_parallel"}) {
    types.clear();
    Instance instance(strategy, R"({"devices": 1, "precision": "64-true"})");
    instance.setup(model, STG_STAGE_PREDICT);
    Dict batch;
    batch.emplace_back("x", tensor_of({0.5, 0.5}, {2}));
    batch.emplace_back("i", tensor_of({1, 2}, {2}, int64));
    batch.emplace_back("s", scalar(1, {STG_DTYPE_FLOAT, 16, 1}));
    instance.predict(make_tree(std::move(batch)));
    CHECK(types == std::vector<std::string>{"float64", "int64", "float64", "float64"});
  }
}
