// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints of an instance in a folder that goes away.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <stdexcept>
#include <string>

#include "spec/instance.hpp"

namespace stratagem::test {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "stratagem-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path = pattern;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

inline void save(Instance& instance, const std::string& path, const std::string& host_json = "") {
  stg_checkpoint_args args = sized<stg_checkpoint_args>();
  args.path = to_abi(path);
  args.host_json = to_abi(host_json);
  check(instance.api.save(instance.self, nullptr, &args));
}

inline std::string load(Instance& instance, const std::string& path, uint64_t flags = STG_IMPORT_STRICT) {
  stg_checkpoint_args args = sized<stg_checkpoint_args>();
  args.path = to_abi(path);
  args.flags = flags;
  stg_tree host_json{};
  check(instance.api.load(instance.self, nullptr, &args, &host_json, nullptr));
  return std::string(text_of(Tree{host_json}.root()));
}

}  // namespace stratagem::test
