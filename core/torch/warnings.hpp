// SPDX-License-Identifier: Apache-2.0
//
// LibTorch's warnings go to the host's log; left alone, LibTorch writes them to stderr.
#pragma once

#include <c10/util/Exception.h>

#include "base/host.hpp"

namespace stratagem {

/// Sends what LibTorch warns of on the calling thread to a host's log, for as long as this object lives. Objects nest.
class WarningScope {
 public:
  /// `host` must outlive the scope.
  explicit WarningScope(const Host& host) : handler_(host), guard_(&handler_) {}

 private:
  class Handler : public c10::WarningHandler {
   public:
    explicit Handler(const Host& host) : host_(host) {}
    void process(const c10::Warning& warning) override;

   private:
    const Host& host_;
  };

  Handler handler_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace stratagem
