// SPDX-License-Identifier: Apache-2.0
//
// `stratagem doctor` as a program, and what `fit` says where a GPU is wanted, on machines that a stand-in for NVIDIA's driver makes up.
#include <sys/stat.h>

#include "support.hpp"

using namespace stratagem::test;

namespace {

using Environment = std::map<std::string, std::string>;

/// The driver answers with `words` (tests/unit/fake_driver.c).
Environment with_driver(const std::string& words, Environment more = {}) {
  more["LD_LIBRARY_PATH"] = TEST_FAKE_DRIVER;
  more["FAKE_CUDA"] = words;
  return more;
}

struct Rig {
  Rig() {
    for (const auto& [from, to] : {std::pair{TEST_GRADIENT_DESCENT, "plugins/gradient_descent.so"},
                                   {TEST_PLUGINS "/toy/toy_model.so", "plugins/toy_model.so"},
                                   {TEST_PLUGINS "/other_libtorch/toy_other_libtorch.so", "other/toy.so"}}) {
      fs::create_directories((folder / to).parent_path());
      fs::copy_file(from, folder / to);
      chmod((folder / to).c_str(), 0755);
    }
    write_samples(folder / "x.npy", {1, 2, 3});
  }
  /// Trains the toy, with `strategy` on top.
  fs::path config(const Json& strategy, const Json& more = Json::object()) const {
    Json json = {{"plugin_path", {"plugins"}},
                 {"strategy", {{"name", "gradient_descent"}}},
                 {"model", {{"kind", "library"}, {"name", "toy"}}},
                 {"optimizer", {{"name", "sgd"}, {"lr", 0.1}}},
                 {"data", {{"train", {{"format", "npy"}, {"inputs", "x.npy"}}}}},
                 {"checkpoint", {{"dir", "run"}}}};
    json["strategy"].update(strategy);
    json.merge_patch(more);
    write_file(folder / "c.json", json.dump());
    return folder / "c.json";
  }
  TemporaryFolder folder;
};

Json check_of(const Json& report, const std::string& id) {
  for (const Json& check : report["checks"]) {
    if (check["id"] == id) return check;
  }
  FAIL("no check " << id);
  return nullptr;
}

std::string first_wrong(const Json& report, const std::string& id) {
  const Json check = check_of(report, id);
  INFO(check.dump(2));
  REQUIRE(!check["problems"].empty());
  CHECK(check["status"] == check["problems"][0]["status"]);
  return check["problems"][0]["wrong"];
}

}  // namespace

TEST_CASE("doctor runs every check, in an order that stays, and ends with 0 where there is no fault") {
  const Rig rig;
  const std::string config = rig.config(Json::object());
  const Finished done = run_stratagem({"doctor", config, "--json"}, rig.folder.path, with_driver("devices=2"));
  const Json report = done.json();
  INFO(report.dump(2));
  std::vector<std::string> ids;
  for (const Json& check : report["checks"]) ids.push_back(check["id"]);
  CHECK(ids == std::vector<std::string>{"plugin-folders", "libtorch", "driver", "devices", "cuda-versions", "nccl",
                                        "shared-memory", "cpus", "threads", "memory", "output"});
  CHECK(report["schema_version"] == 1);
  CHECK(check_of(report, "devices")["found"] == "cuda:0 Fake GPU 0, cuda:1 Fake GPU 1");
  CHECK(check_of(report, "driver")["found"] == "NVIDIA's driver, for CUDA up to 13.2");
  CHECK(check_of(report, "plugin-folders")["found"].get<std::string>() ==
        Contains{(rig.folder / "plugins").string() + " (config): 2 plugins"});
  CHECK(check_of(report, "output")["found"].get<std::string>() == Contains{(rig.folder / "run").string() + " (to be made in "});
  CHECK(done.code == (report["status"] == "fault" ? 1 : 0));
  CHECK(check_of(report, "plugin-folders")["status"] == "ok");
}

TEST_CASE("doctor ends with 1 where there is a fault, and tells it below the lines with what to do") {
  const Rig rig;
  const Finished done = run_stratagem({"doctor"}, rig.folder.path,
                                      with_driver("init=803", {{"STRATAGEM_PLUGIN_PATH", (rig.folder / "plugins").string()}}));
  CHECK(done.code == 1);
  CHECK(done.err.empty());
  CHECK(done.out == Contains{"\nfault    driver          NVIDIA's driver, for CUDA up to 13.2\n"});
  CHECK(done.out ==
        Contains{"\n\nfault: driver: NVIDIA's driver is here but doesn't work: cuInit gives 803 (system has unsupported"});
  CHECK(done.out == Contains{"\n  to do: the kernel module and libcuda.so.1 are of different versions; "});
  CHECK(done.out == Contains{"1 fault, "});
}

TEST_CASE("doctor's JSON is as its documentation shows it") {
  const Rig rig;
  const Json report = run_stratagem({"doctor", "--json"}, rig.folder.path, with_driver("init=803")).json();
  Json shown = report;
  shown["checks"] = Json::array({check_of(report, "driver")});
  CHECK(shown == Json::parse(read_file(TEST_SOURCE "/tests/host/doctor_report.json")));
}

TEST_CASE("doctor ends with 0 over warnings") {
  const Rig rig;
  chmod((rig.folder / "other").c_str(), 0777);
  const std::string config = rig.config({{"accelerator", "cpu"}}, {{"plugin_path", {"plugins", "other"}}, {"threads", 1}});
  const Finished done = run_stratagem({"doctor", config, "--json"}, rig.folder.path, with_driver("devices=0"));
  const Json report = done.json();
  CHECK(check_of(report, "plugin-folders")["status"] == "warning");
  CHECK(first_wrong(report, "devices") == Contains{"finds no GPU"});
  CHECK(done.code == (report["status"] == "fault" ? 1 : 0));
}

TEST_CASE("doctor sees a driver that is too old for LibTorch, and a LibTorch that is not found") {
  const Rig rig;
  const std::string config =
      rig.config(Json::object(), {{"plugin_path", {"plugins", "other"}}, {"model", {{"path", "other/toy.so"}}}});
  const Finished missing = run_stratagem({"doctor", config, "--json"}, rig.folder.path, with_driver("devices=1"));
  CHECK(missing.code == 1);
  CHECK(first_wrong(missing.json(), "libtorch") ==
        Contains{(rig.folder / "other/toy.so").string() + " needs libtorch_cpu.so of LibTorch 1.13.1"});
}

TEST_CASE("doctor says what a config's run lacks: GPUs, a folder to write to, its plugins") {
  const Rig rig;
  const std::string config = rig.config({{"name", "gradient_decent"}, {"accelerator", "cuda"}, {"devices", {0, 1, 5}}},
                                        {{"checkpoint", {{"dir", "x.npy/run"}}}});
  const Json report = run_stratagem({"doctor", config, "--json"}, rig.folder.path, with_driver("devices=2")).json();
  CHECK(first_wrong(report, "devices") ==
        Contains{"names 5, and there is no such GPU; there are cuda:0 Fake GPU 0, cuda:1 Fake GPU 1"});
  CHECK(first_wrong(report, "plugin-folders") == Contains{"did you mean \"gradient_descent\"?"});
  CHECK(first_wrong(report, "output") == Contains{(rig.folder / "x.npy").string() + " is a file"});
  const Json hidden =
      run_stratagem({"doctor", config, "--json"}, rig.folder.path, with_driver("init=100", {{"CUDA_VISIBLE_DEVICES", "9"}}))
          .json();
  CHECK(first_wrong(hidden, "devices") == Contains{"no GPU under CUDA_VISIBLE_DEVICES=\"9\""});
}

TEST_CASE("doctor sees a folder that can't be written to, and threads beyond the CPUs") {
  const Rig rig;
  fs::create_directory(rig.folder / "closed");
  chmod((rig.folder / "closed").c_str(), 0500);
  chmod(rig.folder.path.c_str(), 0755);
  const Json report =
      run_stratagem({"doctor", "--json"}, rig.folder / "closed", {{"OMP_NUM_THREADS", "4096"}}, {.obeys_modes = true}).json();
  CHECK(first_wrong(report, "output") == "can't write to " + (rig.folder / "closed").string() + ": Permission denied");
  CHECK(first_wrong(report, "cpus") == Contains{"4096 threads asked for by OMP_NUM_THREADS"});
}

TEST_CASE("doctor ends with 2 over a config that can't be read, and over a wrong command line") {
  CHECK(run_stratagem({"doctor", "/nowhere/c.json"}).code == 2);
  CHECK(run_stratagem({"doctor", "/nowhere/c.json"}).err == Contains{"can't read /nowhere/c.json"});
  CHECK(run_stratagem({"doctor", "a", "b"}).code == 2);
  const Rig rig;
  write_file(rig.folder / "c.json", "{");
  CHECK(run_stratagem({"doctor", (rig.folder / "c.json").string()}).code == 2);
}

TEST_CASE("A config that wants a GPU where there is none ends with 3, and says what is missing, before a plugin is loaded") {
  const Rig rig;
  // A plugin that could not be loaded: that nothing is said of it tells that nobody tried.
  const Json strategy = {{"name", "bad"}, {"path", TEST_PLUGINS "/bad/refuses.so"}, {"accelerator", "cuda"}};
  const std::string config = rig.config(strategy);
  const Finished fit = run_stratagem({"fit", config}, "/", with_driver("init=803"));
  CHECK(fit.code == 3);
  CHECK(fit.out.empty());
  CHECK(fit.err == Contains{"/strategy/accelerator: \"cuda\": NVIDIA's driver is here but doesn't work: cuInit gives 803"});
  CHECK(fit.err.find("Tuesday") == std::string::npos);
  CHECK(!fs::exists(rig.folder / "run"));
  const Finished hidden = run_stratagem({"fit", config}, "/", with_driver("init=100", {{"CUDA_VISIBLE_DEVICES", "3"}}));
  CHECK(hidden.code == 3);
  CHECK(hidden.err == Contains{"\"cuda\": NVIDIA's driver finds no GPU under CUDA_VISIBLE_DEVICES=\"3\"; unset it"});
  // Where there is one, the strategy is asked.
  CHECK(run_stratagem({"fit", config}, "/", with_driver("devices=1")).err == Contains{"Tuesday"});
}

TEST_CASE("A missing GPU stands in one list with what else is wrong, as the config's mistake") {
  const Rig rig;
  const std::string config = rig.config({{"name", "gradient_decent"}, {"accelerator", "cuda"}}, {{"sede", 1}});
  const Finished fit = run_stratagem({"fit", config}, "/", with_driver("devices=0"));
  CHECK(fit.code == 2);
  for (const char* part : {"/sede: unknown key", "/strategy/accelerator: \"cuda\": NVIDIA's driver is here, but finds no GPU",
                           "/strategy/name: there is no strategy \"gradient_decent\"; did you mean \"gradient_descent\"?"})
    CHECK(fit.err == Contains{part});
  const Finished missing =
      run_stratagem({"fit", rig.config({{"path", "none.so"}, {"accelerator", "cuda"}})}, "/", with_driver("devices=0"));
  CHECK(missing.code == 2);
  CHECK(missing.err == Contains{"/strategy/path: there is no file " + (rig.folder / "none.so").string()});
}

TEST_CASE("A strategy that can't use the GPUs that there are says so, and other accelerators ask for none") {
  const Rig rig;
  const Finished cuda = run_stratagem({"fit", rig.config({{"accelerator", "cuda"}})}, "/", with_driver("devices=1"));
  CHECK(cuda.code == 3);
  CHECK(cuda.err ==
        Contains{"/strategy/accelerator is \"cuda\", which the strategy \"gradient_descent\" can't use here; it can use cpu"});
  for (const char* accelerator : {"cpu", "auto"}) {
    const Finished other = run_stratagem({"fit", rig.config({{"accelerator", accelerator}})}, "/", with_driver("init=803"));
    CHECK(other.err.find("cuInit") == std::string::npos);
  }
}
