// SPDX-License-Identifier: Apache-2.0
//
// The host's services and the parts of a call, on the C++ side.
#pragma once

#include <stratagem/call.h>
#include <stratagem/host.h>

#include <optional>
#include <span>
#include <string_view>

#include "base/error.hpp"
#include "base/value.hpp"

namespace stratagem {

/// A reference to a host's services. Absent services do nothing. Copies share; any thread.
class Host {
 public:
  Host() = default;
  /// Retains. Null: no services.
  explicit Host(const stg_host* host);
  Host(const Host& other);
  Host& operator=(Host other) noexcept;
  ~Host();

  void log(uint32_t level, std::string_view message) const;
  void warn(std::string_view message) const { log(STG_LOG_WARNING, message); }
  void progress(std::string_view what, uint64_t done, uint64_t total) const;
  void trace_begin(std::string_view phase, int32_t replica) const;
  void trace_end(std::string_view phase, int32_t replica) const;
  /// Null: the host has no storage of its own; use the local disk.
  const stg_storage* storage() const { return table_.storage; }

 private:
  stg_host table_{};
};

/// Refuses an unknown kind and a reserved field that is set; concat(where...) names the stream.
template <class... Where>
void check_stream(const stg_stream& stream, const Where&... where) {
  if (stream.kind > STG_STREAM_PER_THREAD_DEFAULT)
    throw invalid_argument(where..., ".kind is ", stream.kind, "; known are 0 and 1");
  if (stream.reserved != 0) throw invalid_argument(where..., ".reserved is ", stream.reserved, "; it must be 0");
}

/// Deadline, cancel flag and streams of one call. Reads an absent struct as none of them.
class Call {
 public:
  Call() = default;
  explicit Call(const stg_call* call);

  bool has_deadline() const { return call_.deadline_ns != 0; }
  uint64_t deadline_ns() const { return call_.deadline_ns; }
  /// Reads the clock; call it only when about to block, or after having been blocked.
  bool past_deadline() const;
  bool cancelled() const;
  /// Throws cancelled or deadline_exceeded, naming what was waited for.
  void check(std::string_view waiting_for) const;
  std::span<const stg_stream> streams() const { return {call_.streams, call_.num_streams}; }

 private:
  stg_call call_{};
};

}  // namespace stratagem
