// SPDX-License-Identifier: Apache-2.0
//
// Predictions through the command line, under both strategies.
#include <sys/stat.h>

#include <fstream>

#include "base/dlpack.hpp"
#include "base/safetensors.hpp"
#include "libstratagem/data/npz.hpp"
#include "libstratagem/loop/predictions.hpp"
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

namespace {

Finished predict(const Run& run, const std::string& file, const std::vector<std::string>& overrides = {}) {
  return run.command("predict", overrides,
                     {"--json", "--checkpoint", (run.folder / "run").string(), "--output", (run.folder / file).string()});
}

constexpr stg_dtype bfloat16 = {STG_DTYPE_BFLOAT, 16, 1};

}  // namespace

TEST_CASE("bfloat16 predictions are float32 in an .npz file, which is said, and stay what they are in a .safetensors file") {
  Run run("single_device");
  const uint16_t halves[] = {0x3FC0, 0xC000, 0x7F80};  // 1.5, -2, infinity
  const TensorPtr tensor = allocate_tensor(bfloat16, {3, 1});
  std::copy(std::begin(halves), std::end(halves), first_element<uint16_t>(tensor->view));
  {
    std::ofstream out(run.folder / "b.safetensors", std::ios::binary);
    write_safetensors(
        [&](const void* data, uint64_t size_bytes) {
          out.write(static_cast<const char*>(data), static_cast<std::streamsize>(size_bytes));
        },
        {{"inputs", &tensor->view}});
  }
  run.config["data"]["predict"] = {{"format", "safetensors"}, {"inputs", "b.safetensors"}, {"batch_size", 2}};
  REQUIRE(run.fit().code == 0);
  const Finished npz = predict(run, "p.npz");
  INFO(npz.err);
  REQUIRE(npz.code == 0);
  CHECK(npz.err == Contains{"\"x\" are bfloat16"});
  const TensorPtr read = NpzFile(run.folder / "p.npz").read("x");
  CHECK(dtype_name(read->view.dtype) == "float32");
  for (int64_t i = 0; i < 3; ++i) CHECK(read_element(read->view, i) == read_element(tensor->view, i));
  const Finished safetensors = predict(run, "p.safetensors");
  CHECK_FALSE(safetensors.err == Contains{"bfloat16"});
  const SafetensorsFile file(Storage().open((run.folder / "p.safetensors").string()));
  CHECK(dtype_name(file.find("x")->dtype) == "bfloat16");
}

TEST_CASE("What a file of predictions can't hold is told with the first batch") {
  for (const auto& [file, dtype, text] : {std::tuple{"p.npz", stg_dtype{STG_DTYPE_COMPLEX, 32, 1}, "complex32"},
                                          std::tuple{"p.safetensors", stg_dtype{STG_DTYPE_COMPLEX, 128, 1}, "complex128"}}) {
    Predictions predictions{fs::path(file)};
    const Tree outputs = make_tree(allocate_tensor(dtype, {2, 3}));
    const Error error = error_of([&] { predictions.add(outputs.root(), 2); });
    CHECK(error.code == STG_INVALID_ARGUMENT);
    CHECK(error.message == Contains{"\"predictions\" as " + std::string(text)});
  }
}

TEST_CASE("Predictions follow a link, also to a file that isn't there yet, and replace nothing but files") {
  Run run("single_device", {3, 2, 1});
  run.config["data"]["predict"] = {{"format", "npy"}, {"inputs", "x.npy"}};
  REQUIRE(run.fit().code == 0);
  fs::create_directory(run.folder / "far");
  fs::create_symlink("far/p.bin", run.folder / "p.npz");
  for (int time = 0; time < 2; ++time) {
    const Finished done = predict(run, "p.npz");
    INFO(done.err);
    REQUIRE(done.code == 0);
    CHECK(fs::is_symlink(run.folder / "p.npz"));
    CHECK(NpzFile(run.folder / "far/p.bin").names() == std::vector<std::string>{"x", "boxes.0"});
    write_file(run.folder / "far/p.bin", "old");
  }
  fs::create_symlink("loop.npz", run.folder / "loop.npz");
  CHECK(predict(run, "loop.npz").err == Contains{"a link that leads to no file"});
  REQUIRE(mkfifo((run.folder / "pipe.npz").c_str(), 0600) == 0);
  const Finished pipe = predict(run, "pipe.npz");
  CHECK(pipe.code == 2);
  CHECK(pipe.err == Contains{"pipe.npz is no regular file"});
  CHECK(fs::is_fifo(run.folder / "pipe.npz"));
}

TEST_CASE("Predictions don't replace their own data, and metrics not the config") {
  Run run("single_device", {3, 2, 1});
  run.config["data"]["predict"] = {{"format", "npz"}, {"inputs", "in.npz"}};
  write_file(run.folder / "in.npz", "the only copy");
  REQUIRE(run.fit().code == 0);
  const Finished refused = predict(run, "in.npz");
  CHECK(refused.code == 2);
  CHECK(refused.err == Contains{(run.folder / "in.npz").string() + " is the file of /data/predict/inputs"});
  CHECK(read_file(run.folder / "in.npz") == "the only copy");
  const Finished weights = predict(run, "run/step-00000003/weights.safetensors");
  CHECK(weights.code == 2);
  CHECK(weights.err == Contains{"lies in a checkpoint"});
  const Finished metrics = run.fit({"metrics.path=c.json"});
  CHECK(metrics.code == 2);
  CHECK(metrics.err == Contains{"/metrics/path: " + (run.folder / "c.json").string() + " is the config itself"});
  CHECK(fs::exists(run.folder / "c.json"));
  CHECK_FALSE(fs::exists(run.folder / "c.json.previous"));
}
