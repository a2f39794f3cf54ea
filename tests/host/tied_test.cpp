// SPDX-License-Identifier: Apache-2.0
//
// A tied weight through a checkpoint and another process.
#include "base/checksum.hpp"
#include "base/dlpack.hpp"
#include "base/safetensors.hpp"
#include "run.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

using OrderedJson = nlohmann::ordered_json;

/// layer1.weight is layer0.weight.
struct Tied : Run {
  explicit Tied(const std::string& strategy) : Run(strategy, {0.5, 1, 1.5, 2}) {
    config["model"] = {
        {"kind", "library"}, {"path", TEST_MLP}, {"options", {{"sizes", {1, 1, 1}}, {"activation", "tanh"}, {"tied", true}}}};
    config["optimizer"] = {{"name", "adamw"}, {"lr", 0.1}};
    config["data"]["train"] = {{"format", "npy"}, {"inputs", "x.npy"}, {"targets", "x.npy"}, {"batch_size", 2}};
  }
  OrderedJson state(const std::string& checkpoint) const {
    return OrderedJson::parse(read_file(folder / "run" / checkpoint / "state.json"));
  }
  /// With the checksum that makes it whole again.
  void write_state(const std::string& checkpoint, OrderedJson state) const {
    state.erase("checksum");
    const std::string text = state.dump();
    Checksum checksum;
    checksum.add(text.data(), text.size());
    state["checksum"] = checksum.text();
    write_file(folder / "run" / checkpoint / "state.json", state.dump(2));
  }
  std::vector<std::string> names(const std::string& checkpoint) const {
    std::vector<std::string> all;
    const SafetensorsFile file(Storage().open((folder / "run" / checkpoint / "weights.safetensors").string()));
    for (const auto& entry : file.entries()) all.push_back(entry.name);
    return all;
  }
  void drop_tensor(const std::string& checkpoint, const std::string& name) const {
    const fs::path path = folder / "run" / checkpoint / "weights.safetensors";
    std::vector<TensorPtr> tensors;
    std::vector<NamedTensor> kept;
    const SafetensorsFile file(Storage().open(path.string()));
    for (const auto& entry : file.entries()) {
      if (entry.name == name) continue;
      tensors.push_back(file.read(entry));
      kept.push_back({entry.name, &tensors.back()->view});
    }
    std::string content;
    const auto append = [&](const void* data, uint64_t size_bytes) {
      content.append(static_cast<const char*>(data), size_bytes);
    };
    const WrittenFile written = write_safetensors(append, kept, file.metadata());
    write_file(path, content);
    OrderedJson changed = state(checkpoint);
    changed["files"]["weights.safetensors"] = {{"size_bytes", written.size_bytes}, {"checksum", written.checksum}};
    write_state(checkpoint, std::move(changed));
  }
};

}  // namespace

TEST_CASE(
    "A tied weight is tied still in the process that goes on, and a checkpoint that lacks a name of it ends with 2 and that "
    "name") {
  const std::string strategy = GENERATE("single_device", "data_parallel");
  const Tied unbroken(strategy), run(strategy);
  REQUIRE(unbroken.fit({"trainer.max_steps=3"}).code == 0);
  REQUIRE(run.fit({"trainer.max_steps=2"}).code == 0);
  const OrderedJson saved = run.state("step-00000002");
  CHECK(saved["aliases"] == OrderedJson{{"layer1.weight", "layer0.weight"}});
  const std::vector<std::string> names = {"layer0.weight", "layer0.bias", "layer1.bias"};
  CHECK(run.names("step-00000002") == names);

  OrderedJson without = saved;
  without["aliases"] = OrderedJson::object();
  run.write_state("step-00000002", without);
  const Finished no_alias = run.resume({"trainer.max_steps=3"});
  CHECK(no_alias.code == 2);
  CHECK(no_alias.err == Contains{"missing: layer1.weight"});
  run.write_state("step-00000002", saved);

  const Finished resumed = run.resume({"trainer.max_steps=3"});
  INFO(resumed.err);
  REQUIRE(resumed.code == 0);
  for (const char* file : {"weights.safetensors", "optimizer.safetensors"})
    CHECK(read_file(run.folder / "run/step-00000003" / file) == read_file(unbroken.folder / "run/step-00000003" / file));
  CHECK(run.state("step-00000003")["aliases"] == saved["aliases"]);
  CHECK(run.names("step-00000003") == names);

  run.drop_tensor("step-00000003", "layer0.weight");
  const Finished no_tensor = run.resume({"trainer.max_steps=4"});
  CHECK(no_tensor.code == 2);
  CHECK(no_tensor.err == Contains{"missing: layer0.weight, layer1.weight"});
  CHECK(run.checkpoints() == std::vector<std::string>{"last", "step-00000002", "step-00000003"});
}
