// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/config/overwrites.hpp"

#include "base/error.hpp"

namespace stratagem {
namespace fs = std::filesystem;
namespace {

struct Input {
  fs::path file;
  std::string what;
};

std::vector<Input> inputs_of(const Config& config) {
  std::vector<Input> inputs;
  if (fs::path(config.source).is_absolute()) inputs.push_back({config.source, "the config itself"});
  const auto add = [&](const fs::path& file, const std::string& pointer) {
    if (!file.empty()) inputs.push_back({file, "the file of " + pointer});
  };
  if (config.strategy.path) add(*config.strategy.path, config.strategy.pointer);
  if (config.model.path) add(*config.model.path, config.model.pointer);
  // Of a TorchScript file; a model's own options may have such a path, too.
  if (const Json& options = config.model.options; options.is_object() && options.contains("path") && options["path"].is_string())
    add(options["path"].get<std::string>(), "/model/path");
  const auto add_data = [&](const std::optional<DatasetConfig>& data, const std::string& pointer) {
    if (!data) return;
    add(data->inputs.path, pointer + "/inputs");
    if (data->targets) add(data->targets->path, pointer + "/targets");
  };
  add_data(config.train, "/data/train");
  add_data(config.validation, "/data/validation");
  add_data(config.test, "/data/test");
  add_data(config.predict, "/data/predict");
  return inputs;
}

/// Through links, too; a file that isn't there is known by its name.
bool is_same(const fs::path& a, const fs::path& b) {
  std::error_code none;
  return a == b || fs::equivalent(a, b, none);
}

/// Why `file` can't be written, or nothing.
std::string conflict(const fs::path& file, const std::vector<Input>& inputs) {
  for (const Input& input : inputs) {
    if (is_same(file, input.file))
      return concat(file.string(), " is ", input.what, " and would be overwritten; give another path");
  }
  const fs::path folder = file.parent_path();
  if (fs::exists(folder / "state.json") && fs::exists(folder / "weights.safetensors"))
    return concat(file.string(), " lies in a checkpoint, whose files stay as they are; give a path outside of it");
  return "";
}

}  // namespace

void check_overwrites(const Config& config, Command command, const fs::path& predictions, Problems& problems) {
  std::vector<Input> inputs = inputs_of(config);
  if (!predictions.empty()) {
    if (const std::string text = conflict(predictions, inputs); !text.empty()) throw invalid_argument("predictions: ", text);
  }
  if (command != Command::fit) return;
  const auto check = [&](const fs::path& file, const char* pointer) {
    if (const std::string text = conflict(file, inputs); !text.empty()) problems.add(pointer, text);
  };
  if (config.checkpoint) {
    for (const char* name : {"last", "best"}) {
      const fs::path file = config.checkpoint->dir / name;
      check(file, "/checkpoint/dir");
      inputs.push_back({file, concat("where the run keeps the name of its ", name, " checkpoint")});
    }
  }
  if (!config.metrics) return;
  check(*config.metrics, "/metrics/path");
  check(config.metrics->string() + ".previous", "/metrics/path");
}

}  // namespace stratagem
