// SPDX-License-Identifier: Apache-2.0
//
// Plugin folders, and the LibTorch that the plugins in them would load.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>

#include "base/error.hpp"
#include "base/note.hpp"
#include "libstratagem/doctor/checks.hpp"
#include "libstratagem/plugins/mapped.hpp"

namespace stratagem {
namespace fs = std::filesystem;
namespace {

constexpr int supported_major = 2, oldest_minor = 11, newest_minor = 15;

std::string plural(size_t count, const std::string& word) { return concat(count, " ", word, count == 1 ? "" : "s"); }

size_t num_usable_in(size_t folder, const Catalogue& catalogue) {
  return static_cast<size_t>(std::count_if(catalogue.files().begin(), catalogue.files().end(), [&](const PluginFile& file) {
    return file.folder == folder && file.problem.empty();
  }));
}

void check_folder(const SearchFolder& folder, Check& check) {
  const std::string named = concat(folder.path.string(), " (", folder.origin, ")");
  if (!folder.refused.empty()) {
    check.warn(concat("the folder ", named, " is not searched: ", folder.refused),
               concat("name an absolute folder that is there and that only you or root can write to, or take it out of ",
                      folder.origin == "config" ? "the config's plugin_path" : folder.origin));
  } else if (faccessat(AT_FDCWD, folder.path.c_str(), R_OK | X_OK, AT_EACCESS) != 0) {
    check.warn(concat("the folder ", named, " can't be read: ", std::strerror(errno)),
               concat("give yourself the right: chmod u+rx ", folder.path.string()));
  }
}

void check_name(Offer offer, const std::string& name, const Catalogue& catalogue, Check& check) {
  if (name.empty()) return;
  try {
    catalogue.find(offer, name);
  } catch (const Error& error) {
    check.fault(concat("the config wants the ", word_for(offer), " \"", name, "\": ", error.message),
                "name one that there is, or set plugin_path or STRATAGEM_PLUGIN_PATH to the folder that holds it");
  }
}

LibTorchCopy copy_at(const fs::path& cpu) {
  LibTorchCopy copy;
  copy.cpu = cpu;
  copy.version = libtorch_version_beside(cpu);
  std::error_code error;
  const fs::path cuda = cpu.parent_path() / "libtorch_cuda.so";
  if (fs::exists(cuda, error)) copy.cuda = cuda;
  for (const std::string& name : read_dynamic_section(cpu).needed) {
    if (name.rfind("libcudart.so.", 0) == 0) copy.cudart = name;
  }
  return copy;
}

/// Where it was looked for, and where that comes from.
std::string searched_for(const fs::path& plugin, const LoaderPlaces& places) {
  std::vector<std::string> folders;
  for (const fs::path& folder : read_run_path(plugin)) folders.push_back(folder.string());
  return concat("LD_LIBRARY_PATH is ", places.library_path.empty() ? "not set" : places.library_path, ", the plugin's run path ",
                folders.empty() ? "is empty" : join(folders, ":"));
}

/// 15 of "2.15.0"; -1 where it is no version of 2.
int minor_number(const std::string& version) {
  const size_t point = version.find('.');
  return major_of(version) != supported_major || point == std::string::npos ? -1 : major_of(version.substr(point + 1));
}

bool is_supported(const std::string& version) {
  const int minor = minor_number(version);
  return minor >= oldest_minor && minor <= newest_minor;
}

std::string shown_version(const LibTorchCopy& copy) { return copy.version.empty() ? "of unknown version" : copy.version; }

void check_copy(const LibTorchCopy& copy, const LoaderPlaces& places, Check& check) {
  if (!copy.version.empty() && !is_supported(copy.version)) {
    check.warn(concat("LibTorch ", copy.version, " (", copy.cpu.string(), ") is outside of what Stratagem is tested with, 2.",
                      oldest_minor, " to 2.", newest_minor),
               "build the plugins with one of these");
  }
  for (const LibTorchCopy::User& user : copy.users) {
    if (copy.version.empty() || minor_of(copy.version) == minor_of(user.libtorch)) continue;
    check.fault(concat(user.plugin.string(), " was built with LibTorch ", user.libtorch, ", but would load ", copy.version, " (",
                       copy.cpu.string(), "); ", searched_for(user.plugin, places)),
                concat("build the plugin with LibTorch ", minor_of(copy.version),
                       ", or have LD_LIBRARY_PATH name the lib folder of a ", minor_of(user.libtorch)));
  }
}

void check_missing(const LibTorchCopy& copy, const LoaderPlaces& places, Check& check) {
  for (const LibTorchCopy::User& user : copy.users) {
    check.fault(concat(user.plugin.string(), " needs libtorch_cpu.so of LibTorch ", user.libtorch,
                       ", which is not found: ", searched_for(user.plugin, places)),
                concat("install LibTorch ", minor_of(user.libtorch), ", and have LD_LIBRARY_PATH name its lib folder"));
  }
}

}  // namespace

std::vector<PluginFile> find_plugins(const Catalogue& catalogue, const Wanted& wanted) {
  std::vector<PluginFile> plugins;
  for (const PluginFile& file : catalogue.files()) {
    if (file.problem.empty() && file.shadowed.empty()) plugins.push_back(file);
  }
  for (const fs::path& path : wanted.plugin_files) {
    try {
      plugins.push_back({path, 0, read_note(path), {}, {}});
    } catch (const Error&) {
      // check_plugin_folders tells it.
    }
  }
  return plugins;
}

Check check_plugin_folders(const Catalogue& catalogue, const Wanted& wanted) {
  Check check("plugin-folders");
  std::vector<std::string> found;
  for (size_t i = 0; i < catalogue.folders().size(); ++i) {
    const SearchFolder& folder = catalogue.folders()[i];
    check_folder(folder, check);
    found.push_back(concat(folder.path.string(), " (", folder.origin,
                           "): ", folder.refused.empty() ? plural(num_usable_in(i, catalogue), "plugin") : "refused"));
  }
  for (const PluginFile& file : catalogue.files()) {
    if (file.problem.empty() || !catalogue.folders()[file.folder].refused.empty()) continue;
    check.warn(concat(file.path.string(), " can't be used: ", file.problem),
               "build it for this host, or take it out of the folder");
  }
  for (const fs::path& path : wanted.plugin_files) {
    try {
      read_note(path);
    } catch (const Error& error) {
      check.fault(concat("the config names a plugin that can't be used: ", error.message), "name a plugin file that there is");
    }
  }
  const bool has_own = !wanted.plugin_files.empty();
  if (catalogue.available(Offer::strategy).empty() && !has_own) {
    check.fault("no folder has a strategy that can be used",
                "install Stratagem's plugins, or set STRATAGEM_PLUGIN_PATH to the folder that holds them");
  }
  check_name(Offer::strategy, wanted.strategy, catalogue, check);
  check_name(Offer::model, wanted.model, catalogue, check);
  check.found = found.empty() ? "no folder" : join(found, "; ");
  return check;
}

std::vector<LibTorchCopy> find_libtorch(const std::vector<PluginFile>& plugins, const LoaderPlaces& places) {
  std::map<fs::path, LibTorchCopy> copies;
  for (const PluginFile& file : plugins) {
    const LibTorchCopy::User user{file.path, file.note.value("libtorch", ""), file.note.value("cuda", ""),
                                  file.note.value("nccl", "")};
    if (user.libtorch.empty()) continue;
    const fs::path cpu = find_needed("libtorch_cpu.so", file.path, places);
    LibTorchCopy& copy = copies[cpu];
    if (copy.cpu.empty() && !cpu.empty()) copy = copy_at(cpu);
    copy.users.push_back(user);
  }
  std::vector<LibTorchCopy> list;
  for (auto& [path, copy] : copies) list.push_back(std::move(copy));
  return list;
}

Check check_libtorch_copies(const std::vector<LibTorchCopy>& copies, const LoaderPlaces& places) {
  Check check("libtorch");
  check.is_skipped = copies.empty();
  if (check.is_skipped) check.found = "no plugin here needs LibTorch";
  std::vector<std::string> found;
  for (const LibTorchCopy& copy : copies) {
    if (copy.cpu.empty()) {
      check_missing(copy, places, check);
      continue;
    }
    check_copy(copy, places, check);
    found.push_back(
        concat("LibTorch ", shown_version(copy), ", ", copy.cpu.string(), ", for ", plural(copy.users.size(), "plugin")));
  }
  if (found.size() > 1) {
    check.warn(concat("the plugins would load ", found.size(), " copies of LibTorch, and a process can hold only one: ",
                      join(found, "; "), ". Whichever a process loads first is everybody's"),
               "build the plugins with the same LibTorch, or have LD_LIBRARY_PATH name the lib folder of one");
  }
  if (!check.is_skipped) check.found = found.empty() ? "no LibTorch that a plugin would find" : join(found, "; ");
  return check;
}

}  // namespace stratagem
