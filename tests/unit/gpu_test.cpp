// SPDX-License-Identifier: Apache-2.0
//
// The search for GPUs against stand-ins for NVIDIA's driver (fake_driver.c), one process each.
#include "base/gpu.hpp"

#include <stdio.h>

#include <nlohmann/json.hpp>

#include "unit/support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

struct Answer {
  Gpus::State state;
  std::vector<std::string> names;
  int cuda_version;
  std::string missing;
};

/// `settings`: variables of the environment, as a shell has them before a command.
Answer ask(const std::string& settings, const std::string& library = "") {
  FILE* out = popen(("env -u CUDA_VISIBLE_DEVICES " + settings + " " PRINT_GPUS " " + library).c_str(), "r");
  REQUIRE(out != nullptr);
  std::string text;
  for (int next; (next = fgetc(out)) != EOF;) text += static_cast<char>(next);
  REQUIRE(pclose(out) == 0);
  const nlohmann::json json = nlohmann::json::parse(text);
  return {static_cast<Gpus::State>(json["state"].get<int>()), json["names"], json["cuda_version"], json["missing"]};
}

Answer ask_fake(const std::string& words, const std::string& settings = "") {
  return ask("LD_LIBRARY_PATH=" FAKE_DRIVER_FOLDER " FAKE_CUDA='" + words + "' " + settings);
}

bool holds(const std::string& text, const std::string& part) {
  UNSCOPED_INFO("the text: " << text);
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("GPUs are told by index and name, with the newest CUDA that their driver has") {
  const Answer two = ask_fake("devices=2 version=13020");
  CHECK(two.state == Gpus::State::found);
  CHECK(two.names == std::vector<std::string>{"Fake GPU 0", "Fake GPU 1"});
  CHECK(two.cuda_version == 13020);
  CHECK(two.missing.empty());
  CHECK(cuda_version_text(13020) == "13.2");
  CHECK(cuda_version_text(12040) == "12.4");
}

TEST_CASE("A GPU whose name can't be had keeps its index") {
  CHECK(ask_fake("devices=2 name=999").names == std::vector<std::string>{"a GPU without a name", "a GPU without a name"});
}

TEST_CASE("Without a driver its library is named, and how to get it") {
  const Answer none = ask("", "libcuda-that-is-not-here.so.1");
  CHECK(none.state == Gpus::State::no_driver);
  CHECK(none.names.empty());
  CHECK(none.cuda_version == 0);
  CHECK(none.missing ==
        "there is no NVIDIA driver here (libcuda-that-is-not-here.so.1 is not found); install NVIDIA's driver; in a container, "
        "start "
        "it with the GPUs (docker run --gpus all, with NVIDIA's container toolkit)");
}

TEST_CASE("A driver's library that is damaged, or isn't one, is told from none") {
  const TemporaryFolder folder;
  write_file(folder / "libcuda.so.1", "text");
  const Answer damaged = ask("LD_LIBRARY_PATH=" + folder.path().native());
  CHECK(damaged.state == Gpus::State::broken_driver);
  CHECK(holds(damaged.missing, "NVIDIA's driver library can't be loaded: "));
  CHECK(holds(damaged.missing, folder / "libcuda.so.1"));
  const Answer other = ask("LD_LIBRARY_PATH=" FAKE_DRIVER_FOLDER "/without_version");
  CHECK(other.state == Gpus::State::broken_driver);
  CHECK(holds(other.missing, "libcuda.so.1 is not NVIDIA's: it has no function cuDriverGetVersion"));
}

TEST_CASE("A driver that doesn't start is told with the code, its own text and what helps") {
  const Answer mismatch = ask_fake("init=803");
  CHECK(mismatch.state == Gpus::State::broken_driver);
  CHECK(mismatch.cuda_version == 13020);
  CHECK(holds(mismatch.missing,
              "cuInit gives 803 (system has unsupported display driver / cuda driver combination); the kernel module "
              "and libcuda.so.1 are of different versions"));
  CHECK(holds(ask_fake("init=34").missing, "cuInit gives 34; this libcuda.so.1 is a toolkit's stub"));
  CHECK(holds(ask_fake("init=802").missing, "start nvidia-fabricmanager"));
  CHECK(holds(ask_fake("init=804").missing, "compat library"));
  CHECK(holds(ask_fake("init=999").missing, "cuInit gives 999; see whether nvidia-smi works"));
  CHECK(holds(ask_fake("count=3").missing, "cuDeviceGetCount gives 3; "));
}

TEST_CASE("A driver without a GPU is told, and CUDA_VISIBLE_DEVICES where it is set") {
  for (const char* words : {"init=100", "devices=0"}) {
    const Answer none = ask_fake(words);
    CHECK(none.state == Gpus::State::no_gpu);
    CHECK(holds(none.missing, "NVIDIA's driver is here, but finds no GPU; nvidia-smi -L"));
    CHECK(!holds(none.missing, "CUDA_VISIBLE_DEVICES"));
    const Answer hidden = ask_fake(words, "CUDA_VISIBLE_DEVICES=7");
    CHECK(hidden.state == Gpus::State::no_gpu);
    CHECK(holds(hidden.missing, "no GPU under CUDA_VISIBLE_DEVICES=\"7\"; unset it"));
    CHECK(holds(ask_fake(words, "CUDA_VISIBLE_DEVICES=").missing, "no GPU under CUDA_VISIBLE_DEVICES=\"\"; unset it"));
  }
}
