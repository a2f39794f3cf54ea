// SPDX-License-Identifier: Apache-2.0
//
// What a host reads before it runs any of a plugin (rules A1 to A3): the note, and the ELF tables; and that the plugin, once it is
// run, says the same as its note.
#include <cstring>
#include <filesystem>
#include <set>

#include "base/error.hpp"
#include "base/note.hpp"
#include "base/text.hpp"
#include "conformance/checks/check.h"
#include "conformance/elf.hpp"
#include "conformance/settings.hpp"

namespace stratagem::conformance {
namespace {

template <class... Parts>
void expect(bool is_true, const Parts&... parts) {
  CHECK_THAT(is_true, "%s", is_true ? "" : concat(parts...).c_str());
}

template <class Do>
void with_tables(Do check_them) {
  try {
    check_them(read_elf_tables(the_host.path));
  } catch (const Error& error) {
    expect(false, error.what());
  }
}

void note_well_formed() {
  try {
    read_plugin_note(the_host.path);
    expect(true, "");
  } catch (const Error& error) {
    expect(false, error.what());
  }
}

template <class Do>
void with_note(Do check_it) {
  PluginNote note;
  try {
    note = read_plugin_note(the_host.path);
  } catch (const Error&) {
    skip("its note can't be read: see note-well-formed");
    return;
  }
  check_it(note);
}

void note_agrees_with_probe() {
  with_note([](const PluginNote& note) {
    const stg_probe_request request{STG_ABI_MAJOR, 0, 1000, 0, {"note", 4}};
    stg_probe_reply reply{};
    the_host.probe(&request, &reply);
    expect(reply.abi_major == note.abi_major, "the note's major is ", note.abi_major, ", the probe's ", reply.abi_major);
    expect(reply.min_minor == note.min_minor && reply.max_minor == note.max_minor, "the note's minors are ", note.min_minor,
           " to ", note.max_minor, ", the probe's ", reply.min_minor, " to ", reply.max_minor);
  });
}

std::string text_of(const stg_string& text) { return {text.data == nullptr ? "" : text.data, text.size_bytes}; }

template <class Factory>
std::multiset<std::string> names_of(const Factory* const* factories, uint64_t num_factories) {
  std::multiset<std::string> names;
  for (uint64_t i = 0; i < num_factories; ++i) names.insert(text_of(factories[i]->name));
  return names;
}

std::string joined(const std::multiset<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

void note_agrees_with_table() {
  with_note([](const PluginNote& note) {
    const stg_plugin& plugin = *the_host.plugin;
    const auto strategies = names_of(plugin.strategies, plugin.num_strategies),
               models = names_of(plugin.models, plugin.num_models);
    const std::multiset<std::string> noted(note.strategies.begin(), note.strategies.end());
    const std::multiset<std::string> noted_models(note.models.begin(), note.models.end());
    expect(text_of(plugin.name) == note.name, "the note's name is ", note.name, ", the table's ", text_of(plugin.name));
    expect(text_of(plugin.version) == note.version, "the note's version is ", note.version, ", the table's ",
           text_of(plugin.version));
    expect(strategies == noted, "the note's strategies are ", joined(noted), "; the table's ", joined(strategies));
    expect(models == noted_models, "the note's models are ", joined(noted_models), "; the table's ", joined(models));
  });
}

/// What it is linked to directly, against what its note says it was built with.
void note_names_libraries() {
  with_note([](const PluginNote& note) {
    with_tables([&](const ElfTables& tables) {
      const auto needs = [&](std::initializer_list<const char*> beginnings) {
        for (const std::string& name : tables.needed) {
          for (const char* beginning : beginnings) {
            if (name.starts_with(beginning)) return name;
          }
        }
        return std::string();
      };
      const std::string torch = needs({"libtorch", "libc10"}), cuda = needs({"libcudart", "libtorch_cuda"}),
                        nccl = needs({"libnccl"});
      expect(torch.empty() || !note.libtorch.empty(), "it needs ", torch, ", but its note has no \"libtorch\"");
      expect(cuda.empty() || !note.cuda.empty(), "it needs ", cuda, ", but its note has no \"cuda\"");
      expect(nccl.empty() || !note.nccl.empty(), "it needs ", nccl, ", but its note has no \"nccl\"");
    });
  });
}

template <class Factory>
void check_schemas(const Factory* const* factories, uint64_t num_factories) {
  for (uint64_t i = 0; i < num_factories; ++i) {
    const std::string name = text_of(factories[i]->name), schema = text_of(factories[i]->options_schema);
    const auto parsed = nlohmann::json::parse(schema, nullptr, false);
    expect(parsed.is_object(), "the options_schema of ", name, " is a JSON object; it is: ", schema.substr(0, 200));
  }
}

void schemas_are_json() {
  check_schemas(the_host.plugin->strategies, the_host.plugin->num_strategies);
  check_schemas(the_host.plugin->models, the_host.plugin->num_models);
}

void one_symbol() {
  with_tables([](const ElfTables& tables) {
    std::string others;
    int num_others = 0, num_probes = 0;
    for (const ElfSymbol& symbol : tables.exported) {
      if (symbol.name == STG_PLUGIN_PROBE_SYMBOL) {
        ++num_probes;
      } else if (++num_others <= 5) {
        others += " " + symbol.name;
      }
    }
    expect(num_probes == 1, "it exports ", STG_PLUGIN_PROBE_SYMBOL, " ", num_probes, " times");
    expect(num_others == 0, "it exports ", num_others, " other symbols:", others, num_others > 5 ? " ..." : "",
           "; link with a version script that has ", STG_PLUGIN_PROBE_SYMBOL, " as the only global");
  });
}

void no_unique_symbols() {
  with_tables([](const ElfTables& tables) {
    for (const ElfSymbol& symbol : tables.exported) {
      expect(!symbol.is_unique, symbol.name,
             " is STB_GNU_UNIQUE, which all plugins of a process would share; compile with "
             "-fno-gnu-unique, or hide it");
    }
    expect(true, "");
  });
}

void never_unloaded() {
  with_tables([](const ElfTables& tables) {
    expect(tables.is_never_unloaded,
           "it has no DF_1_NODELETE: a deleter of its could be gone when it is called; link with -z nodelete");
  });
}

void no_text_relocations() {
  with_tables([](const ElfTables& tables) {
    expect(!tables.has_text_relocations, "it has text relocations: its code is written to at load; compile all of it with -fPIC");
  });
}

void no_executable_stack() {
  with_tables([](const ElfTables& tables) {
    expect(tables.has_stack_header && !tables.is_stack_executable,
           "it asks for an executable stack, for the whole process; link with -z noexecstack");
  });
}

void no_writable_code() {
  with_tables([](const ElfTables& tables) {
    expect(!tables.has_writable_code, "a segment of it is writable and executable; link without -N and with -z separate-code");
  });
}

/// A folder that is not absolute is looked for where the host happens to run: anybody's library could be there.
void run_path_is_safe() {
  with_tables([](const ElfTables& tables) {
    std::vector<std::string> folders = tables.run_path;
    const bool ends_empty = !folders.empty() && folders.back().empty();
    while (!folders.empty() && folders.back().empty()) folders.pop_back();
    if (ends_empty) {
      warn(
          "its RUNPATH ends in \":\", so that the dynamic loader looks into the working directory last; CMake does that in the "
          "build "
          "folder, and not in what it installs");
    }
    for (const std::string& folder : folders) {
      const bool is_own = folder.starts_with("$ORIGIN") || folder.starts_with("${ORIGIN}");
      expect(is_own || folder.starts_with("/"), "the RUNPATH entry \"", folder, "\" is the current folder or relative to it");
      bool is_declared = is_own;
      for (const std::string& declared : settings().run_path) is_declared |= folder.starts_with(declared);
      if (!is_declared && folder.starts_with("/") && !settings().run_path.empty()) {
        warn("the RUNPATH names %s, which is neither beside the plugin nor in a folder given by --run-path", folder.c_str());
      }
    }
    expect(!tables.is_run_path_old, "it has DT_RPATH, which comes before LD_LIBRARY_PATH; link with --enable-new-dtags");
  });
}

}  // namespace
}  // namespace stratagem::conformance

using namespace stratagem::conformance;

extern "C" {
extern const check_list file_checks;
DEFINE_CHECKS(file_checks,
              {"note-well-formed",
               "The ELF note of owner Stratagem is there once, is JSON, and has all keys that plugin.h names with their types",
               "A2", NEEDS_FILE, note_well_formed},
              {"note-agrees-with-probe", "The note's major and minors are those that the probe answers", "A2", NEEDS_LIBRARY,
               note_agrees_with_probe},
              {"note-agrees-with-table", "The note's name, version, strategies and models are those of the table", "A2",
               NEEDS_PLUGIN, note_agrees_with_table},
              {"note-names-libraries",
               "A plugin that links libtorch, libc10, libcudart or libnccl says in its note which version it was built with",
               "A2", NEEDS_FILE, note_names_libraries},
              {"options-schema-is-json", "The options_schema of each strategy and model is a JSON object", "G1", NEEDS_PLUGIN,
               schemas_are_json},
              {"elf-one-symbol", "It exports stg_plugin_probe and nothing else", "A1", NEEDS_FILE, one_symbol},
              {"elf-no-unique-symbols", "None of its symbols is STB_GNU_UNIQUE", "A3", NEEDS_FILE, no_unique_symbols},
              {"elf-nodelete", "It is linked -z nodelete", "A3", NEEDS_FILE, never_unloaded},
              {"elf-no-text-relocations", "It has no text relocations", "A3", NEEDS_FILE, no_text_relocations},
              {"elf-no-executable-stack", "It does not ask for an executable stack", "A3", NEEDS_FILE, no_executable_stack},
              {"elf-no-writable-code", "None of its segments is both writable and executable", "A3", NEEDS_FILE,
               no_writable_code},
              {"elf-run-path",
               "Its RUNPATH has no relative or empty folder (an empty one at its end, as CMake makes, is warned of; so is one "
               "that is not declared, where --run-path declares any)",
               "A3", NEEDS_FILE, run_path_is_safe});
}
