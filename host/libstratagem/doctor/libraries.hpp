// SPDX-License-Identifier: Apache-2.0
//
// Which file the dynamic loader would take for a library that another one needs, told without loading either.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace stratagem {

struct LoaderPlaces {
  std::string library_path;  // LD_LIBRARY_PATH
  std::filesystem::path cache = "/etc/ld.so.cache";
  std::vector<std::filesystem::path> folders = {"/lib64", "/usr/lib64", "/lib", "/usr/lib"};

  /// With this process's LD_LIBRARY_PATH.
  static LoaderPlaces own();
};

/// The file, with links followed; empty: none. Doesn't know what those that load `by` bring along (their DT_RPATH).
std::filesystem::path find_needed(const std::string& name, const std::filesystem::path& by, const LoaderPlaces& places);

/// What `file` needs directly and is not found.
std::vector<std::string> missing_libraries(const std::filesystem::path& file, const LoaderPlaces& places);

/// "2.28.9+cuda13.0", from the text in the library; empty if it has none.
std::string nccl_version(const std::filesystem::path& file);

/// The first number of a version: 13 of "13.2", and of "libcudart.so.13"; -1: there is none.
int major_of(const std::string& version);

}  // namespace stratagem
