// SPDX-License-Identifier: Apache-2.0
#include "run.hpp"

#include <algorithm>
#include <fstream>

namespace stratagem::test {

Run::Run(const std::string& strategy, const std::vector<float>& samples) {
  write_samples(folder / "x.npy", samples);
  config = Json::parse(R"({
    "strategy": {"accelerator": "cpu"}, "model": {"kind": "library", "name": "toy", "options": {"trace": ""}},
    "optimizer": {"name": "sgd", "lr": 1}, "data": {"train": {"format": "npy", "inputs": "x.npy"}},
    "checkpoint": {"dir": "run"}, "metrics": {"path": "m.jsonl"}})");
  config["strategy"]["name"] = strategy;
  if (strategy == "data_parallel") config["strategy"]["devices"] = 2;
  config["model"]["options"]["trace"] = (folder / "trace").string();
}

Finished Run::command(const std::string& name, const std::vector<std::string>& overrides, const std::vector<std::string>& more,
                      Surroundings surroundings) const {
  write_file(folder / "c.json", config.dump());
  std::vector<std::string> words = {name, (folder / "c.json").string()};
  for (const std::string& text : overrides) {
    words.emplace_back("--set");
    words.push_back(text);
  }
  words.insert(words.end(), more.begin(), more.end());
  return run_stratagem(words, "/", {{"STRATAGEM_PLUGIN_PATH", TEST_PLUGINS "/toy"}}, surroundings);
}

Finished Run::fit(const std::vector<std::string>& overrides, const std::vector<std::string>& more) const {
  return command("fit", overrides, more);
}

Finished Run::resume(const std::vector<std::string>& overrides) const {
  return fit(overrides, {"--json", "--resume", (folder / "run").string()});
}

std::vector<Json> Run::metrics(const std::string& stage) const {
  std::vector<Json> lines;
  std::ifstream in(folder / "m.jsonl");
  for (std::string text; std::getline(in, text);) {
    Json line = Json::parse(text);
    CHECK(line.at("time").is_number());
    line.erase("time");
    if (line.at("stage") == stage) lines.push_back(line);
  }
  return lines;
}

std::vector<double> Run::values(const std::string& stage, const std::string& name) const {
  std::vector<double> all;
  for (const Json& line : metrics(stage)) all.push_back(line.at(name).get<double>());
  return all;
}

std::vector<std::string> Run::trace() const {
  std::vector<std::string> lines;
  std::ifstream in(folder / "trace");
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  fs::remove(folder / "trace");
  return lines;
}

std::vector<std::string> Run::checkpoints() const {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder / "run")) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

Json Run::position(const std::string& checkpoint) const {
  Json state = Json::parse(read_file(folder / "run" / checkpoint / "state.json"));
  const Json& host = state.at("host");
  return host.is_string() ? Json::parse(host.get<std::string>()) : host;
}

std::vector<std::string> numbers(int first, int last) {
  std::vector<std::string> texts;
  for (int i = first; i <= last; ++i) texts.push_back(std::to_string(i));
  return texts;
}

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace stratagem::test
