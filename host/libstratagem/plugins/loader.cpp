// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/plugins/loader.hpp"

#include <deque>
#include <map>
#include <mutex>

// Without Boost.Filesystem, of which we need nothing.
#define BOOST_DLL_USE_STD_FS
#include <boost/dll/shared_library.hpp>

#include "base/error.hpp"
#include "base/note.hpp"
#include "base/structs.hpp"
#include "base/value.hpp"
#include "libstratagem/config/problems.hpp"
#include "libstratagem/plugins/mapped.hpp"
#include "libstratagem/version.hpp"

namespace stratagem {
namespace fs = std::filesystem;
namespace {

/// What Boost.DLL says is wrapped around the loader's own text.
std::string loader_text(const std::string& what) {
  constexpr std::string_view start = "dlerror system message: ";
  const size_t begin = what.find(start);
  if (begin == std::string::npos) return what;
  const size_t end = what.rfind("): ");
  return what.substr(begin + start.size(), end == std::string::npos ? end : end - begin - start.size());
}

Error cannot_open(const fs::path& file, const std::string& what) {
  const std::string text = loader_text(what);
  const std::string missing = text.substr(0, text.find(": cannot open shared object file"));
  if (missing.size() != text.size() && missing != file.string()) {
    return failed_precondition(
        file.string(), " needs ", missing,
        ", which is not found; install it, or put it beside the plugin (whose RUNPATH must then hold $ORIGIN)");
  }
  return failed_precondition(file.string(), " can't be loaded: ", text);
}

boost::dll::shared_library& open(const fs::path& file) {
  // Never destroyed, so never unloaded, not even at exit.
  static auto& handles = *new std::deque<boost::dll::shared_library>;
  try {
    using Mode = boost::dll::load_mode::type;
    const auto mode = static_cast<Mode>(boost::dll::load_mode::rtld_now | boost::dll::load_mode::rtld_local);
    return handles.emplace_back(file, mode);
  } catch (const std::exception& error) {
    throw cannot_open(file, error.what());
  }
}

/// Asks the plugin, and returns its table's address.
const stg_plugin* probe(const fs::path& file, boost::dll::shared_library& library, const Json& note) {
  if (!library.has(STG_PLUGIN_PROBE_SYMBOL)) {
    throw failed_precondition(file.string(), " has a plugin's note, but no function " STG_PLUGIN_PROBE_SYMBOL);
  }
  auto& function = library.get<uint32_t(const stg_probe_request*, stg_probe_reply*)>(STG_PLUGIN_PROBE_SYMBOL);
  const std::string name = concat("stratagem ", version_text);
  const stg_probe_request request{STG_ABI_MAJOR, 0, STG_ABI_MINOR, 0, to_abi(name)};
  std::vector<char> text(4096);
  stg_probe_reply reply{};
  reply.text = text.data();
  reply.text_capacity_bytes = text.size();
  const uint32_t answer = function(&request, &reply);
  text.back() = '\0';
  if (answer == STG_PROBE_REFUSED) throw failed_precondition(file.string(), " refuses this host: ", text.data());
  if (answer != STG_PROBE_ACCEPTED)
    throw failed_precondition(file.string(), ": its probe answered ", answer, " to a correct request");
  if (reply.plugin == nullptr) throw failed_precondition(file.string(), ": its probe accepted, but gave no table");
  const Json abi = note.at("abi");
  if (reply.abi_major != abi.value("major", 0u) || reply.min_minor != abi.value("min_minor", 0u) ||
      reply.max_minor != abi.value("max_minor", 0u)) {
    throw failed_precondition(file.string(), ": its probe says ABI ", reply.abi_major, ".", reply.min_minor, " to ",
                              reply.abi_major, ".", reply.max_minor, ", its note says ", abi.dump());
  }
  if (reply.minor > STG_ABI_MINOR)
    throw failed_precondition(file.string(), ": its probe chose ABI minor ", reply.minor, ", which this host doesn't speak");
  return static_cast<const stg_plugin*>(reply.plugin);
}

template <class Factory>
std::vector<std::string> names_of(const fs::path& file, const Factory* const* factories, uint64_t num_factories,
                                  uint64_t min_size_bytes) {
  std::vector<std::string> names;
  for (uint64_t i = 0; i < num_factories; ++i) {
    if (factories == nullptr || factories[i] == nullptr)
      throw failed_precondition(file.string(), ": factory ", i, " of its table is null");
    known_size_bytes(factories[i], min_size_bytes, "factory");
    names.emplace_back(text_of(factories[i]->name));
  }
  return names;
}

void check_agreement(const fs::path& file, const char* what, const std::vector<std::string>& table,
                     const std::vector<std::string>& note) {
  if (table != note)
    throw failed_precondition(file.string(), ": its table's ", what, " is ", join(table), ", its note's ", join(note));
}

stg_plugin read_plugin_table(const PluginFile& file, const stg_plugin* address) {
  try {
    const stg_plugin table = read_table(address, STG_PLUGIN_MIN_SIZE, "the plugin's table");
    check_agreement(file.path, "name", {std::string(text_of(table.name))}, {file.note.value("name", "")});
    check_agreement(file.path, "version", {std::string(text_of(table.version))}, {file.note.value("version", "")});
    check_agreement(file.path, "list of strategies",
                    names_of(file.path, table.strategies, table.num_strategies, STG_STRATEGY_FACTORY_MIN_SIZE),
                    file.names(Offer::strategy));
    check_agreement(file.path, "list of models", names_of(file.path, table.models, table.num_models, STG_MODEL_FACTORY_MIN_SIZE),
                    file.names(Offer::model));
    return table;
  } catch (const Error& error) {
    if (error.code == STG_FAILED_PRECONDITION) throw;
    throw failed_precondition(file.path.string(), ": ", error.message);
  }
}

const Plugin& load(const fs::path& path) {
  PluginFile file{path, 0, {}, {}, {}};
  try {
    file.note = read_note(path);
  } catch (const Error& error) {
    throw failed_precondition(error.message);
  }
  for (const fs::path& place : {path, path.parent_path()}) {
    const std::string reason = refused_for_writers(place);
    if (!reason.empty()) throw Error(STG_PERMISSION_DENIED, concat(path.string(), " is refused: ", place.string(), ": ", reason));
  }
  const std::string mismatch = abi_mismatch(file.note);
  if (!mismatch.empty()) throw failed_precondition(path.string(), " is ", mismatch);
  check_libtorch(path, file.note);
  boost::dll::shared_library& library = open(path);
  const stg_plugin* address = probe(path, library, file.note);
  remember_libtorch(path, file.note);
  return *new Plugin{path, file.note, read_plugin_table(file, address), address};
}

template <class Factory>
const Factory& find_factory(const Plugin& plugin, const char* kind, const Factory* const* factories, uint64_t num_factories,
                            const std::string& name) {
  std::vector<std::string> names;
  for (uint64_t i = 0; i < num_factories; ++i) {
    names.emplace_back(text_of(factories[i]->name));
    if (names.back() == name || (name.empty() && num_factories == 1)) return *factories[i];
  }
  if (name.empty())
    throw invalid_argument(plugin.path.string(), " offers ", num_factories, " of kind ", kind,
                           ", not one; give a name, too. Available: ", join(names));
  throw invalid_argument(plugin.path.string(), " offers no ", kind, " \"", name, "\"", suggestion(name, names));
}

}  // namespace

const Plugin& load_plugin(const fs::path& file) {
  static std::mutex mutex;
  static auto& loaded = *new std::map<fs::path, const Plugin*>;  // as the handles
  std::error_code error;
  const fs::path path = fs::canonical(file, error);
  if (error) throw not_found("there is no file ", file.string());
  const std::lock_guard lock(mutex);
  const Plugin*& plugin = loaded[path];
  if (plugin == nullptr) plugin = &load(path);
  return *plugin;
}

const stg_strategy_factory& find_strategy(const Plugin& plugin, const std::string& name) {
  return find_factory(plugin, "strategy", plugin.table.strategies, plugin.table.num_strategies, name);
}

const stg_model_factory& find_model(const Plugin& plugin, const std::string& name) {
  return find_factory(plugin, "model", plugin.table.models, plugin.table.num_models, name);
}

Json options_schema(stg_string text, const std::string& owner) {
  if (text.size_bytes == 0) return Json{{"type", "object"}, {"additionalProperties", false}};
  try {
    return Json::parse(text_of(text));
  } catch (const Json::exception& error) {
    throw failed_precondition("the options schema of ", owner, " is not JSON: ", error.what());
  }
}

}  // namespace stratagem
