// SPDX-License-Identifier: Apache-2.0
#include "cli/output.hpp"

#include <stratagem/host.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "cli/progress.hpp"

namespace stratagem::cli {

bool stderr_is_terminal() {
  const char* term = std::getenv("TERM");
  return isatty(STDERR_FILENO) != 0 && (term == nullptr || std::string_view(term) != "dumb");
}

bool stderr_has_colour() {
  const char* no_color = std::getenv("NO_COLOR");
  return stderr_is_terminal() && (no_color == nullptr || *no_color == '\0');
}

void say(uint32_t level, std::string_view text) {
  if (level == STG_LOG_DEBUG) return;
  const bool colour = stderr_has_colour();
  const char* word = level == STG_LOG_ERROR ? "error: " : level == STG_LOG_WARNING ? "warning: " : "";
  const char* begin = !colour || level == STG_LOG_INFO ? "" : level == STG_LOG_ERROR ? "\033[1;31m" : "\033[1;33m";
  const char* end = *begin == '\0' ? "" : "\033[0m";
  write_above_progress(begin + std::string(word) + end + std::string(text) + "\n");
}

std::string text_of(const stg_error& error) {
  const std::string_view message(error.message.data == nullptr ? "" : error.message.data, error.message.size_bytes);
  std::string text(message);
  if (error.cause != nullptr) {
    // Whoever wraps an error often repeats it; then the cause adds nothing.
    const std::string cause = text_of(*error.cause);
    if (text.find(cause) == std::string::npos) text += "\n  because: " + cause;
  }
  return text;
}

int exit_code_of_opening(uint32_t code) {
  switch (code) {
    case STG_INVALID_ARGUMENT:
    case STG_NOT_FOUND:
    case STG_OUT_OF_RANGE:
    case STG_ALREADY_EXISTS:
    case STG_DATA_LOSS:
    case STG_UNIMPLEMENTED:
      return bad_input;
    case STG_FAILED_PRECONDITION:
    case STG_PERMISSION_DENIED:
    case STG_UNAVAILABLE:
      return bad_plugin;
    default:
      return failed;
  }
}

}  // namespace stratagem::cli
