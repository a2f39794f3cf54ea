// SPDX-License-Identifier: Apache-2.0
//
// NCCL's settings of communicators, as a user gives them: an object of JSON.
#pragma once

#include <nccl.h>

#include <string>

namespace stratagem {

class NcclSettings {
 public:
  /// An error says the value, its place and what is possible.
  explicit NcclSettings(const std::string& settings_json);
  NcclSettings(const NcclSettings&) = delete;
  NcclSettings& operator=(const NcclSettings&) = delete;

  /// For communicators that don't block. What it points to is this object's.
  ncclConfig_t config() const { return config_; }

 private:
  ncclConfig_t config_;
  std::string net_name_;
};

}  // namespace stratagem
