// SPDX-License-Identifier: Apache-2.0
//
// Predictions through the command line, under both strategies.
#include "base/dlpack.hpp"
#include "base/safetensors.hpp"
#include "libstratagem/data/npz.hpp"
#include "run.hpp"

using namespace stratagem;
using namespace stratagem::test;

TEST_CASE("predict writes what a checkpoint predicts, a row per sample, in the samples' order") {
  Run run("data_parallel", {5, 4, 3, 2, 1});
  run.config["data"]["predict"] = {{"format", "npy"}, {"inputs", "x.npy"}, {"batch_size", 3}};
  REQUIRE(run.fit().code == 0);
  const auto predict = [&](const std::string& file, const std::vector<std::string>& overrides = {}) {
    return run.command("predict", overrides,
                       {"--json", "--checkpoint", (run.folder / "run").string(), "--output", (run.folder / file).string()});
  };
  const std::vector<double> expected = {5, 4, 3, 2, 1};
  const auto values = [](const TensorPtr& tensor) {
    std::vector<double> all;
    for (int64_t i = 0; i < numel(tensor->view); ++i) all.push_back(read_element(tensor->view, i));
    return all;
  };
  const Finished done = predict("p.npz");
  INFO(done.err);
  REQUIRE(done.code == 0);
  CHECK(done.json()["predictions"] == (run.folder / "p.npz").string());
  CHECK(done.json()["arrays"] == Json{{"x", {5, 1}}, {"boxes.0", {5, 1}}});
  const NpzFile npz(run.folder / "p.npz");
  CHECK(npz.names() == std::vector<std::string>{"x", "boxes.0"});
  for (const std::string& name : npz.names()) CHECK(values(npz.read(name)) == expected);
  REQUIRE(predict("p.safetensors", {"strategy.name=single_device", "strategy.devices=1"}).code == 0);
  const SafetensorsFile file(Storage().open((run.folder / "p.safetensors").string()));
  CHECK(values(file.read(*file.find("x"))) == expected);

  const std::string whole = read_file(run.folder / "p.npz");
  const Finished refused = predict("p.npz", {"model.options.predicts_loss=true"});
  CHECK(refused.code == 1);
  CHECK(refused.err == Contains{"\"loss\" of shape (2) for a batch of 3 samples"});
  CHECK(read_file(run.folder / "p.npz") == whole);
  CHECK(std::distance(fs::directory_iterator(run.folder.path), {}) == 7);  // no leftovers
  CHECK(predict("p.csv").err == Contains{"ends in .npz or .safetensors, not to " + (run.folder / "p.csv").string()});
  CHECK(predict("p.csv").code == 2);
  for (const std::string file_name : {"p.npz", "p.safetensors"}) {
    const std::string before = read_file(run.folder / file_name);
    const Finished full =
        run.command("predict", {}, {"--checkpoint", (run.folder / "run").string(), "--output", (run.folder / file_name).string()},
                    {.max_file_bytes = 150});
    CHECK(full.code == 1);
    CHECK(full.err == Contains{"can't write " + (run.folder / file_name).string() + ": File too large"});
    CHECK(read_file(run.folder / file_name) == before);
  }
  CHECK(std::distance(fs::directory_iterator(run.folder.path), {}) == 7);
  fs::create_directory(run.folder / "folder.npz");
  CHECK(predict("folder.npz").err == Contains{(run.folder / "folder.npz").string() + " is a folder"});
  CHECK(predict("folder.npz").code == 2);
  CHECK(predict("none/p.npz").err == Contains{"can't write to " + (run.folder / "none").string()});
  CHECK(predict("p.npz", {"data.predict=null"}).err == Contains{"/data/predict: this key is required to predict"});
}
