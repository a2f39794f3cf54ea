// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints for the tests of the storage: all files of one hold the same, so that a mixture is seen.
#pragma once

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "base/storage.hpp"
#include "unit/support.hpp"

namespace stratagem::test {

inline constexpr const char* file_names[] = {"state.json", "model.safetensors", "optimizer.safetensors"};

// A checkpoint whose files all hold `content`.
inline void save(const Storage& storage, const std::string& path, const std::string& content) {
  Transaction transaction = storage.begin(path);
  for (const char* name : file_names) transaction.write(name, content);
  transaction.commit();
}

// What the files of a checkpoint hold; they must be all there and alike.
inline std::string content_of(const Storage& storage, const std::string& path) {
  CHECK(storage.list(path) == std::vector<std::string>{"model.safetensors", "optimizer.safetensors", "state.json"});
  std::set<std::string> contents;
  for (const char* name : file_names) contents.insert(storage.read_text(path + "/" + name));
  CHECK(contents.size() == 1);
  return *contents.begin();
}

inline std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator{folder}) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace stratagem::test
