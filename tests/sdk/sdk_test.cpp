// SPDX-License-Identifier: Apache-2.0
//
// What the SDK promises in every strategy's name: sizes, states, threads, fork, ownership, exceptions. The strategy here does nothing
// but succeed, or throw when told to.
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <new>
#include <stdexcept>
#include <thread>

#include "base/dlpack.hpp"
#include "base/strategy.hpp"
#include "support/catch.hpp"

using namespace stratagem;

namespace {

struct Recorder : Strategy {
  static StrategyInfo info() { return {"does nothing", "{}", {STG_DEVICE_CPU}}; }
  explicit Recorder(const CreateArgs& args) : host(args.host) {}

  const std::vector<stg_device>& devices() const override { return list; }
  void setup(const Call&, Model, Tree, uint32_t) override { act(); }
  void teardown(const Call&) override { act(); }
  stg_model_description describe_parameters() override { return sized<stg_model_description>(); }
  void model_to_device(const Call&) override {}
  Tree batch_to_device(const Call&, Tree batch, stg_device, int64_t) override { return batch; }
  Tree reduce(const Call&, Tree object, uint32_t) override { return object; }
  void barrier(const Call&, std::string_view) override { act(); }
  uint64_t announce_batch(const Call&, Tree, int64_t, uint32_t) override { return 1; }
  StepResult training_step(const Call&, StepArgs args) override {
    act();
    return {std::move(args.batch), {1.0}};
  }
  void backward(const Call&, uint64_t) override {}
  UpdateResult optimizer_step(const Call&, const stg_update_args&) override { return {}; }
  void zero_grad(const Call&) override {}
  Tree gradients(const Call&) override { return {}; }
  void parameters_changed(const Call&) override {}
  StepResult evaluation_step(const Call&, StepArgs args, uint32_t) override { return {std::move(args.batch), {1.0}}; }
  void reduce_gradients(const Call&, const std::vector<stg_gradient_set*>&, uint64_t) override { act(); }
  Tree export_state(const Call&, uint64_t) override { return {}; }
  ImportReport import_state(const Call&, Tree, uint64_t) override { return {}; }
  void save(const Call&, const std::string&, const std::string&) override {}
  ImportReport load(const Call&, const std::string&, uint64_t, std::string&) override { return {}; }

  static void act() {
    if (action) action();
  }

  Host host;
  std::vector<stg_device> list{{STG_DEVICE_CPU, 0}};
  inline static std::function<void()> action;
};

const stg_strategy_api api = sdk::strategy_table(&sdk::create<Recorder>);

stg_model make_model() {
  stg_model model = sized<stg_model>();
  model.replicate = [](void*, const stg_replicate_args*, stg_replica**) -> stg_error* { return nullptr; };
  model.destroy_replica = [](void*, stg_replica*) {};
  model.describe = [](void*, stg_replica*, stg_model_description*) -> stg_error* { return nullptr; };
  model.set_mode = [](void*, stg_replica*, uint32_t) -> stg_error* { return nullptr; };
  model.step = [](void*, stg_replica*, const stg_step_context*, stg_tree*, stg_model_step_result*) -> stg_error* {
    return nullptr;
  };
  model.backward = [](void*, stg_replica*, stg_graph*, double, uint32_t, const stg_gradient_sink*) -> stg_error* {
    return nullptr;
  };
  model.release_graph = [](void*, stg_replica*, stg_graph*) {};
  return model;
}

// An instance in a state; destroyed at the end.
class Fixture {
 public:
  explicit Fixture(uint32_t state = STG_STATE_CREATED) {
    stg_create_args args = sized<stg_create_args>();
    check(api.create(&args, &self));
    if (state == STG_STATE_CREATED) return;
    stg_setup_args setup = sized<stg_setup_args>();
    setup.model = state == STG_STATE_MODELLESS ? nullptr : &model;
    setup.stage = state == STG_STATE_EVALUATE ? STG_STAGE_VALIDATE : STG_STAGE_FIT;
    check(api.setup(self, nullptr, &setup));
    if (state == STG_STATE_DRAINING) api.abort(self);
  }
  Fixture(const Fixture&) = delete;
  Fixture& operator=(const Fixture&) = delete;
  ~Fixture() {
    Recorder::action = nullptr;
    api.destroy(self);
  }

  uint32_t state() const {
    stg_status status = sized<stg_status>();
    check(api.status(self, &status));
    return status.state;
  }

  stg_model model = make_model();
  stg_strategy* self = nullptr;
};

// One legal call of each function, with everything that it needs.
struct Arguments {
  Tree batch = make_tree(Dict{});
  stg_transfer_args transfer = sized<stg_transfer_args>();
  stg_step_args step = sized<stg_step_args>();
  stg_step_result result = sized<stg_step_result>();
  stg_update_args update = sized<stg_update_args>();
  stg_update_result update_result = sized<stg_update_result>();
  stg_checkpoint_args checkpoint = sized<stg_checkpoint_args>();
  stg_reduce_gradients_args gradients = sized<stg_reduce_gradients_args>();
  stg_tree out{};

  Arguments() {
    transfer.batch = batch.argument();
    step.batch = batch.argument();
  }
  ~Arguments() {
    if (out.release != nullptr) out.release(&out);
    if (result.outputs.release != nullptr) result.outputs.release(&result.outputs);
  }
};

stg_error* call_function(std::string_view name, Fixture& fixture) {
  Arguments a;
  stg_strategy* self = fixture.self;
  const auto is = [&](const char* other) { return name == other; };
  if (is("status")) {
    stg_status out = sized<stg_status>();
    return api.status(self, &out);
  }
  if (is("devices")) {
    const stg_device* out;
    uint64_t n;
    return api.devices(self, &out, &n);
  }
  if (is("ranks")) {
    stg_ranks out = sized<stg_ranks>();
    return api.ranks(self, &out);
  }
  if (is("setup")) {
    stg_setup_args args = sized<stg_setup_args>();
    args.model = &fixture.model;
    return api.setup(self, nullptr, &args);
  }
  if (is("teardown")) return api.teardown(self, nullptr);
  if (is("describe_parameters")) {
    auto out = sized<stg_model_description>();
    return api.describe_parameters(self, &out);
  }
  if (is("model_to_device")) return api.model_to_device(self, nullptr);
  if (is("batch_to_device")) return api.batch_to_device(self, nullptr, &a.transfer, &a.out);
  if (is("broadcast")) return api.broadcast(self, nullptr, a.batch.argument(), 0, &a.out);
  if (is("all_gather")) return api.all_gather(self, nullptr, a.batch.argument(), &a.out);
  if (is("reduce")) return api.reduce(self, nullptr, a.batch.argument(), STG_REDUCE_MEAN, &a.out);
  if (is("reduce_boolean_decision")) {
    uint32_t out = 0;
    return api.reduce_boolean_decision(self, nullptr, 1, STG_DECIDE_ALL, &out);
  }
  if (is("barrier")) return api.barrier(self, nullptr, to_abi("here"));
  if (is("to_host")) return api.to_host(self, nullptr, a.batch.argument(), &a.out);
  if (is("announce_batch")) {
    uint64_t ticket = 0;
    return api.announce_batch(self, nullptr, &a.transfer, STG_STAGE_FIT, &ticket);
  }
  if (is("training_step")) return api.training_step(self, nullptr, &a.step, &a.result);
  if (is("backward")) return api.backward(self, nullptr, 0);
  if (is("optimizer_step")) return api.optimizer_step(self, nullptr, &a.update, &a.update_result);
  if (is("train_batch")) return api.train_batch(self, nullptr, &a.step, &a.result, nullptr);
  if (is("zero_grad")) return api.zero_grad(self, nullptr);
  if (is("gradients")) return api.gradients(self, nullptr, &a.out);
  if (is("parameters_changed")) return api.parameters_changed(self, nullptr);
  if (is("validation_step")) return api.validation_step(self, nullptr, &a.step, &a.result);
  if (is("test_step")) return api.test_step(self, nullptr, &a.step, &a.result);
  if (is("predict_step")) return api.predict_step(self, nullptr, &a.step, &a.result);
  if (is("reduce_gradients")) return api.reduce_gradients(self, nullptr, &a.gradients);
  if (is("export_state")) return api.export_state(self, nullptr, 0, &a.out);
  if (is("import_state")) return api.import_state(self, nullptr, a.batch.argument(), 0, nullptr);
  if (is("save")) return api.save(self, nullptr, &a.checkpoint);
  if (is("load")) return api.load(self, nullptr, &a.checkpoint, nullptr, nullptr);
  FAIL("no call for " << name);
  return nullptr;
}

uint32_t code_of(stg_error* error) {
  const ErrorPtr owned{error};
  return owned == nullptr ? STG_OK : owned->code;
}

std::string text_of_error(stg_error* error) {
  REQUIRE(error != nullptr);
  const ErrorPtr owned{error};
  return std::string(text_of(owned->message));
}

constexpr uint32_t all_states[] = {STG_STATE_CREATED, STG_STATE_FIT, STG_STATE_EVALUATE, STG_STATE_MODELLESS, STG_STATE_DRAINING};

}  // namespace

TEST_CASE("Every function in every state answers as the table in states.h says") {
  struct Row {
    const char* name;
    uint32_t states;
  };
  const Row rows[] = {
#define STRATAGEM_ROW(name, thread, states) {#name, states},
      STG_STRATEGY_FUNCTIONS(STRATAGEM_ROW)
#undef STRATAGEM_ROW
  };
  for (const Row& row : rows) {
    if (row.name == std::string_view("destroy") || row.name == std::string_view("abort"))
      continue;  // they return nothing: see below
    for (const uint32_t state : all_states) {
      CAPTURE(row.name, state);
      Fixture fixture(state);
      const uint32_t code = code_of(call_function(row.name, fixture));
      CHECK((code != STG_FAILED_PRECONDITION) == ((row.states & state) != 0));
    }
  }
}

TEST_CASE("abort is legal in every state and leaves the instance draining, and destroy is in each") {
  for (const uint32_t state : all_states) {
    CAPTURE(state);
    Fixture fixture(state);  // destroys it
    CHECK(fixture.state() == state);
    for (int times = 0; times < 2; ++times) {
      api.abort(fixture.self);
      CHECK(fixture.state() == STG_STATE_DRAINING);
    }
    CHECK(code_of(api.teardown(fixture.self, nullptr)) == STG_FAILED_PRECONDITION);
  }
}

TEST_CASE("setup, teardown and abort move an instance from state to state") {
  Fixture fixture(STG_STATE_FIT);
  CHECK(fixture.state() == STG_STATE_FIT);
  check(api.teardown(fixture.self, nullptr));
  CHECK(fixture.state() == STG_STATE_CREATED);
  check(api.teardown(fixture.self, nullptr));
  stg_setup_args args = sized<stg_setup_args>();
  check(api.setup(fixture.self, nullptr, &args));
  CHECK(fixture.state() == STG_STATE_MODELLESS);
  api.abort(fixture.self);
  CHECK(fixture.state() == STG_STATE_DRAINING);
  stg_error* error = api.barrier(fixture.self, nullptr, {});
  CHECK((error->flags & STG_ERROR_INSTANCE_DRAINING) != 0);
  CHECK(text_of_error(error).find("draining") != std::string::npos);
}

TEST_CASE("A setup that fails leaves the instance as it was") {
  Fixture fixture;
  Recorder::action = [] { throw invalid_argument("no"); };
  stg_setup_args args = sized<stg_setup_args>();
  CHECK(code_of(api.setup(fixture.self, nullptr, &args)) == STG_INVALID_ARGUMENT);
  CHECK(fixture.state() == STG_STATE_CREATED);
}

TEST_CASE("An abort from inside setup or teardown ends it as aborted, and the instance is draining") {
  for (const bool in_setup : {true, false}) {
    Fixture fixture(in_setup ? STG_STATE_CREATED : STG_STATE_FIT);
    Recorder::action = [&] { api.abort(fixture.self); };
    stg_setup_args args = sized<stg_setup_args>();
    stg_error* error = in_setup ? api.setup(fixture.self, nullptr, &args) : api.teardown(fixture.self, nullptr);
    REQUIRE(error != nullptr);
    CHECK((error->flags & STG_ERROR_INSTANCE_DRAINING) != 0);
    CHECK(code_of(error) == STG_ABORTED);
    CHECK(fixture.state() == STG_STATE_DRAINING);
  }
}

TEST_CASE("A null instance is an error, and destroying one is not") {
  CHECK(code_of(api.barrier(nullptr, nullptr, {})) == STG_INVALID_ARGUMENT);
  stg_status status = sized<stg_status>();
  CHECK(code_of(api.status(nullptr, &status)) == STG_INVALID_ARGUMENT);
  api.destroy(nullptr);
  api.abort(nullptr);
}

TEST_CASE("A call from inside the instance's own callback is refused") {
  Fixture fixture;
  uint32_t inner = STG_OK;
  std::string text;
  Recorder::action = [&] {
    stg_error* error = api.barrier(fixture.self, nullptr, {});
    inner = error->code;
    text = text_of_error(error);
  };
  check(api.barrier(fixture.self, nullptr, {}));
  CHECK(inner == STG_FAILED_PRECONDITION);
  CHECK(text.find("own callbacks") != std::string::npos);
}

TEST_CASE("A second caller at once is refused, and the instance goes on") {
  Fixture fixture;
  std::string text;
  Recorder::action = [&] { std::thread([&] { text = text_of_error(api.barrier(fixture.self, nullptr, {})); }).join(); };
  check(api.barrier(fixture.self, nullptr, {}));
  CHECK(text.find("another thread") != std::string::npos);
  Recorder::action = nullptr;
  std::thread([&] { check(api.barrier(fixture.self, nullptr, {})); }).join();
}

TEST_CASE("After fork the child gets failed_precondition from every function and can destroy the instance") {
  Fixture fixture(STG_STATE_FIT);
  const pid_t child = fork();
  if (child == 0) {
    bool refused = code_of(api.barrier(fixture.self, nullptr, {})) == STG_FAILED_PRECONDITION;
    stg_status status = sized<stg_status>();
    refused = refused && code_of(api.status(fixture.self, &status)) == STG_FAILED_PRECONDITION;
    stg_create_args args = sized<stg_create_args>();
    stg_strategy* made = nullptr;
    refused = refused && code_of(api.create(&args, &made)) == STG_FAILED_PRECONDITION && made == nullptr;
    api.destroy(fixture.self);
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  check(api.barrier(fixture.self, nullptr, {}));
}

TEST_CASE("Whatever is thrown becomes an error") {
  Fixture fixture;
  const auto thrown = [&](std::function<void()> action) {
    Recorder::action = std::move(action);
    return code_of(api.barrier(fixture.self, nullptr, {}));
  };
  CHECK(thrown([] { throw 42; }) == STG_UNKNOWN);
  CHECK(thrown([] { throw std::runtime_error("text"); }) == STG_INTERNAL);
  CHECK(thrown([] { throw std::bad_alloc(); }) == STG_RESOURCE_EXHAUSTED);
  CHECK(thrown([] { throw Error{STG_DATA_LOSS, "text"}; }) == STG_DATA_LOSS);
  Recorder::action = nullptr;
  check(api.barrier(fixture.self, nullptr, {}));
}

TEST_CASE("A moved tree is consumed on success and on every error") {
  int deleted = 0;
  const auto batch = [&deleted] {
    static float number = 1;
    TensorPtr tensor = make_tensor({nullptr, [&deleted](const void*) { ++deleted; }}, &number, float32, {1});
    return make_tree(std::move(tensor)).give();
  };
  stg_step_args args = sized<stg_step_args>();
  stg_step_result result = sized<stg_step_result>();

  SECTION("wrong state") {
    Fixture fixture(STG_STATE_CREATED);
    stg_tree tree = batch();
    args.batch = &tree;
    CHECK(code_of(api.training_step(fixture.self, nullptr, &args, &result)) == STG_FAILED_PRECONDITION);
    CHECK(tree.release == nullptr);
  }
  SECTION("no instance") {
    stg_tree tree = batch();
    args.batch = &tree;
    CHECK(code_of(api.training_step(nullptr, nullptr, &args, &result)) == STG_INVALID_ARGUMENT);
  }
  SECTION("an exception in the step") {
    Fixture fixture(STG_STATE_FIT);
    Recorder::action = [] { throw 42; };
    stg_tree tree = batch();
    args.batch = &tree;
    CHECK(code_of(api.training_step(fixture.self, nullptr, &args, &result)) == STG_UNKNOWN);
  }
  SECTION("unknown flags") {
    Fixture fixture(STG_STATE_FIT);
    stg_tree tree = batch();
    args.batch = &tree;
    args.flags = uint64_t{1} << 40;
    CHECK(code_of(api.training_step(fixture.self, nullptr, &args, &result)) == STG_INVALID_ARGUMENT);
  }
  SECTION("success, released by the receiver of the outputs") {
    Fixture fixture(STG_STATE_FIT);
    stg_tree tree = batch();
    args.batch = &tree;
    check(api.training_step(fixture.self, nullptr, &args, &result));
    CHECK(deleted == 0);
    result.outputs.release(&result.outputs);
  }
  CHECK(deleted == 1);
}

TEST_CASE("On failure outputs are untouched") {
  Fixture fixture(STG_STATE_FIT);
  Recorder::action = [] { throw 42; };
  stg_tree batch = make_tree(Dict{}).give();
  stg_step_args args = sized<stg_step_args>();
  args.batch = &batch;
  stg_step_result result;
  std::memset(static_cast<void*>(&result), 0xAB, sizeof result);
  result.struct_size = sizeof result;
  const stg_step_result before = result;
  CHECK(code_of(api.training_step(fixture.self, nullptr, &args, &result)) == STG_UNKNOWN);
  CHECK(std::memcmp(&before, &result, sizeof result) == 0);
}

TEST_CASE("A result is written as far as the caller knows it, and its size tells what was honoured") {
  Fixture fixture;
  struct Larger {
    stg_status known;
    uint64_t future;
  } larger{};
  larger.known.struct_size = sizeof larger;
  larger.future = 7;
  check(api.status(fixture.self, &larger.known));
  CHECK(larger.known.struct_size == sizeof(stg_status));
  CHECK(larger.future == 7);
  for (const uint64_t size :
       {uint64_t{0}, uint64_t{STG_STATUS_MIN_SIZE - 1}, uint64_t{STG_MAX_STRUCT_SIZE_BYTES + 1}, ~uint64_t{0}}) {
    larger.known.struct_size = size;
    CHECK(code_of(api.status(fixture.self, &larger.known)) == STG_INVALID_ARGUMENT);
  }
}

TEST_CASE("A set field that is newer than the plugin is refused, naming its offset") {
  Fixture fixture;
  struct Larger {
    stg_setup_args known;
    uint64_t future;
  } larger{};
  larger.known.struct_size = sizeof larger;
  larger.known.stage = STG_STAGE_FIT;
  larger.future = 1;
  stg_error* error = api.setup(fixture.self, nullptr, &larger.known);
  REQUIRE(error != nullptr);
  CHECK(error->code == STG_UNIMPLEMENTED);
  CHECK(text_of_error(error).find(std::to_string(sizeof(stg_setup_args))) != std::string::npos);
  larger.future = 0;
  check(api.setup(fixture.self, nullptr, &larger.known));
}

TEST_CASE("Bad config texts, flags and enumerators are errors that say what was given") {
  stg_strategy* self = nullptr;
  stg_create_args args = sized<stg_create_args>();
  for (const char* text : {"{", "[1]", "{\"a\": }", "{\"a\": 1, \"a\": 2}"}) {
    args.config_json = to_abi(std::string_view(text));
    CHECK(code_of(api.create(&args, &self)) == STG_INVALID_ARGUMENT);
    CHECK(self == nullptr);
  }
  args = sized<stg_create_args>();
  args.flags = 1024;
  CHECK(text_of_error(api.create(&args, &self)).find("1024") != std::string::npos);
  Fixture fixture;
  stg_tree tree = make_tree(int64_t{1}).give();
  stg_tree out{};
  CHECK(text_of_error(api.reduce(fixture.self, nullptr, &tree, 77, &out)).find("77") != std::string::npos);
  uint32_t decision = 0;
  CHECK(code_of(api.reduce_boolean_decision(fixture.self, nullptr, 2, STG_DECIDE_ALL, &decision)) == STG_INVALID_ARGUMENT);
}

TEST_CASE("One process broadcasts, gathers and decides by giving back what it got") {
  Fixture fixture;
  stg_tree tree = make_tree(Tuple{make_list(int64_t{1}, "text")}).give();
  stg_tree out{};
  check(api.broadcast(fixture.self, nullptr, &tree, 0, &out));
  CHECK(out.root.type == STG_TUPLE);
  CHECK(text_of(out.root.as.items[1]) == "text");
  stg_tree second{};
  CHECK(code_of(api.broadcast(fixture.self, nullptr, &out, 1, &second)) == STG_INVALID_ARGUMENT);
  uint32_t decision = 7;
  check(api.reduce_boolean_decision(fixture.self, nullptr, 0, STG_DECIDE_ANY, &decision));
  CHECK(decision == 0);
}

TEST_CASE("An output never aliases a borrowed batch") {
  Fixture fixture;
  float numbers[2] = {1, 2};
  Tree owner = make_tree(make_tensor(nullptr, numbers, float32, {2}));
  stg_tree borrowed{owner.root(), nullptr, nullptr};
  stg_tree out{};
  check(api.broadcast(fixture.self, nullptr, &borrowed, 0, &out));
  CHECK(first_element<float>(out.root.as.tensor->view) != numbers);
  CHECK(first_element<float>(out.root.as.tensor->view)[1] == 2);
  out.release(&out);
}
