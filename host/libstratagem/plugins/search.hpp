// SPDX-License-Identifier: Apache-2.0
//
// Where plugins and model libraries are looked for, and what is there. Only ELF notes are read: nothing is opened by the loader, so a
// scan takes milliseconds and runs no foreign code.
//
// The folders, in order: the config's plugin_path, STRATAGEM_PLUGIN_PATH, the installation. Never the working directory, and never a
// folder or file that somebody else could have written to: loading a plugin is running it.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "libstratagem/config/json_text.hpp"

namespace stratagem {

struct SearchFolder {
  std::filesystem::path path;
  std::string origin;   // "config", "STRATAGEM_PLUGIN_PATH", "installation"
  std::string refused;  // why it is not searched; empty if it is
};

enum class Offer { strategy, model };
const char* word_for(Offer offer);

/// One file that says it is a plugin, or looks like one and can't be read.
struct PluginFile {
  std::filesystem::path path;
  size_t folder = 0;     // index of its SearchFolder
  Json note;             // null if it could not be read
  std::string problem;   // why it can't be used; empty if it can, as far as reading tells
  std::string shadowed;  // the file that is taken instead, where each name of this one is offered by one before it; else empty
  /// The names of its note.
  std::vector<std::string> names(Offer offer) const;
};

/// Why `path` is refused because of who can write it, or nothing. Its owner may, and root; a group may if it is the owner's alone.
std::string refused_for_writers(const std::filesystem::path& path);

/// Whether this host can use a plugin with this note: empty, or why not, with both sides' versions.
std::string abi_mismatch(const Json& note);

class Catalogue {
 public:
  /// Scans the folders. `config_folders` are absolute.
  explicit Catalogue(const std::vector<std::filesystem::path>& config_folders);

  const std::vector<SearchFolder>& folders() const { return folders_; }
  const std::vector<PluginFile>& files() const { return files_; }
  /// The names that can be had, sorted.
  std::vector<std::string> available(Offer offer) const;
  /// The file that offers `name`. Throws NOT_FOUND with the nearest and the available names, or, where only refused or unusable files
  /// offer it, PERMISSION_DENIED or FAILED_PRECONDITION with the reason.
  const PluginFile& find(Offer offer, const std::string& name) const;
  /// What a user may have meant and doesn't get: the folders that are refused, and the files that offer one of the names, come
  /// before the one that find gives, and can't be used. One text each, with the reason.
  std::vector<std::string> passed_over(const std::vector<std::pair<Offer, std::string>>& names) const;

 private:
  bool offers(const PluginFile& file, Offer offer, const std::string& name) const;
  void add_folder(const std::filesystem::path& path, const std::string& origin);
  void scan(size_t folder);
  void mark_shadowed();

  std::vector<SearchFolder> folders_;
  std::vector<PluginFile> files_;
};

/// The folder of the library (or program) that this code is part of.
std::filesystem::path own_folder();

}  // namespace stratagem
