// SPDX-License-Identifier: Apache-2.0
#include "nccl/settings.hpp"

#include <algorithm>
#include <climits>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.hpp"
#include "base/json.hpp"

namespace stratagem {

namespace {

using nlohmann::json;

constexpr const char* place = "/options/nccl";

// Those whole numbers that NCCL 2.28 and 2.30 both have; not what is about communicators made out of others, of which there are none.
struct Setting {
  const char* name;
  int ncclConfig_t::*field;
  int smallest, largest;
};
constexpr Setting settings[] = {{"cga_cluster_size", &ncclConfig_t::cgaClusterSize, 0, 8},
                                {"min_ctas", &ncclConfig_t::minCTAs, 1, 64},
                                {"max_ctas", &ncclConfig_t::maxCTAs, 1, 64},
                                {"traffic_class", &ncclConfig_t::trafficClass, 0, INT_MAX},
                                {"collnet_enable", &ncclConfig_t::collnetEnable, 0, 1},
                                {"cta_policy", &ncclConfig_t::CTAPolicy, 0, 2},
                                {"nvls_ctas", &ncclConfig_t::nvlsCTAs, 1, 64}};

int read_number(const json& value, const Setting& setting) {
  // Compared as what it is: one over 2^63 is negative as an int64_t.
  if (!value.is_number_integer() || value < setting.smallest || value > setting.largest) {
    throw invalid_argument(place, "/", setting.name, " is ", value.dump(), "; it must be a whole number from ", setting.smallest,
                           " to ", setting.largest);
  }
  return value.get<int>();
}

Error unknown(const std::string& key) {
  std::vector<std::string> known{"net_name"};
  for (const Setting& setting : settings) known.emplace_back(setting.name);
  return invalid_argument(place, "/", key, " is unknown; known are ", join(known));
}

}  // namespace

NcclSettings::NcclSettings(const std::string& settings_json) : config_(NCCL_CONFIG_INITIALIZER) {
  config_.blocking = 0;
  const json object = parse_json(settings_json, place);
  if (!object.is_object()) throw invalid_argument(place, " is ", object.dump(), "; it must be an object");
  for (const auto& [key, value] : object.items()) {
    if (key == "net_name") {
      if (!value.is_string()) throw invalid_argument(place, "/net_name is ", value.dump(), "; it must be a text");
      net_name_ = value.get<std::string>();
      config_.netName = net_name_.c_str();
      continue;
    }
    const auto setting =
        std::find_if(std::begin(settings), std::end(settings), [&](const Setting& one) { return key == one.name; });
    if (setting == std::end(settings)) throw unknown(key);
    config_.*(setting->field) = read_number(value, *setting);
  }
  if (config_.minCTAs != NCCL_CONFIG_UNDEF_INT && config_.maxCTAs != NCCL_CONFIG_UNDEF_INT && config_.minCTAs > config_.maxCTAs)
    throw invalid_argument(place, "/min_ctas is ", config_.minCTAs, ", more than max_ctas, which is ", config_.maxCTAs);
}

}  // namespace stratagem
