// SPDX-License-Identifier: Apache-2.0
//
// Autocast on the calling thread, put back as it was afterwards.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace stratagem::sdk {

/// LibTorch's cache of cast parameters belongs to the process: one thread's clearing empties it for all. So `use_cache` is for a
/// replica that is alone; it is empty at the beginning and at the end (though a host may be under autocast itself, and has to cast
/// again then), since the next step has other weights.
class AutocastScope {
 public:
  AutocastScope(at::DeviceType device, std::optional<at::ScalarType> dtype, bool use_cache);
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;
  ~AutocastScope();

 private:
  at::DeviceType device_;
  bool changed_;
  bool was_enabled_ = false;
  bool used_cache_ = false;
  at::ScalarType dtype_before_ = at::kFloat;
};

}  // namespace stratagem::sdk
