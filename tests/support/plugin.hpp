// SPDX-License-Identifier: Apache-2.0
//
// A plugin as a test or a benchmark uses it: opened, probed, and its factories found by name. Not the host library's loader: these
// tests talk to the raw ABI.
#pragma once

#include <dlfcn.h>
#include <stratagem/plugin.h>

#include <memory>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "base/value.hpp"

namespace stratagem::test {

/// Opens and probes the file; the library stays open for ever.
inline const stg_plugin& load_plugin(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw Error{STG_UNAVAILABLE, dlerror()};
  const auto probe = reinterpret_cast<stg_plugin_probe_fn>(dlsym(library, STG_PLUGIN_PROBE_SYMBOL));
  if (probe == nullptr) throw Error{STG_UNAVAILABLE, path + " has no " STG_PLUGIN_PROBE_SYMBOL};
  const stg_probe_request request{STG_ABI_MAJOR, 0, STG_ABI_MINOR, 0, to_abi("test")};
  char text[512] = "";
  stg_probe_reply reply{};
  reply.text = text;
  reply.text_capacity_bytes = sizeof text;
  if (probe(&request, &reply) != STG_PROBE_ACCEPTED) throw Error{STG_UNAVAILABLE, path + " was refused: " + text};
  return *static_cast<const stg_plugin*>(reply.plugin);
}

inline const stg_strategy_api& strategy_api(const stg_plugin& plugin, std::string_view name) {
  for (uint64_t i = 0; i < plugin.num_strategies; ++i) {
    if (text_of(plugin.strategies[i]->name) == name) return *plugin.strategies[i]->api;
  }
  throw not_found("the plugin has no strategy ", name);
}

struct ReleaseModel {
  void operator()(const stg_model* model) const noexcept { model->release(model->self); }
};
/// A model with one reference, the caller's.
using ModelPtr = std::unique_ptr<const stg_model, ReleaseModel>;

/// A model made by the plugin's factory.
inline ModelPtr make_model(const stg_plugin& plugin, std::string_view name, std::string_view options_json) {
  for (uint64_t i = 0; i < plugin.num_models; ++i) {
    if (text_of(plugin.models[i]->name) != name) continue;
    const stg_model* model = nullptr;
    check(plugin.models[i]->create(to_abi(options_json), nullptr, &model));
    return ModelPtr{model};
  }
  throw not_found("the plugin has no model ", name);
}

}  // namespace stratagem::test
