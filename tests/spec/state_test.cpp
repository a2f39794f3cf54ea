// SPDX-License-Identifier: Apache-2.0
//
// States and checkpoints: the layout of abi/stratagem/strategy.h, swapping, strictness.
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "spec/checkpoint_folder.hpp"
#include "spec/instance.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::string adamw = R"("optimizer": {"name": "adamw", "amsgrad": true})";

std::string config(const std::string& devices, const std::string& optimizer = adamw) {
  return "{\"devices\": " + devices + ", " + optimizer + "}";
}

std::vector<std::string> names(const stg_value& list) {
  std::vector<std::string> texts;
  for (uint32_t i = 0; i < list.count; ++i) texts.emplace_back(text_of(list.as.items[i]));
  return texts;
}

std::vector<std::string> keys(const stg_value& dict) {
  std::vector<std::string> texts;
  for (uint32_t i = 0; i < dict.count; ++i) texts.emplace_back(text_of(dict.as.entries[i].key));
  return texts;
}

// embed.weight tied to head.weight, and a bias. Gradients: the mean of x, everywhere.
std::unique_ptr<ToyModel> tied_model() {
  std::vector<ToyParameter> parameters{{{"embed.weight", "head.weight"}, {2}, {1, 2}}, {{"bias"}, {1}, {3}}};
  return std::make_unique<ToyModel>(parameters, [](ToyReplica&, const stg_step_context&, const stg_value& batch) {
    double mean = 0;
    for (int64_t i = 0; i < num_rows(batch, "x"); ++i) mean += element(batch, "x", i) / static_cast<double>(num_rows(batch, "x"));
    ToyStep step;
    step.outputs = scalar(mean);
    step.gradients = {{mean, -mean}, {2 * mean}};
    return step;
  });
}

// A state as C++ values, to take apart.
Dict taken(Tree state) { return std::get<Dict>(take(std::move(state)).data); }

Value& at(Dict& dict, std::string_view key) {
  for (auto& [name, value] : dict) {
    if (name == key) return value;
  }
  throw not_found("no key ", key);
}

Dict& dict_at(Dict& dict, std::string_view key) { return std::get<Dict>(at(dict, key).data); }

void drop(Dict& dict, std::string_view key) {
  std::erase_if(dict, [&](const auto& entry) { return entry.first == key; });
}

std::string read(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

TEST_CASE("a state has the layout of the ABI, with PyTorch's names for the optimizer's slots") {
  const auto model = tied_model();
  Instance instance("data_parallel", config("2"));
  instance.setup(*model);
  instance.train(batch_of({1, 2, 3}), 0.1);
  instance.train(batch_of({1, 2, 3}), 0.1);
  const Tree state = instance.export_state();
  CHECK(keys(state.root()) == std::vector<std::string>{"format", "model", "aliases", "optimizer", "scaler", "generators"});
  CHECK(find(state.root(), "format")->as.i64 == 1);
  CHECK(keys(*find(state.root(), "model")) == std::vector<std::string>{"embed.weight", "bias"});
  CHECK(text_of(*find(*find(state.root(), "aliases"), "head.weight")) == "embed.weight");
  const stg_value& optimizer = *find(state.root(), "optimizer");
  CHECK(text_of(*find(optimizer, "name")) == "adamw");
  CHECK(find(optimizer, "step")->as.i64 == 2);
  const stg_value& slots = *find(*find(optimizer, "per_parameter"), "bias");
  CHECK(keys(slots) == std::vector<std::string>{"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"});
  CHECK(numbers(*find(slots, "step")) == std::vector<double>{2});
  CHECK(shape(*find(slots, "step")).empty());
  CHECK(numbers(*find(slots, "exp_avg"))[0] == Approx(4 * (0.1 + 0.9 * 0.1)));
  CHECK(find(state.root(), "scaler")->type == STG_NONE);
}

TEST_CASE("training goes on bitwise the same from an exported state, with each optimizer and under either strategy") {
  const auto [text, slots] = GENERATE(table<std::string, std::vector<std::string>>(
      {{R"({"name": "sgd", "momentum": 0.9, "dampening": 0.1})", {"momentum_buffer"}},
       {R"({"name": "adam"})", {"exp_avg", "exp_avg_sq", "step"}},
       {R"({"name": "adamw", "amsgrad": true})", {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}},
       {R"({"name": "rmsprop"})", {"square_avg", "step"}},
       {R"({"name": "rmsprop", "momentum": 0.7, "centered": true})", {"square_avg", "momentum_buffer", "grad_avg", "step"}},
       {R"({"name": "adagrad", "lr_decay": 0.1, "initial_accumulator_value": 0.3})", {"sum", "step"}}}));
  CAPTURE(text);
  const auto model = tied_model();
  const std::string optimizer = "\"optimizer\": " + text;
  Instance whole("data_parallel", config("1", optimizer));
  whole.setup(*model);
  whole.train(batch_of({1, 3}), 0.1);
  const Tree saved = whole.export_state();
  CHECK(keys(*find(*find(*find(saved.root(), "optimizer"), "per_parameter"), "bias")) == slots);
  Instance swapped("single_device", config("1", optimizer));
  swapped.setup(&model->table, STG_STAGE_FIT, whole.export_state());
  CHECK(swapped.status().num_updates == 1);
  Instance imported("data_parallel", config("1", optimizer));
  imported.setup(*model);
  imported.train(batch_of({9, 9}), 5);  // something to be overwritten
  const Tree report = imported.import_state(whole.export_state(0));
  for (const char* list : {"missing", "unexpected", "unknown_keys"}) CHECK(find(report.root(), list)->count == 0);
  const TemporaryFolder folder;
  save(whole, folder.path / "step-1");
  Instance loaded("single_device", config("1", optimizer));
  loaded.setup(*model);
  load(loaded, folder.path / "step-1");
  // A second and a third update: a slot that began anew would show.
  for (Instance* instance : {&whole, &swapped, &imported, &loaded}) {
    instance->train(batch_of({2, -5, 1}), 0.1);
    instance->train(batch_of({0.3, 2}), 0.1);
  }
  for (Instance* instance : {&swapped, &imported, &loaded}) {
    CHECK(model_bytes(instance->export_state()) == model_bytes(whole.export_state()));
    CHECK(optimizer_bytes(instance->export_state()) == optimizer_bytes(whole.export_state()));
  }
}

TEST_CASE("data_parallel on one device equals single_device bitwise") {
  const auto model = tied_model();
  Instance one("single_device", config("1"));
  Instance parallel("data_parallel", config("1"));
  one.setup(*model);
  parallel.setup(*model);
  for (int step = 0; step < 10; ++step) {
    one.train(batch_of({0.1 * step, 0.3, 0.7}), 0.05, STG_CLIP_NORM, 0.5);
    parallel.train(batch_of({0.1 * step, 0.3, 0.7}), 0.05, STG_CLIP_NORM, 0.5);
  }
  CHECK(model_bytes(one.export_state()) == model_bytes(parallel.export_state()));
  CHECK(optimizer_bytes(one.export_state()) == optimizer_bytes(parallel.export_state()));
}

TEST_CASE("views of a state stay valid when the instance is destroyed") {
  const auto model = tied_model();
  Tree state;
  {
    Instance instance("data_parallel", config("2"));
    instance.setup(*model);
    instance.train(batch_of({1, 1}), 0.5);
    state = instance.export_state(0);
  }
  CHECK(numbers(*find(*find(state.root(), "model"), "bias"))[0] < 3);
  CHECK(model->num_references == 1);
  state = {};
  CHECK(model->num_references == 0);
}

TEST_CASE("a strict import lists all that is missing, unexpected and of another shape, and changes nothing") {
  const auto model = tied_model();
  Instance instance("single_device", config("1"));
  instance.setup(*model);
  instance.train(batch_of({1}), 0.1);
  const std::string before = model_bytes(instance.export_state()) + optimizer_bytes(instance.export_state());
  const auto broken = [&] {
    Dict state = taken(instance.export_state());
    Dict& weights = dict_at(state, "model");
    at(weights, "embed.weight") = tensor_of({1, 2, 3}, {3});
    drop(weights, "bias");
    weights.emplace_back("other.weight", tensor_of({0}, {1}));
    dict_at(state, "aliases").emplace_back("tail.weight", "embed.weight");
    drop(dict_at(dict_at(dict_at(state, "optimizer"), "per_parameter"), "bias"), "exp_avg");
    state.emplace_back("colour", "red");
    return make_tree(std::move(state));
  };
  const Error error = error_of([&] { instance.import_state(broken()); });
  CHECK(error.code == STG_INVALID_ARGUMENT);
  using Catch::Contains;
  CHECK_THAT(error.message, Contains("missing: bias, optimizer.bias.exp_avg") &&
                                Contains("unexpected: other.weight, tail.weight") &&
                                Contains("embed.weight (float32 (3) in the state, float32 (2) here)"));
  CHECK(model_bytes(instance.export_state()) + optimizer_bytes(instance.export_state()) == before);

  const Tree report = instance.import_state(broken(), 0);
  CHECK(names(*find(report.root(), "missing")) == std::vector<std::string>{"embed.weight", "bias", "optimizer.bias.exp_avg"});
  CHECK(names(*find(report.root(), "unexpected")) == std::vector<std::string>{"embed.weight", "other.weight", "tail.weight"});
  CHECK(names(*find(report.root(), "unknown_keys")) == std::vector<std::string>{"colour"});
}

TEST_CASE("a tied weight is saved once with its aliases, dropping the alias or the tensor is an error naming what is missing") {
  const auto model = tied_model();
  Instance instance("data_parallel", config("2"));
  instance.setup(*model);
  instance.train(batch_of({1, 1}), 0.1);
  Dict without_alias = taken(instance.export_state());
  drop(dict_at(without_alias, "aliases"), "head.weight");
  CHECK_THAT(error_of([&] { instance.import_state(make_tree(std::move(without_alias))); }).message,
             Catch::Contains("missing: head.weight"));
  Dict without_tensor = taken(instance.export_state());
  drop(dict_at(without_tensor, "model"), "embed.weight");
  CHECK_THAT(error_of([&] { instance.import_state(make_tree(std::move(without_tensor))); }).message,
             Catch::Contains("missing: embed.weight, head.weight"));
  // Another author may have chosen the other name as the main one.
  Dict renamed = taken(instance.export_state());
  dict_at(renamed, "model")[0].first = "head.weight";
  dict_at(renamed, "aliases")[0] = {"embed.weight", "head.weight"};
  instance.import_state(make_tree(std::move(renamed)));
}

TEST_CASE("a state of another precision is converted") {
  const auto model = tied_model();
  Instance wide("single_device", R"({"precision": "64-true", "optimizer": {"name": "adam"}})");
  wide.setup(*model);
  wide.train(batch_of({1}), 0.1);
  Instance narrow("data_parallel", config("2", R"("optimizer": {"name": "adam"})"));
  narrow.setup(*model);
  narrow.import_state(wide.export_state());
  CHECK(narrow.value("bias") == static_cast<double>(static_cast<float>(wide.value("bias"))));
}

TEST_CASE("another optimizer's state is refused, and left out when not strict") {
  const auto model = tied_model();
  Instance adam("single_device", config("1"));
  adam.setup(*model);
  adam.train(batch_of({1}), 0.1);
  Instance sgd("single_device", config("1", R"("optimizer": {"name": "sgd"})"));
  sgd.setup(*model);
  CHECK_THAT(error_of([&] { sgd.import_state(adam.export_state()); }).message,
             Catch::Contains("adamw") && Catch::Contains("sgd"));
  sgd.import_state(adam.export_state(), 0);
  CHECK(sgd.value("bias") == adam.value("bias"));
  // Weights alone are enough where no optimizer is.
  Instance evaluation("single_device", "{}");
  evaluation.setup(&model->table, STG_STAGE_VALIDATE, adam.export_state());
  CHECK(evaluation.value("bias") == adam.value("bias"));
}

TEST_CASE("generators that this instance has no replica for are kept and handed on") {
  const auto model = tied_model();
  model->table.get_generator_state = [](void*, stg_replica* replica, stg_tree* out) -> stg_error* {
    const auto& args = reinterpret_cast<ToyReplica*>(replica)->args;
    *out = make_tree(Bytes{{static_cast<uint8_t>(args.seed), static_cast<uint8_t>(args.replica)}}).give();
    return nullptr;
  };
  static std::vector<std::pair<int32_t, std::string>> restored;
  restored.clear();
  model->table.set_generator_state = [](void*, stg_replica* replica, const uint8_t* state, uint64_t size_bytes) -> stg_error* {
    restored.emplace_back(reinterpret_cast<ToyReplica*>(replica)->args.replica, std::string(state, state + size_bytes));
    return nullptr;
  };
  Instance three("data_parallel", R"({"devices": 3, "seed": 65})");
  three.setup(*model);
  Instance one("single_device", R"({"seed": 66})");
  one.setup(*model);
  one.import_state(three.export_state());
  CHECK(restored == std::vector<std::pair<int32_t, std::string>>{{0, std::string("A\0", 2)}});
  const Tree state = one.export_state();
  const stg_value& generators = *find(state.root(), "generators");
  REQUIRE(generators.count == 3);
  CHECK(generators.as.items[0].as.bytes[0] == 66);
  CHECK(generators.as.items[2].as.bytes[1] == 2);
}

TEST_CASE("a generator's state that the model refuses leaves everything as it was") {
  const auto model = tied_model();
  static std::map<int32_t, std::string> states;
  states = {{0, "r0"}, {1, "r1"}};
  model->table.get_generator_state = [](void*, stg_replica* replica, stg_tree* out) -> stg_error* {
    const std::string& state = states.at(reinterpret_cast<ToyReplica*>(replica)->args.replica);
    *out = make_tree(Bytes{{state.begin(), state.end()}}).give();
    return nullptr;
  };
  model->table.set_generator_state = [](void*, stg_replica* replica, const uint8_t* state, uint64_t size_bytes) -> stg_error* {
    if (size_bytes != 2) return to_abi(invalid_argument("a generator state of ", size_bytes, " bytes; expected 2"));
    states.at(reinterpret_cast<ToyReplica*>(replica)->args.replica) = std::string(state, state + size_bytes);
    return nullptr;
  };
  Instance instance("data_parallel", config("2"));
  instance.setup(*model);
  instance.train(batch_of({1, 1}), 0.1);
  Dict state = taken(instance.export_state());
  instance.train(batch_of({2, 2}), 0.1);
  const std::string before = model_bytes(instance.export_state()) + optimizer_bytes(instance.export_state());
  at(state, "generators") = make_list(Bytes{{'n', '0'}}, Bytes{{1, 2, 3, 4, 5, 6, 7}});
  CHECK_THAT(error_of([&] { instance.import_state(make_tree(std::move(state))); }).message,
             Catch::Contains("replica 1") && Catch::Contains("7 bytes"));
  CHECK(model_bytes(instance.export_state()) + optimizer_bytes(instance.export_state()) == before);
  CHECK(instance.status().num_updates == 2);
  CHECK(states == std::map<int32_t, std::string>{{0, "r0"}, {1, "r1"}});
}

TEST_CASE("a state without an optimizer is told where there is one") {
  const auto model = tied_model();
  Instance bare("single_device", R"({"devices": 1})");
  bare.setup(*model);
  Instance instance("single_device", config("1"));
  instance.setup(*model);
  CHECK_THAT(error_of([&] { instance.import_state(bare.export_state()); }).message, Catch::Contains("missing: optimizer"));
  const Tree report = instance.import_state(bare.export_state(), 0);
  CHECK(names(*find(report.root(), "missing")) == std::vector<std::string>{"optimizer"});
}

TEST_CASE("states that are none are refused in words") {
  const auto model = tied_model();
  Instance instance("single_device", config("1"));
  instance.setup(*model);
  const auto refusal = [&](Value state) { return error_of([&] { instance.import_state(make_tree(std::move(state))); }).message; };
  CHECK_THAT(refusal("text"), Catch::Contains("dict"));
  CHECK_THAT(refusal(Dict{}), Catch::Contains("format"));
  Dict future;
  future.emplace_back("format", int64_t{2});
  CHECK_THAT(refusal(std::move(future)), Catch::Contains("format 2"));
  Dict wrong = taken(instance.export_state());
  at(dict_at(wrong, "model"), "bias") = 1.0;
  CHECK_THAT(refusal(std::move(wrong)), Catch::Contains("bias") && Catch::Contains("double"));
}

TEST_CASE("a checkpoint saved under one strategy goes on under the other, bitwise") {
  const TemporaryFolder folder;
  const std::string path = folder.path / "step-2";
  const auto model = tied_model();
  Instance saver("data_parallel", config("1"));
  saver.setup(*model);
  saver.train(batch_of({1, 4, 2}), 0.1);
  saver.train(batch_of({3, -4, 2}), 0.1);
  save(saver, path, R"({"epoch": 3, "order": [2, 0, 1]})");
  Instance loader("single_device", config("1"));
  loader.setup(*model);
  CHECK(nlohmann::json::parse(load(loader, path)) == nlohmann::json{{"epoch", 3}, {"order", {2, 0, 1}}});
  CHECK(loader.status().num_updates == 2);
  saver.train(batch_of({1, 1, 7}), 0.1);
  loader.train(batch_of({1, 1, 7}), 0.1);
  CHECK(model_bytes(loader.export_state()) == model_bytes(saver.export_state()));
  CHECK(optimizer_bytes(loader.export_state()) == optimizer_bytes(saver.export_state()));

  const nlohmann::json state = nlohmann::json::parse(read(folder.path / "step-2" / "state.json"));
  CHECK(state["aliases"] == nlohmann::json{{"head.weight", "embed.weight"}});
  CHECK(state["versions"].contains("libtorch"));
  Instance evaluation("single_device", "{}");
  evaluation.setup(*model, STG_STAGE_TEST);
  CHECK(nlohmann::json::parse(load(evaluation, path))["epoch"] == 3);
}

TEST_CASE("a folder that is no checkpoint is not replaced by one") {
  const TemporaryFolder folder;
  const auto model = tied_model();
  Instance instance("single_device", config("1"));
  instance.setup(*model);
  const std::filesystem::path path = folder.path / "mine";
  std::filesystem::create_directory(path);
  save(instance, path);  // an empty one holds nothing that could be lost
  save(instance, path);
  std::filesystem::remove(path / "state.json");
  std::ofstream(path / "notes.txt") << "of years";
  const Error error = error_of([&] { save(instance, path); });
  CHECK(error.code == STG_ALREADY_EXISTS);
  CHECK_THAT(error.message, Catch::Contains(path.string() + ": ") && Catch::Contains("notes.txt") &&
                                Catch::Contains("no state.json") && Catch::Contains("another path"));
  CHECK(read(path / "notes.txt") == "of years");
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path), {}) == 1);  // no leftovers
}

TEST_CASE("a damaged, truncated or missing checkpoint file is an error that names it, and changes nothing") {
  const auto model = tied_model();
  Instance instance("single_device", config("1"));
  instance.setup(*model);
  instance.train(batch_of({1}), 0.1);
  for (const std::string file : {"weights.safetensors", "optimizer.safetensors", "state.json"}) {
    for (const std::string damage : {"flipped", "cut", "gone"}) {
      const TemporaryFolder folder;
      const std::filesystem::path path = folder.path / "step";
      save(instance, path);
      instance.train(batch_of({2}), 0.1);
      const std::string before = model_bytes(instance.export_state());
      std::string content = read(path / file);
      if (damage == "gone") {
        std::filesystem::remove(path / file);
      } else {
        if (damage == "flipped") content[content.size() / 2] ^= 0x11;
        if (damage == "cut") content.resize(content.size() / 2);
        std::ofstream(path / file, std::ios::binary) << content;
      }
      const Error error = error_of([&] { load(instance, path); });
      INFO(file << " " << damage << ": " << error.message);
      CHECK_THAT(error.message, Catch::Contains(file));
      CHECK(model_bytes(instance.export_state()) == before);
    }
  }
}

TEST_CASE("a changed byte anywhere in state.json is found") {
  const TemporaryFolder folder;
  const auto model = tied_model();
  model->table.get_generator_state = [](void*, stg_replica*, stg_tree* out) -> stg_error* {
    *out = make_tree(Bytes{{0x5A, 0x00}}).give();
    return nullptr;
  };
  model->table.set_generator_state = [](void*, stg_replica*, const uint8_t*, uint64_t) -> stg_error* { return nullptr; };
  Instance instance("data_parallel", config("2"));
  instance.setup(*model);
  instance.train(batch_of({1, 2}), 0.1);
  save(instance, folder.path / "step", R"({"epoch": 2, "loss": 0.25})");
  load(instance, folder.path / "step");
  instance.train(batch_of({1, 2}), 0.1);
  const std::string before = model_bytes(instance.export_state());
  const std::filesystem::path path = folder.path / "step" / "state.json";
  const std::string whole = read(path);
  size_t num_found = 0;
  for (size_t at = 0; at + 1 < whole.size(); ++at) {  // after the last byte comes the end of the line, which is no content
    std::string changed = whole;
    changed[at] ^= 0x02;
    std::ofstream(path, std::ios::binary) << changed;
    try {
      load(instance, folder.path / "step");
      FAIL_CHECK("not found at byte " << at << ": " << changed.substr(at < 20 ? 0 : at - 20, 40));
    } catch (const Error& error) {
      if (error.message.find("state.json") != std::string::npos) ++num_found;
    }
  }
  CHECK(num_found == whole.size() - 1);
  CHECK(model_bytes(instance.export_state()) == before);
}

TEST_CASE("buffers that a checkpoint brought stay when the next batch is refused") {
  const TemporaryFolder folder;
  const auto model = tied_model();
  ToyParameter count{{"count"}, {}, {0}};
  count.flags = STG_PARAMETER_PERSISTENT | STG_PARAMETER_PINNED;
  model->buffers.push_back(count);
  const auto step = model->on_step;
  model->on_step = [step](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
    if (context.stage == STG_STAGE_FIT) *first_element<float>(replica.buffers[0]->view) += 1;
    return step(replica, context, batch);
  };
  Instance instance("data_parallel", config("2"));
  instance.setup(*model);
  for (int i = 0; i < 3; ++i) instance.train(batch_of({1, 2}), 0.1);
  save(instance, folder.path / "step");
  instance.training_step(batch_of({1, 2}));
  load(instance, folder.path / "step");
  const auto refused = [&] {
    Dict uneven;
    uneven.emplace_back("x", tensor_of({1, 2}, {2}));
    uneven.emplace_back("y", tensor_of({1}, {1}));
    instance.train(make_tree(std::move(uneven)), 0.1);
  };
  CHECK_THAT(error_of(refused).message, Catch::Contains("rows"));
  CHECK(instance.value("count") == 3);
  // Nor does a refused batch undo a step that went well.
  instance.training_step(batch_of({1, 2}));
  CHECK_THAT(error_of(refused).message, Catch::Contains("rows"));
  CHECK(instance.value("count") == 4);
}

TEST_CASE("the host's JSON must be JSON") {
  const TemporaryFolder folder;
  const auto model = tied_model();
  Instance instance("single_device", config("1"));
  instance.setup(*model);
  CHECK_THAT(error_of([&] { save(instance, folder.path / "a", "{oops"); }).message, Catch::Contains("host_json"));
  CHECK_FALSE(std::filesystem::exists(folder.path / "a"));
  save(instance, folder.path / "b");
  CHECK(load(instance, folder.path / "b").empty());
}
