// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/plugins/search.hpp"

#include <dlfcn.h>
#include <grp.h>
#include <pwd.h>
#include <stratagem/common.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "base/error.hpp"
#include "base/note.hpp"
#include "libstratagem/config/problems.hpp"

namespace stratagem {
namespace fs = std::filesystem;
namespace {

/// Whether nobody but `owner` is in the group: the private group that many systems give each user.
bool is_private_group(gid_t group, uid_t owner) {
  const passwd* user = getpwuid(owner);
  if (user == nullptr || user->pw_gid != group) return false;
  const std::string name = user->pw_name;
  const ::group* entry = getgrgid(group);
  if (entry == nullptr || name != entry->gr_name) return false;
  for (char** member = entry->gr_mem; *member != nullptr; ++member) {
    if (name != *member) return false;
  }
  return true;
}

std::string octal(mode_t mode) {
  std::ostringstream out;
  out << std::oct << (mode & 07777);
  return out.str();
}

}  // namespace

const char* word_for(Offer offer) { return offer == Offer::strategy ? "strategy" : "model"; }

std::vector<std::string> PluginFile::names(Offer offer) const {
  const char* key = offer == Offer::strategy ? "strategies" : "models";
  if (!note.is_object() || !note.contains(key)) return {};
  std::vector<std::string> names;
  for (const Json& name : note[key]) {
    if (name.is_string()) names.push_back(name.get<std::string>());
  }
  return names;
}

std::string refused_for_writers(const fs::path& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) return {};
  if (info.st_uid != 0 && info.st_uid != geteuid()) {
    return concat("it belongs to user ", info.st_uid, ", who is neither you (", geteuid(), ") nor root");
  }
  const bool by_group = (info.st_mode & S_IWGRP) != 0 && !is_private_group(info.st_gid, info.st_uid);
  if (!by_group && (info.st_mode & S_IWOTH) == 0) return {};
  return concat("others can write to it (mode ", octal(info.st_mode), "); chmod go-w ", path.string());
}

std::string abi_mismatch(const Json& note) {
  const Json abi = note.value("abi", Json::object());
  const auto number = [&](const char* key) -> int64_t {
    return abi.contains(key) && abi[key].is_number_integer() ? abi[key].get<int64_t>() : -1;
  };
  const int64_t major = number("major"), min_minor = number("min_minor"), max_minor = number("max_minor");
  if (major == STG_ABI_MAJOR && min_minor <= STG_ABI_MINOR && max_minor >= 0) return {};
  return concat("built for ABI ", major, ".", min_minor, " to ", major, ".", max_minor, "; this host speaks ", STG_ABI_MAJOR,
                ".0 to ", STG_ABI_MAJOR, ".", STG_ABI_MINOR);
}

fs::path own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&own_folder), &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code error;
  return fs::canonical(info.dli_fname, error).parent_path();
}

Catalogue::Catalogue(const std::vector<fs::path>& config_folders) {
  for (const fs::path& folder : config_folders) add_folder(folder, "config");
  if (const char* variable = std::getenv("STRATAGEM_PLUGIN_PATH")) {
    std::istringstream entries(variable);
    for (std::string entry; std::getline(entries, entry, ':');) {
      if (!entry.empty()) add_folder(entry, "STRATAGEM_PLUGIN_PATH");
    }
  }
  const fs::path own = own_folder();
  add_folder(own / "stratagem", "installation");
  add_folder(own.parent_path() / "lib" / "stratagem", "installation");
  for (size_t i = 0; i < folders_.size(); ++i) scan(i);
  mark_shadowed();
}

void Catalogue::add_folder(const fs::path& path, const std::string& origin) {
  SearchFolder folder{path.lexically_normal(), origin, {}};
  std::error_code error;
  if (!path.is_absolute()) {
    folder.refused = "it is not an absolute path, and the working directory is never searched";
  } else if (!fs::is_directory(path, error)) {
    if (origin == "installation") return;
    folder.refused = "there is no such folder";
  } else {
    folder.path = fs::canonical(path, error);
    folder.refused = refused_for_writers(folder.path);
  }
  const auto same = [&](const SearchFolder& known) { return known.path == folder.path; };
  if (std::none_of(folders_.begin(), folders_.end(), same)) folders_.push_back(std::move(folder));
}

void Catalogue::scan(size_t index) {
  const SearchFolder& folder = folders_[index];
  std::error_code error;
  std::vector<fs::path> paths;
  if (!folder.path.is_absolute()) return;
  for (const auto& entry : fs::directory_iterator(folder.path, error)) {
    if (entry.path().extension() == ".so" && !entry.is_directory(error)) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  for (const fs::path& path : paths) {
    PluginFile file{path, index, {}, {}, {}};
    try {
      file.note = read_note(path);
      file.problem = folder.refused.empty() ? refused_for_writers(path) : concat("the folder is refused: ", folder.refused);
      if (file.problem.empty()) file.problem = abi_mismatch(file.note);
    } catch (const Error& problem) {
      if (problem.code == STG_NOT_FOUND) continue;  // no note: a library that plugins share
      file.problem = problem.message;
    }
    files_.push_back(std::move(file));
  }
}

void Catalogue::mark_shadowed() {
  std::map<std::pair<Offer, std::string>, const PluginFile*> first;
  for (PluginFile& file : files_) {
    if (!file.problem.empty()) continue;
    bool is_used = false;
    for (const Offer offer : {Offer::strategy, Offer::model}) {
      for (const std::string& name : file.names(offer)) {
        const PluginFile* taken = first.try_emplace({offer, name}, &file).first->second;
        is_used |= taken == &file;
        if (taken != &file) file.shadowed = taken->path.string();
      }
    }
    if (is_used) file.shadowed.clear();
  }
}

std::vector<std::string> Catalogue::available(Offer offer) const {
  std::set<std::string> names;
  for (const PluginFile& file : files_) {
    if (!file.problem.empty()) continue;
    for (const std::string& name : file.names(offer)) names.insert(name);
  }
  return {names.begin(), names.end()};
}

bool Catalogue::offers(const PluginFile& file, Offer offer, const std::string& name) const {
  const std::vector<std::string> names = file.names(offer);
  // A file that can't be read may be the one that was meant, by its own name.
  return std::find(names.begin(), names.end(), name) != names.end() || (file.note.is_null() && file.path.stem() == name);
}

std::vector<std::string> Catalogue::passed_over(const std::vector<std::pair<Offer, std::string>>& names) const {
  std::vector<std::string> texts;
  for (const SearchFolder& folder : folders_) {
    if (!folder.refused.empty())
      texts.push_back(concat("the folder ", folder.path.string(), " (", folder.origin, ") is not searched: ", folder.refused));
  }
  for (const auto& [offer, name] : names) {
    for (const PluginFile& file : files_) {
      if (name.empty() || (offers(file, offer, name) && file.problem.empty())) break;
      if (offers(file, offer, name) && folders_[file.folder].refused.empty())
        texts.push_back(concat(word_for(offer), " \"", name, "\": passing over ", file.path.string(), ": ", file.problem));
    }
  }
  return texts;
}

const PluginFile& Catalogue::find(Offer offer, const std::string& name) const {
  const PluginFile* unusable = nullptr;
  for (const PluginFile& file : files_) {
    if (!offers(file, offer, name)) continue;
    if (file.problem.empty()) return file;
    if (unusable == nullptr) unusable = &file;
  }
  if (unusable != nullptr) {
    const bool by_writers = !unusable->note.is_null() && abi_mismatch(unusable->note).empty();
    throw Error(by_writers ? STG_PERMISSION_DENIED : STG_FAILED_PRECONDITION,
                concat(word_for(offer), " \"", name, "\": ", unusable->path.string(), " can't be used: ", unusable->problem));
  }
  std::vector<std::string> searched;
  for (const SearchFolder& folder : folders_) {
    searched.push_back(folder.path.string() + (folder.refused.empty() ? "" : concat(" (refused: ", folder.refused, ")")));
  }
  throw not_found("there is no ", word_for(offer), " \"", name, "\"", suggestion(name, available(offer)),
                  ". Searched: ", join(searched));
}

}  // namespace stratagem
