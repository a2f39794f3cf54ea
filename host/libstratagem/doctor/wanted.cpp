// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/doctor/wanted.hpp"

#include "base/json.hpp"
#include "libstratagem/config/config.hpp"
#include "libstratagem/config/paths.hpp"

namespace stratagem {
namespace fs = std::filesystem;
namespace {

/// A value that stands at a pointer and is what it should be, else null.
template <class Is>
Json at(const Json& config, const char* pointer, Is is) {
  const Json::json_pointer place(pointer);
  if (!config.contains(place)) return nullptr;
  const Json& value = config.at(place);
  return is(value) ? value : Json(nullptr);
}

class WantedReader {
 public:
  explicit WantedReader(const ConfigText& text) : text_(text) {}

  Wanted read() {
    read_library("/strategy", wanted_.strategy);
    read_library("/model", wanted_.model);
    for (const Json& folder : list("/plugin_path")) {
      if (folder.is_string()) wanted_.plugin_path.push_back(path(folder, "/plugin_path"));
    }
    if (const Json name = text("/strategy/accelerator"); !name.is_null()) wanted_.accelerator = name;
    read_devices();
    if (const Json threads = number("/threads"); !threads.is_null()) wanted_.threads = threads;
    if (const Json folder = text("/checkpoint/dir"); !folder.is_null())
      wanted_.outputs.push_back(path(folder, "/checkpoint/dir"));
    if (const Json file = text("/metrics/path"); !file.is_null())
      wanted_.outputs.push_back(path(file, "/metrics/path").parent_path());
    problems_.raise(text_.source);
    return std::move(wanted_);
  }

 private:
  Json text(const char* pointer) const {
    return at(text_.json, pointer, [](const Json& value) { return value.is_string(); });
  }
  Json number(const char* pointer) const {
    return at(text_.json, pointer, [](const Json& value) { return value.is_number_integer(); });
  }
  Json list(const char* pointer) const {
    return at(text_.json, pointer, [](const Json& value) { return value.is_array(); });
  }
  fs::path path(const Json& given, const char* pointer) {
    return config_path(given.get<std::string>(), text_.folder, pointer, problems_);
  }

  void read_library(const std::string& key, std::string& name) {
    const std::string path_key = key + "/path", name_key = key + "/name";
    const Json file = text(path_key.c_str()), given = text(name_key.c_str());
    const bool is_library = key == "/strategy" || text("/model/kind") == "library";
    if (!is_library) return;
    if (!file.is_null()) {
      wanted_.plugin_files.push_back(path(file, path_key.c_str()));
    } else if (!given.is_null() && given.get_ref<const std::string&>().find('/') != std::string::npos) {
      wanted_.plugin_files.push_back(path(given, name_key.c_str()));
    } else if (!given.is_null()) {
      name = given;
    }
  }

  void read_devices() {
    for (const Json& index : list("/strategy/devices")) {
      if (index.is_number_integer()) wanted_.devices.push_back(index);
    }
    if (const Json count = number("/strategy/devices"); !count.is_null()) wanted_.num_devices = count;
    if (!wanted_.devices.empty()) wanted_.num_devices = static_cast<int64_t>(wanted_.devices.size());
  }

  const ConfigText& text_;
  Wanted wanted_;
  Problems problems_;
};

}  // namespace

Wanted read_wanted(const std::string& config_path) {
  if (config_path.empty()) return {};
  const ConfigText text = read_config_file(config_path, {});
  return WantedReader(text).read();
}

}  // namespace stratagem
