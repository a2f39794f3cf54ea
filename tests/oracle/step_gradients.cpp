// SPDX-License-Identifier: Apache-2.0
//
// The gradients that a strategy gives, through the C ABI, for check_steps.py to compare:
//
//   step_gradients STRATEGY CONFIG MODEL_LIBRARY MODEL OPTIONS IN.safetensors OUT.safetensors
//
// IN has for each step n (0, 1, ...) the weights that it starts from ("<n>/model/<name>") and the batch ("<n>/batch/<key>"); OUT gets its
// loss ("<n>/loss"), gradients ("<n>/gradients/<name>") and the model as the step leaves it ("<n>/model/<name>": buffers move), and
// the generators that the replicas began with ("generators/<replica>").
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>

#include "base/safetensors.hpp"
#include "spec/instance.hpp"

using namespace stratagem;
using stratagem::test::Instance;

namespace {

class Steps {
 public:
  explicit Steps(const std::string& path) : file_(Storage{}.open(path)) {
    for (const auto& entry : file_.entries()) {
      const size_t slash = entry.name.find('/');
      const size_t next = entry.name.find('/', slash + 1);
      steps_[std::stoi(entry.name.substr(0, slash))][entry.name.substr(slash + 1, next - slash - 1)].push_back(&entry);
    }
  }

  int num_steps() const { return static_cast<int>(steps_.size()); }

  /// The tensors under "<step>/<kind>/".
  Dict read(int step, const std::string& kind) const {
    Dict dict;
    for (const auto* entry : steps_.at(step).at(kind)) {
      dict.emplace_back(entry->name.substr(concat(step, '/', kind, '/').size()), file_.read(*entry));
    }
    return dict;
  }

 private:
  SafetensorsFile file_;
  std::map<int, std::map<std::string, std::vector<const SafetensorsFile::Entry*>>> steps_;
};

class Results {
 public:
  void add(std::string name, TensorPtr tensor) { tensors_.emplace_back(std::move(name), std::move(tensor)); }

  /// Copies of a dict's tensors; what is none is left out.
  void add_all(const std::string& prefix, const stg_value& dict) {
    for (uint32_t i = 0; i < dict.count; ++i) {
      const stg_entry& entry = dict.as.entries[i];
      if (entry.value.type == STG_TENSOR) add(prefix + std::string(text_of(entry.key)), copy_tensor(entry.value.as.tensor->view));
    }
  }

  void add_generators(const stg_value& generators) {
    for (uint32_t i = 0; i < generators.count; ++i) {
      const stg_value& bytes = generators.as.items[i];
      TensorPtr tensor = allocate_tensor(uint8, {bytes.count});
      std::copy_n(bytes.as.bytes, bytes.count, first_element<uint8_t>(tensor->view));
      add(concat("generators/", i), std::move(tensor));
    }
  }

  void write(const std::filesystem::path& path) const {
    std::vector<NamedTensor> named;
    for (const auto& [name, tensor] : tensors_) named.push_back({name, &tensor->view});
    std::ofstream file(path, std::ios::binary);
    write_safetensors([&](const void* data, uint64_t size_bytes) { file.write(static_cast<const char*>(data), size_bytes); },
                      named);
    if (!file.flush()) throw Error{STG_UNAVAILABLE, "can't write " + path.string()};
  }

 private:
  std::vector<std::pair<std::string, TensorPtr>> tensors_;
};

// What a step starts from: the reference's weights, the scale as it is, and the given random numbers.
Tree state_of(const Steps& steps, int step, Value scaler, const List& generators) {
  Dict state;
  state.emplace_back("format", int64_t{STG_STATE_FORMAT});
  state.emplace_back("model", steps.read(step, "model"));
  state.emplace_back("scaler", std::move(scaler));
  List again;
  for (const Value& generator : generators) again.emplace_back(std::get<Bytes>(generator.data));
  state.emplace_back("generators", std::move(again));
  return make_tree(std::move(state));
}

Value take_entry(Tree state, std::string_view key) {
  Value value = take(std::move(state));
  for (auto& [name, entry] : std::get<Dict>(value.data)) {
    if (name == key) return std::move(entry);
  }
  return {};
}

void run_step(Instance& instance, const Steps& steps, int step, Results& results) {
  const Value generators = take_entry(instance.export_state(), "generators");
  for (int attempt = 0;; ++attempt) {
    instance.import_state(state_of(steps, step, take_entry(instance.export_state(), "scaler"), std::get<List>(generators.data)));
    const test::StepOutcome outcome = instance.training_step(make_tree(steps.read(step, "batch")));
    instance.backward(/*is_last=*/true);
    try {
      results.add_all(concat(step, "/gradients/"), instance.gradients().root());
    } catch (const Error& error) {
      if (error.code != STG_OUT_OF_RANGE || attempt == 24) throw;
      continue;  // an overflow: the scale is lower now
    }
    const stg_value& outputs = outcome.outputs.root();
    const stg_value& loss = outputs.type == STG_DICT ? *find(outputs, "loss") : outputs;
    results.add(concat(step, "/loss"), copy_tensor(loss.as.tensor->view));
    results.add_all(concat(step, "/model/"), *find(instance.export_state().root(), "model"));
    return;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) {
    std::cerr << "usage: step_gradients STRATEGY CONFIG MODEL_LIBRARY MODEL OPTIONS IN OUT\n";
    return 2;
  }
  try {
    const Steps steps(argv[6]);
    const test::ModelPtr model = test::make_model(test::load_plugin(argv[3]), argv[4], argv[5]);
    Instance instance(argv[1], argv[2]);
    instance.setup(model.get());
    Results results;
    results.add_generators(*find(instance.export_state().root(), "generators"));
    for (int step = 0; step < steps.num_steps(); ++step) run_step(instance, steps, step, results);
    results.write(argv[7]);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
