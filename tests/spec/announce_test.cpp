// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "A host may announce the next batch": the same results and errors as unannounced, a ticket for one step, and nothing
// left behind.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "spec/instance.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

uint64_t announce(Instance& instance, stg_tree* batch, uint32_t stage = STG_STAGE_FIT, int64_t dataloader_index = 0,
                  stg_device device = {STG_DEVICE_NONE, -1}) {
  stg_transfer_args args = sized<stg_transfer_args>();
  args.batch = batch;
  args.device = device;
  args.dataloader_index = dataloader_index;
  uint64_t ticket = 0;
  check(instance.api.announce_batch(instance.self, nullptr, &args, stage, &ticket));
  return ticket;
}

uint64_t announce(Instance& instance, Tree batch, uint32_t stage = STG_STAGE_FIT, int64_t dataloader_index = 0) {
  return announce(instance, batch.argument(), stage, dataloader_index);
}

StepOutcome outcome_of(stg_step_result& result) {
  StepOutcome outcome;
  outcome.outputs = Tree{result.outputs};
  outcome.weights.assign(result.weights, result.weights + result.num_weights);
  return outcome;
}

// One update by SGD at a rate of 0.1.
StepOutcome train(Instance& instance, uint64_t ticket) {
  stg_update_args update = sized<stg_update_args>();
  update.lr = 0.1;
  stg_step_args args = sized<stg_step_args>();
  args.announced = ticket;
  args.flags = STG_BATCH_LAST_MICRO_BATCH;
  args.update = &update;
  stg_step_result result = sized<stg_step_result>();
  check(instance.api.train_batch(instance.self, nullptr, &args, &result, nullptr));
  return outcome_of(result);
}

StepOutcome step(Instance& instance, decltype(stg_strategy_api::predict_step) function, uint64_t ticket,
                 int64_t dataloader_index = 0) {
  stg_step_args args = sized<stg_step_args>();
  args.announced = ticket;
  args.dataloader_index = dataloader_index;
  stg_step_result result = sized<stg_step_result>();
  check(function(instance.self, nullptr, &args, &result));
  return outcome_of(result);
}

std::string config(const std::string& devices, const std::string& precision, const std::string& more = "") {
  return R"({"devices": )" + devices + R"(, "precision": ")" + precision + R"(", "optimizer": {"name": "sgd", "momentum": 0.9})" +
         more + "}";
}

// Linear, with its predictions and the width of its inputs.
std::unique_ptr<ToyModel> model_with_outputs() {
  auto model = linear_model(0.3);
  const auto step = model->on_step;
  model->on_step = [step](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
    ToyStep made = step(replica, context, batch);
    const int64_t rows = num_rows(batch, "x");
    std::vector<double> predictions;
    for (int64_t i = 0; i < rows; ++i) predictions.push_back(replica.value(0, 0) * element(batch, "x", i));
    std::get<Dict>(made.outputs.data).emplace_back("y", tensor_of(predictions, {rows}, replica.parameters[0]->view.dtype));
    std::get<Dict>(made.outputs.data).emplace_back("bits", int64_t{find(batch, "x")->as.tensor->view.dtype.bits});
    return made;
  };
  return model;
}

Tree numbered_batch(int i) { return batch_of({0.1 * i, 1.0 / (i + 1), 0.7, -0.3 * i, 0.9, 0.2, 1.0 / 3}); }

std::vector<std::string> thread_names() {
  std::vector<std::string> names;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    names.push_back(name);
  }
  return names;
}

int64_t num_own_threads() {
  const std::vector<std::string> names = thread_names();
  return std::count(names.begin(), names.end(), "announced-batch");
}

// A thread that was joined stands in the list for a moment more.
bool num_own_threads_becomes(int64_t expected) {
  const auto last = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (num_own_threads() != expected && std::chrono::steady_clock::now() < last) std::this_thread::yield();
  return num_own_threads() == expected;
}

// A batch whose release is noted, and on which thread.
struct Watched {
  std::vector<double> elements{1, 2, 3, 4};  // as 64-true has them: a copy would let the batch go
  int64_t size = 4;
  stg_tensor tensor{};
  stg_entry entry{};
  int num_releases = 0;
  std::thread::id thread;

  Watched() {
    tensor.dlpack_major = STG_DLPACK_MAJOR;
    tensor.view.data = elements.data();
    tensor.view.device = {STG_DEVICE_CPU, 0};
    tensor.view.num_dims = 1;
    tensor.view.dtype = float64;
    tensor.view.shape = &size;
    entry.key = to_abi("x");
    entry.value.type = STG_TENSOR;
    entry.value.as.tensor = &tensor;
  }
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;

  Tree tree() {
    stg_tree tree{};
    tree.root.type = STG_DICT;
    tree.root.count = 1;
    tree.root.as.entries = &entry;
    tree.owner = this;
    tree.release = [](stg_tree* self) {
      auto& watched = *static_cast<Watched*>(self->owner);
      ++watched.num_releases;
      watched.thread = std::this_thread::get_id();
    };
    return Tree{tree};
  }
};

const std::vector<std::pair<std::string, std::string>> plugins{
    {"single_device", "1"}, {"data_parallel", "1"}, {"data_parallel", "3"}};
const std::string one_thread = R"(, "threads": 1)";  // so that a core is free for the thread that copies

}  // namespace

TEST_CASE("an announced batch gives the same bits as one that is not announced") {
  const auto model = model_with_outputs();
  for (const auto& [strategy, devices] : plugins) {
    for (const std::string precision : {"32-true", "64-true"}) {
      for (const uint64_t flags : {uint64_t{0}, uint64_t{STG_CREATE_CALLER_THREAD_ONLY}}) {
        CAPTURE(strategy, devices, precision, flags);
        Instance plain(strategy, config(devices, precision, one_thread), nullptr, flags);
        Instance announcing(strategy, config(devices, precision, one_thread), nullptr, flags);
        plain.setup(*model);
        announcing.setup(*model);
        uint64_t ticket = announce(announcing, numbered_batch(0));
        for (int i = 0; i < 6; ++i) {
          const StepOutcome expected = plain.train(numbered_batch(i), 0.1);
          // The next one first, so that its copies can be made beside the step.
          const uint64_t next = announce(announcing, numbered_batch(i + 1));
          const StepOutcome got = train(announcing, std::exchange(ticket, next));
          CHECK(got.loss() == expected.loss());
          CHECK(got.weights == expected.weights);
          for (const char* key : {"y", "bits"}) {
            CHECK(numbers(*find(got.outputs.root(), key)) == numbers(*find(expected.outputs.root(), key)));
          }
          CHECK(numbers(*find(got.outputs.root(), "bits"))[0] == (precision == "64-true" ? 64 : 32));
        }
        CHECK(model_bytes(announcing.export_state()) == model_bytes(plain.export_state()));
        CHECK(optimizer_bytes(announcing.export_state()) == optimizer_bytes(plain.export_state()));
      }
    }
  }
}

TEST_CASE("training_step and the steps of evaluation use a ticket, in the stage that it was announced for") {
  const auto model = model_with_outputs();
  for (const auto& [strategy, devices] : plugins) {
    Instance instance(strategy, config(devices, "64-true"));
    instance.setup(*model);
    const auto& api = instance.api;
    const std::vector<double> expected = numbers(*find(instance.predict(numbered_batch(2)).outputs.root(), "y"));
    for (const auto& [function, stage] : {std::pair{api.training_step, STG_STAGE_FIT},
                                          {api.validation_step, STG_STAGE_VALIDATE},
                                          {api.test_step, STG_STAGE_TEST},
                                          {api.predict_step, STG_STAGE_PREDICT}}) {
      const StepOutcome outcome = step(instance, function, announce(instance, numbered_batch(2), stage));
      CHECK(numbers(*find(outcome.outputs.root(), "y")) == expected);
    }
    // A graph that waits is none of the next batch's business.
    instance.training_step(numbered_batch(1));
    const uint64_t ticket = announce(instance, numbered_batch(2));
    instance.backward(true);
    instance.optimizer_step();
    train(instance, ticket);
    CHECK(instance.status().num_updates == 2);
  }
}

TEST_CASE("a ticket is for one step of its stage and dataloader, others are told its number") {
  using Catch::Contains;
  const auto model = linear_model();
  for (const auto& [strategy, devices] : plugins) {
    Instance instance(strategy, config(devices, "32-true"));
    instance.setup(*model);
    Error error = error_of([&] { train(instance, 7); });
    CHECK(error.code == STG_NOT_FOUND);
    CHECK_THAT(error.message, Contains("ticket 7") && Contains("no announcement"));
    const uint64_t used = announce(instance, batch_of({1}));
    CHECK(used != 0);
    train(instance, used);
    error = error_of([&] { train(instance, used); });
    CHECK(error.code == STG_NOT_FOUND);
    CHECK_THAT(error.message, Contains(concat("ticket ", used, ":")) && Contains("used it up"));
    const uint64_t replaced = announce(instance, batch_of({1}));
    const uint64_t second = announce(instance, batch_of({2}));
    const uint64_t latest = announce(instance, batch_of({3}));
    CHECK(latest != second);
    error = error_of([&] { train(instance, replaced); });
    CHECK(error.code == STG_NOT_FOUND);
    CHECK_THAT(error.message, Contains(concat("ticket ", replaced, ":")) && Contains("took its place"));
    train(instance, latest);  // in any order
    train(instance, second);

    const auto refused = [&](uint64_t ticket, int64_t dataloader_index) {
      error = error_of([&] { step(instance, instance.api.validation_step, ticket, dataloader_index); });
      CHECK(error.code == STG_INVALID_ARGUMENT);
      CHECK(error_of([&] { step(instance, instance.api.validation_step, ticket); }).code == STG_NOT_FOUND);
      return error.message;
    };
    CHECK_THAT(refused(announce(instance, batch_of({1}), STG_STAGE_TEST), 0),
               Contains("stage test") && Contains("stage validate"));
    CHECK_THAT(refused(announce(instance, batch_of({1}), STG_STAGE_VALIDATE, 4), 5),
               Contains("dataloader_index 4") && Contains("dataloader_index 5"));
    // Of before a teardown: it names no batch of after it.
    const uint64_t before = announce(instance, batch_of({1}));
    instance.teardown();
    instance.setup(*model);
    CHECK(announce(instance, batch_of({2})) != before);
    CHECK(error_of([&] { train(instance, before); }).code == STG_NOT_FOUND);
  }
}

TEST_CASE("a step that is refused before it looks at its batch leaves the ticket") {
  const auto model = linear_model();
  Instance instance("data_parallel", config("2", "64-true"));
  instance.setup(*model);
  const uint64_t ticket = announce(instance, batch_of({1, 1}));
  stg_step_args args = sized<stg_step_args>();
  args.announced = ticket;
  args.flags = STG_BATCH_LAST_MICRO_BATCH;  // without an update
  stg_step_result result = sized<stg_step_result>();
  CHECK(error_of([&] { check(instance.api.train_batch(instance.self, nullptr, &args, &result, nullptr)); }).code ==
        STG_INVALID_ARGUMENT);
  Tree batch = batch_of({1});
  args.batch = batch.argument();  // both
  CHECK(error_of([&] { check(instance.api.train_batch(instance.self, nullptr, &args, &result, nullptr)); }).code ==
        STG_INVALID_ARGUMENT);
  instance.accumulate(batch_of({1, 1}));
  instance.gradients();
  CHECK(error_of([&] { train(instance, ticket); }).code == STG_FAILED_PRECONDITION);  // the window takes no more micro-batches
  check(instance.api.zero_grad(instance.self, nullptr));
  train(instance, ticket);
  CHECK(instance.status().num_updates == 1);
}

TEST_CASE("what is wrong with an announced batch is told by its step, in the same words") {
  const auto model = linear_model();
  const auto disagreeing = [] {
    Dict batch;
    batch.emplace_back("x", tensor_of({1, 2, 3}, {3}));
    batch.emplace_back("y", tensor_of({1, 2}, {2}));
    return make_tree(std::move(batch));
  };
  for (const auto& [strategy, devices] : plugins) {
    for (const std::string precision : {"32-true", "64-true"}) {
      CAPTURE(strategy, devices, precision);
      Instance instance(strategy, config(devices, precision, one_thread));
      instance.setup(*model);
      for (const bool has_rows : {true, false}) {
        const auto bad = [&] { return has_rows ? disagreeing() : batch_of({}); };
        const Error plain = error_of([&] { instance.train(bad()); });
        const uint64_t ticket = announce(instance, bad());
        const Error announced = error_of([&] { train(instance, ticket); });
        CHECK(announced.code == plain.code);
        CHECK(announced.message == plain.message);
        CHECK(error_of([&] { train(instance, ticket); }).code == STG_NOT_FOUND);
      }
      instance.train(batch_of({1, 2, 3}));
    }
  }
}

TEST_CASE("a batch that is announced must be moved, without a device, and a tree that can't be is refused at once") {
  using Catch::Contains;
  const auto model = linear_model();
  Instance instance("data_parallel", config("2", "32-true"));
  instance.setup(*model);
  Tree batch = batch_of({1, 2});
  CHECK_THAT(error_of([&] { announce(instance, Tree::view(batch.root()).argument()); }).message, Contains("borrowed"));
  CHECK_THAT(error_of([&] {
               announce(instance, batch.argument(), STG_STAGE_FIT, 0, {STG_DEVICE_CPU, 1});
             }).message,
             Contains("announce_batch") && Contains("cpu:1"));
  CHECK(batch.borrowed());  // it was consumed nevertheless
  CHECK_THAT(error_of([&] { announce(instance, batch_of({1}), 9); }).message, Contains("stage is 9"));
  Dict twice;
  twice.emplace_back("x", int64_t{1});
  twice.emplace_back("x", int64_t{2});
  CHECK_THAT(error_of([&] { announce(instance, make_tree(std::move(twice))); }).message, Contains("x") && Contains("batch"));
}

TEST_CASE("an unused batch is released by the next announcement but one, by teardown and by destroy, on the caller's thread") {
  const auto model = linear_model();
  for (const auto& [strategy, devices] : plugins) {
    for (const std::string precision : {"32-true", "64-true"}) {
      CAPTURE(strategy, devices, precision);
      Watched replaced, used, torn_down, destroyed;
      {
        Instance instance(strategy, config(devices, precision, one_thread));
        instance.setup(*model);
        announce(instance, replaced.tree());
        const uint64_t ticket = announce(instance, used.tree());
        CHECK(replaced.num_releases == 0);
        const uint64_t lost = announce(instance, torn_down.tree());
        CHECK(replaced.num_releases == 1);
        train(instance, ticket);
        CHECK(used.num_releases == 1);
        CHECK(torn_down.num_releases == 0);
        instance.teardown();
        CHECK(torn_down.num_releases == 1);
        instance.setup(*model);
        CHECK(error_of([&] { train(instance, lost); }).code == STG_NOT_FOUND);
        announce(instance, destroyed.tree());
        instance.api.abort(instance.self);
        CHECK(destroyed.num_releases == 0);
      }
      for (const Watched* watched : {&replaced, &torn_down, &destroyed}) {
        CHECK(watched->num_releases == 1);
        CHECK(watched->thread == std::this_thread::get_id());
      }
      CHECK(used.num_releases == 1);
    }
  }
}

TEST_CASE("one thread copies announced batches where a core is free, from the first that needs it to teardown") {
  const auto model = linear_model();
  const int64_t one = std::thread::hardware_concurrency() > 1 ? 1 : 0;
  for (const std::string strategy : {"single_device", "data_parallel"}) {
    Instance instance(strategy, config("1", "64-true", one_thread));
    instance.setup(*model);
    instance.train(batch_of({1, 2}));
    CHECK(num_own_threads() == 0);
    for (int round = 0; round < 3; ++round) train(instance, announce(instance, batch_of({1, 2})));
    CHECK(num_own_threads() == one);
    instance.teardown();
    CHECK(num_own_threads_becomes(0));
    instance.setup(*model);
    announce(instance, batch_of({1, 2}));
    CHECK(num_own_threads() == one);
  }
  CHECK(num_own_threads_becomes(0));
  const auto has_none = [&](const std::string& text, uint64_t flags = 0) {
    Instance instance("data_parallel", text, nullptr, flags);
    instance.setup(*model);
    train(instance, announce(instance, batch_of({1, 2})));
    CHECK(num_own_threads() == 0);
  };
  has_none(config("1", "64-true", one_thread), STG_CREATE_CALLER_THREAD_ONLY);
  has_none(config("1", "32-true", one_thread));
  has_none(config(std::to_string(std::thread::hardware_concurrency()), "64-true"));
}

TEST_CASE("where no thread is wanted the announcement itself splits and copies, and lets the batch go") {
  const auto model = linear_model();
  for (const auto& [strategy, devices] : plugins) {
    Watched watched;
    watched.tensor.view.dtype = float32;  // in 64-true every element is copied
    Instance instance(strategy, config(devices, "64-true", one_thread), nullptr, STG_CREATE_CALLER_THREAD_ONLY);
    instance.setup(*model);
    const uint64_t ticket = announce(instance, watched.tree());
    CHECK(watched.num_releases == 1);
    train(instance, ticket);
    CHECK(instance.status().num_updates == 1);
  }
}

TEST_CASE("opaque values of an announced batch are retained and released on the caller's thread") {
  struct Counted {
    stg_opaque object = sized<stg_opaque>();
    std::mutex mutex;
    int num_references = 1;
    std::map<std::thread::id, int> retains;
  } counted;
  static Counted* the_counted;
  the_counted = &counted;
  counted.object.type_name = to_abi("counted");
  counted.object.retain = [](stg_opaque*) {
    const std::lock_guard lock(the_counted->mutex);
    ++the_counted->num_references;
    ++the_counted->retains[std::this_thread::get_id()];
  };
  counted.object.release = [](stg_opaque*) {
    const std::lock_guard lock(the_counted->mutex);
    --the_counted->num_references;
  };
  const auto model = linear_model();
  {
    Instance instance("data_parallel", config("1", "64-true", one_thread));
    instance.setup(*model);
    Dict batch;
    batch.emplace_back("x", tensor_of({1, 2}, {2}));
    batch.emplace_back("object", OpaquePtr{&counted.object});
    train(instance, announce(instance, make_tree(std::move(batch))));
  }
  CHECK(counted.num_references == 0);
  CHECK(counted.retains.size() == 1);
  CHECK(counted.retains.count(std::this_thread::get_id()) == 1);
}

TEST_CASE("a model's own split runs in the step, on the calling thread, with what it says") {
  static int num_splits;
  static bool fails;
  num_splits = 0;
  fails = false;
  const auto model = linear_model();
  model->table.split = [](void*, stg_replica*, const stg_tree* batch, uint64_t, stg_tree* shares, uint64_t* num_filled) {
    return guard([&] {
      ++num_splits;
      if (fails) throw invalid_argument("these rows can't be packed");
      shares[0] = copy_tree(batch->root).give();
      *num_filled = 1;
    });
  };
  for (const auto& [strategy, devices] : plugins) {
    Instance instance(strategy, config(devices, "64-true"));
    instance.setup(*model);
    uint64_t ticket = announce(instance, batch_of({1, 2}));
    CHECK(num_splits == 0);
    train(instance, ticket);
    CHECK(num_splits == 1);
    fails = true;
    const Error plain = error_of([&] { instance.train(batch_of({1})); });
    ticket = announce(instance, batch_of({1}));
    CHECK(error_of([&] { train(instance, ticket); }).message == plain.message);
    fails = false;
    num_splits = 0;
  }
}
