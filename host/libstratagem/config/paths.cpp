// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/config/paths.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/text.hpp"

namespace stratagem {
namespace fs = std::filesystem;

fs::path config_path(const std::string& text, const fs::path& base, const std::string& pointer, Problems& problems) {
  if (!text.empty() && text.front() == '~') {
    problems.add(pointer,
                 concat(shown(text), ": \"~\" is not expanded here; write the whole path (or $HOME, unquoted, in a shell)"));
  }
  if (text.find('\0') != std::string::npos) problems.add(pointer, concat(shown(text), ": a path has no zero byte in it"));
  return (base / text).lexically_normal();
}

void require_readable(const fs::path& file, const std::string& pointer, Problems& problems) {
  std::error_code error;
  if (fs::is_directory(file, error)) {
    problems.add(pointer, concat(file.string(), " is a folder; a file is wanted"));
  } else if (access(file.c_str(), R_OK) != 0) {
    problems.add(pointer, concat("can't read ", file.string(), ": ", std::strerror(errno)));
  }
}

}  // namespace stratagem
