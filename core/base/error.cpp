// SPDX-License-Identifier: Apache-2.0
#include "base/error.hpp"

#include <algorithm>
#include <array>
#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>

#include "base/disk.hpp"

namespace stratagem {

ExceptionTranslator translate_foreign_exception = nullptr;

namespace {

/// Texts that cross are UTF-8, but a message may quote a file or a path, which can hold any byte: U+FFFD stands for what isn't UTF-8.
std::string as_utf8(const std::string& text) {
  if (std::all_of(text.begin(), text.end(), [](char letter) { return static_cast<unsigned char>(letter) < 0x80; })) return text;
  return nlohmann::json::parse(nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace))
      .get<std::string>();
}

// One allocation per error: the ABI's struct first, what it points to behind it.
struct OwnedError {
  stg_error abi{};
  std::string message;
  std::shared_ptr<stg_error> cause;
};

constexpr char out_of_memory_text[] = "out of memory on the host while another error was being reported";

stg_error out_of_memory_error{STG_RESOURCE_EXHAUSTED,
                              STG_ERROR_RETRYABLE | STG_ERROR_INSTANCE_USABLE,
                              -1,
                              -1,
                              no_device,
                              {out_of_memory_text, sizeof(out_of_memory_text) - 1},
                              nullptr,
                              [](stg_error*) {},
                              nullptr};

std::shared_ptr<stg_error> share(stg_error* error) { return {error, ErrorRelease{}}; }

// Short enough for a std::string without an allocation.
Error out_of_memory() { return {STG_RESOURCE_EXHAUSTED, "out of memory"}; }

Error describe(const std::exception_ptr& exception) {
  try {
    try {
      std::rethrow_exception(exception);
    } catch (const Error& error) {
      return error;
    } catch (const std::bad_alloc&) {
      return out_of_memory();
    } catch (const std::filesystem::filesystem_error& error) {
      return disk::errno_error(error.code().value(), "use", error.path1());
    } catch (...) {
      if (translate_foreign_exception == nullptr) throw;
      return translate_foreign_exception(exception);
    }
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  } catch (const std::exception& error) {
    return {STG_INTERNAL, error.what()};
  } catch (...) {
    return {STG_UNKNOWN, "an exception that is no std::exception was thrown"};
  }
}

}  // namespace

Error Error::within(const std::string& context, int32_t at_replica, stg_device at_device) const {
  Error outer{code, context + ": " + message};
  outer.flags = own_flags();
  outer.replica = at_replica;
  outer.rank = rank;
  outer.device = at_device;
  outer.cause = origin != nullptr ? origin : share(to_abi(*this));
  return outer;
}

std::string code_name(uint32_t code) {
  static constexpr std::array names{
      "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
      "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
      "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
      "DATA_LOSS", "UNAUTHENTICATED"};
  return code < names.size() ? names[code] : std::to_string(code);
}

stg_error* to_abi(const Error& error) noexcept {
  try {
    auto owned = std::make_unique<OwnedError>();
    owned->message = as_utf8(error.message);
    owned->cause = error.origin != nullptr ? error.origin : error.cause;
    owned->abi = {error.code == STG_OK ? STG_UNKNOWN : error.code,
                  error.own_flags(),
                  error.replica,
                  error.rank,
                  error.device,
                  {owned->message.data(), owned->message.size()},
                  owned->cause.get(),
                  [](stg_error* self) { delete static_cast<OwnedError*>(self->owner); },
                  owned.get()};
    return &owned.release()->abi;
  } catch (...) {
    return &out_of_memory_error;
  }
}

Error describe_exception(const std::exception_ptr& exception) noexcept {
  try {
    return describe(exception);
  } catch (...) {
    return out_of_memory();
  }
}

void check(stg_error* error) {
  if (error == nullptr) return;
  std::shared_ptr<stg_error> owner = share(error);
  Error thrown{error->code, std::string(error->message.data == nullptr ? "" : error->message.data, error->message.size_bytes)};
  thrown.flags = error->flags;
  thrown.replica = error->replica;
  thrown.rank = error->rank;
  thrown.device = error->device;
  // The causes stay where they are, kept alive by the error that owns them.
  if (error->cause != nullptr) thrown.cause = std::shared_ptr<stg_error>(owner, error->cause);
  thrown.origin = std::move(owner);
  throw thrown;
}

}  // namespace stratagem
