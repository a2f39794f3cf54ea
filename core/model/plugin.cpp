// SPDX-License-Identifier: Apache-2.0
//
// What a model library offers behind its probe.
#include "base/structs.hpp"
#include "model/tensor_model.hpp"

namespace stratagem::sdk {

ModelPlugin::ModelPlugin(const char* name, const char* version, const ModelInfo& info, decltype(stg_model_factory::create) create)
    : factory(sized<stg_model_factory>()), factories{&factory}, plugin(sized<stg_plugin>()) {
  factory.name = to_abi(std::string_view(name));
  factory.summary = to_abi(std::string_view(info.summary));
  factory.options_schema = to_abi(std::string_view(info.options_schema));
  factory.create = create;
  plugin.name = factory.name;
  plugin.version = to_abi(std::string_view(version));
  plugin.models = factories;
  plugin.num_models = 1;
  plugin.get_extension = [](stg_string) -> const void* { return nullptr; };
}

}  // namespace stratagem::sdk
