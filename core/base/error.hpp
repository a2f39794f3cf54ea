// SPDX-License-Identifier: Apache-2.0
//
// Errors on the C++ side, and the two crossings: exception -> stg_error at an entry of the ABI, stg_error -> exception after a call.
#pragma once

#include <stratagem/error.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "base/text.hpp"

namespace stratagem {

struct ErrorRelease {
  void operator()(stg_error* error) const noexcept { error->release(error); }
};
using ErrorPtr = std::unique_ptr<stg_error, ErrorRelease>;

inline constexpr stg_device no_device{STG_DEVICE_NONE, -1};

/// An error with everything that stg_error has. Copying shares the cause and the origin.
class Error : public std::exception {
 public:
  Error(uint32_t error_code, std::string text) : code(error_code), message(std::move(text)) {}

  const char* what() const noexcept override { return message.c_str(); }

  /// The same error told by somebody further out: `context` + ": " + message, replica and device set, this one as the cause.
  Error within(const std::string& context, int32_t replica, stg_device device) const;

  /// `flags` as they are handed on: what another party says of its own instance is no news about ours, whether trying again can help is.
  uint32_t own_flags() const noexcept {
    return origin == nullptr ? flags : (flags & STG_ERROR_RETRYABLE) | STG_ERROR_INSTANCE_USABLE;
  }

  uint32_t code;
  uint32_t flags = STG_ERROR_INSTANCE_USABLE;
  int32_t replica = -1;
  int32_t rank = -1;
  stg_device device = no_device;
  std::string message;
  std::shared_ptr<stg_error> cause;
  std::shared_ptr<stg_error> origin;  ///< the object that `check` took over; becomes the cause when this crosses the ABI again
};

/// Error{code, concat(parts...)}, by name.
template <class... Parts>
Error invalid_argument(const Parts&... parts) {
  return {STG_INVALID_ARGUMENT, concat(parts...)};
}
template <class... Parts>
Error failed_precondition(const Parts&... parts) {
  return {STG_FAILED_PRECONDITION, concat(parts...)};
}
template <class... Parts>
Error not_found(const Parts&... parts) {
  return {STG_NOT_FOUND, concat(parts...)};
}
template <class... Parts>
Error unimplemented(const Parts&... parts) {
  return {STG_UNIMPLEMENTED, concat(parts...)};
}
template <class... Parts>
Error data_loss(const Parts&... parts) {
  return {STG_DATA_LOSS, concat(parts...)};
}
template <class... Parts>
Error internal(const Parts&... parts) {
  return {STG_INTERNAL, concat(parts...)};
}

/// "INVALID_ARGUMENT" and so on; the number for an unknown code.
std::string code_name(uint32_t code);

/// A new stg_error, owned by the caller. Never null and never throws: without memory it is a static error whose release does nothing.
stg_error* to_abi(const Error& error) noexcept;

/// What `exception` says as an Error: ours as it is, std::bad_alloc as resource_exhausted, others with their text. LibTorch's are
/// known where core/torch has set `translate_foreign_exception`. Without memory for that it is resource_exhausted too.
Error describe_exception(const std::exception_ptr& exception) noexcept;

/// Set once by core/torch: turns exceptions that base doesn't know into an Error, or rethrows what it doesn't know either.
using ExceptionTranslator = Error (*)(const std::exception_ptr&);
extern ExceptionTranslator translate_foreign_exception;

/// Takes the error over and throws it; null does nothing.
void check(stg_error* error);

/// Runs `body` and turns whatever it throws into a stg_error: what every entry of the ABI is wrapped in.
template <class Body>
stg_error* guard(Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return nullptr;
  } catch (...) {
    return to_abi(describe_exception(std::current_exception()));
  }
}

}  // namespace stratagem
