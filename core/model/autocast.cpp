// SPDX-License-Identifier: Apache-2.0
#include "model/autocast.hpp"

#include <ATen/autocast_mode.h>

namespace stratagem::sdk {

AutocastScope::AutocastScope(at::DeviceType device, std::optional<at::ScalarType> dtype, bool use_cache)
    : device_(device), changed_(dtype.has_value() || at::autocast::is_autocast_enabled(device)) {
  if (!changed_) return;
  was_enabled_ = at::autocast::is_autocast_enabled(device);
  used_cache_ = at::autocast::is_autocast_cache_enabled();
  dtype_before_ = at::autocast::get_autocast_dtype(device);
  at::autocast::increment_nesting();
  at::autocast::set_autocast_enabled(device, dtype.has_value());
  if (dtype.has_value()) at::autocast::set_autocast_dtype(device, *dtype);
  at::autocast::set_autocast_cache_enabled(use_cache);
  if (use_cache) at::autocast::clear_cache();
}

AutocastScope::~AutocastScope() {
  if (!changed_) return;
  if (at::autocast::is_autocast_cache_enabled()) at::autocast::clear_cache();
  at::autocast::decrement_nesting();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_cache_enabled(used_cache_);
}

}  // namespace stratagem::sdk
