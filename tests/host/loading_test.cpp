// SPDX-License-Identifier: Apache-2.0
//
// Loading: a plugin that is wrong in one way is refused with the file and that reason, and nothing breaks. Each is a real file, made from
// bad_plugins/bad_plugin.c.
#include <sys/stat.h>

#include <thread>

#include "base/value.hpp"
#include "libstratagem/plugins/loader.hpp"
#include "libstratagem/plugins/mapped.hpp"
#include "support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

fs::path bad(const std::string& name) { return fs::path(TEST_PLUGINS "/bad") / (name + ".so"); }

}  // namespace

TEST_CASE("A plugin with one fault is refused with the file and the fault") {
  struct Row {
    const char* name;
    const char* reason;
  };
  const Row rows[] = {
      {"no_note", " is no Stratagem plugin"},
      {"other_major", " is built for ABI 2.3 to 2.5; this host speaks 1.0 to 1.0"},
      {"newer_minor", " is built for ABI 1.7 to 1.9; this host speaks 1.0 to 1.0"},
      {"no_probe", " has a plugin's note, but no function stg_plugin_probe"},
      {"null_table", ": its probe accepted, but gave no table"},
      {"small_table", ": the plugin's table.struct_size is 40"},
      {"huge_table", ": the plugin's table.struct_size is 16045690981097406464"},
      {"other_name", ": its table's name is good, its note's bad"},
      {"other_factories", ": its table's list of strategies is (none), its note's bad"},
      {"refuses", " refuses this host: wants a host that was made on a Tuesday"},
      {"probe_disagrees", ": its probe says ABI 1.0 to 1.4, its note says "},
      {"probe_other_major", ": its probe says ABI 2.0 to 2.0, its note says "},
      {"probe_chooses_newer", ": its probe chose ABI minor 3, which this host doesn't speak"},
      {"null_factory", ": factory 0 of its table is null"},
      {"odd_answer", ": its probe answered 77 to a correct request"},
  };
  for (const Row& row : rows) {
    INFO(row.name);
    const Error error = error_of([&] { load_plugin(bad(row.name)); });
    CHECK(error.code == STG_FAILED_PRECONDITION);
    CHECK(error.message == Contains{bad(row.name).string() + row.reason});
  }
}

TEST_CASE("A missing dependency is told with both files") {
  const Error error = error_of([] { load_plugin(bad("missing_dependency")); });
  CHECK(error.code == STG_FAILED_PRECONDITION);
  CHECK(error.message == Contains{bad("missing_dependency").string() + " needs libdep.so, which is not found"});
}

TEST_CASE("A dependency that the plugin's RUNPATH finds is no fault, and neither is none") {
  CHECK(load_plugin(bad("found_dependency")).note["name"] == "bad");
  CHECK(text_of(find_strategy(load_plugin(bad("none")), "bad").summary) == "wrong in one way");
}

TEST_CASE("What is no plugin at all is refused with what it is") {
  const TemporaryFolder folder;
  write_file(folder / "text.so", "hello");
  write_file(folder / "empty.so", "");
  for (const char* name : {"text.so", "empty.so"}) {
    const Error error = error_of([&] { load_plugin(folder / name); });
    CHECK(error.code == STG_FAILED_PRECONDITION);
    CHECK(error.message == Contains{(folder / name).string() + " is no plugin: it is not an ELF file"});
  }
  CHECK(error_of([&] { load_plugin(folder.path); }).code == STG_FAILED_PRECONDITION);

  // Mapped as it is, its missing end would be a bus error. What it maps comes first; debug information, which nobody would miss, last.
  fs::copy_file(TEST_PLUGINS "/toy/toy_model.so", folder / "cut.so");
  fs::resize_file(folder / "cut.so", 16 << 10);
  const Error cut = error_of([&] { load_plugin(folder / "cut.so"); });
  CHECK(cut.code == STG_FAILED_PRECONDITION);
  CHECK(cut.message == Contains{(folder / "cut.so").string() + " is damaged or cut off"});
  const Error none = error_of([&] { load_plugin(folder / "none.so"); });
  CHECK(none.code == STG_NOT_FOUND);
  CHECK(none.message == "there is no file " + (folder / "none.so").string());
}

TEST_CASE("A path that others can write to is refused") {
  const TemporaryFolder folder;
  fs::copy_file(TEST_PLUGINS "/toy/toy_model.so", folder / "toy.so");
  chmod((folder / "toy.so").c_str(), 0777);
  const Error error = error_of([&] { load_plugin(folder / "toy.so"); });
  CHECK(error.code == STG_PERMISSION_DENIED);
  CHECK(error.message == Contains{"others can write to it (mode 777)"});
}

TEST_CASE("A plugin is loaded once, and its factories are found by name or as the only one") {
  const Plugin& toy = load_plugin(TEST_PLUGINS "/toy/toy_model.so");
  CHECK(&toy == &load_plugin(TEST_PLUGINS "/toy/../toy/toy_model.so"));
  CHECK(&find_model(toy, "toy") == &find_model(toy, ""));
  const Error other = error_of([&] { find_model(toy, "tay"); });
  CHECK(other.message == Contains{"offers no model \"tay\"; did you mean \"toy\"? Available: toy"});
  CHECK(error_of([&] { find_strategy(toy, ""); }).message == Contains{"offers 0 of kind strategy, not one"});
  CHECK(options_schema(find_model(toy, "").options_schema, "")["properties"].contains("w"));
}

TEST_CASE("What a plugin left in a thread is destroyed when the thread ends, also when all of the plugin is let go before") {
  const fs::path file = TEST_PLUGINS "/toy/toy_model.so";
  const TemporaryFolder folder;
  const std::string options = Json{{"farewell", (folder / "farewell").string()}}.dump();
  std::thread([&] {
    const stg_model* model = nullptr;
    REQUIRE(find_model(load_plugin(file), "toy").create(to_abi(options), nullptr, &model) == nullptr);
    model->release(model->self);
    CHECK(!fs::exists(folder / "farewell"));
  }).join();
  CHECK(read_file(folder / "farewell") == "farewell\n");
}

TEST_CASE("An empty options schema allows no options, and one that is no JSON is told") {
  CHECK(options_schema({}, "x") == Json{{"type", "object"}, {"additionalProperties", false}});
  CHECK(error_of([] {
          options_schema({"{", 1}, "the model x");
        }).message == Contains{"the options schema of the model x is not JSON"});
}

TEST_CASE("Without a LibTorch in the process, a plugin's own is not compared") {
  CHECK(load_plugin(bad("other_libtorch")).note["libtorch"] == "1.13.1");
}

TEST_CASE("A LibTorch's version is read from the files beside it, and compared by minor") {
  const TemporaryFolder folder;
  write_file(folder / "lib/libtorch_cpu.so", "");
  CHECK(libtorch_version_beside(folder / "lib/libtorch_cpu.so") == "");
  write_file(folder / "build-version", "2.11.0+cpu\n");
  CHECK(libtorch_version_beside(folder / "lib/libtorch_cpu.so") == "2.11.0+cpu");
  write_file(folder / "version.py", "from typing import Optional\n__version__ = '2.15.0+cu132'\ncuda = None\n");
  CHECK(libtorch_version_beside(folder / "lib/libtorch_cpu.so") == "2.15.0+cu132");
  CHECK(minor_of("2.15.0+cu132") == "2.15");
  CHECK(minor_of("2.15") == "2.15");
  CHECK(minor_of("2") == "2");
}
