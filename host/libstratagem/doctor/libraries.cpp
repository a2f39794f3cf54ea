// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/doctor/libraries.hpp"

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "base/error.hpp"
#include "base/note.hpp"

namespace stratagem {
namespace fs = std::filesystem;
namespace {

std::vector<fs::path> folders_of(const std::string& list) {
  std::vector<fs::path> folders;
  std::istringstream entries(list);
  for (std::string entry; std::getline(entries, entry, ':');) {
    if (!entry.empty()) folders.emplace_back(entry);
  }
  return folders;
}

bool is_library(const fs::path& file) {
  try {
    read_dynamic_section(file);  // of another machine: refused
    return true;
  } catch (const Error&) {
    return false;
  }
}

fs::path find_in(const std::vector<fs::path>& folders, const std::string& name) {
  for (const fs::path& folder : folders) {
    std::error_code error;
    const fs::path file = fs::canonical(folder / name, error);
    if (!error && is_library(file)) return file;
  }
  return {};
}

/// The cache holds the paths as texts, each between zeros.
fs::path find_in_cache(const fs::path& cache, const std::string& name) {
  std::ifstream in(cache, std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(in), {}}, end = concat("/", name, std::string(1, '\0'));
  for (size_t at = content.find(end); at != std::string::npos; at = content.find(end, at + 1)) {
    const size_t zero = content.rfind('\0', at);
    const size_t begin = zero == std::string::npos ? 0 : zero + 1;
    const fs::path folder = content.substr(begin, at - begin);
    if (fs::path file = find_in({folder}, name); !file.empty()) return file;
  }
  return {};
}

}  // namespace

LoaderPlaces LoaderPlaces::own() {
  LoaderPlaces places;
  if (const char* given = std::getenv("LD_LIBRARY_PATH")) places.library_path = given;
  return places;
}

fs::path find_needed(const std::string& name, const fs::path& by, const LoaderPlaces& places) {
  const DynamicSection section = read_dynamic_section(by);
  std::vector<fs::path> folders = folders_of(places.library_path);
  folders.insert(section.is_run_path_first ? folders.begin() : folders.end(), section.run_path.begin(), section.run_path.end());
  if (fs::path file = find_in(folders, name); !file.empty()) return file;
  if (fs::path file = find_in_cache(places.cache, name); !file.empty()) return file;
  return find_in(places.folders, name);
}

std::vector<std::string> missing_libraries(const fs::path& file, const LoaderPlaces& places) {
  std::vector<std::string> missing;
  for (const std::string& name : read_dynamic_section(file).needed) {
    // The loader itself is there, wherever it lies.
    if (name.rfind("ld-linux", 0) != 0 && find_needed(name, file, places).empty()) missing.push_back(name);
  }
  return missing;
}

std::string nccl_version(const fs::path& file) {
  constexpr size_t chunk_bytes = 1 << 20, overlap_bytes = 64;
  const std::string before = "NCCL version ", allowed = "0123456789.+abcdefghijklmnopqrstuvwxyz";
  std::ifstream in(file, std::ios::binary);
  std::string text;
  std::vector<char> chunk(chunk_bytes);
  while (in) {
    in.read(chunk.data(), chunk_bytes);
    text.append(chunk.data(), static_cast<size_t>(in.gcount()));
    for (size_t at = text.find(before); at != std::string::npos; at = text.find(before, at + 1)) {
      const size_t begin = at + before.size();
      if (begin + overlap_bytes / 2 > text.size() && !in.eof()) break;  // it may go on in the next chunk
      const size_t end = std::min(text.find_first_not_of(allowed, begin), text.size());
      if (begin < end && text[begin] >= '0' && text[begin] <= '9') return text.substr(begin, end - begin);
    }
    text.erase(0, text.size() - std::min(text.size(), overlap_bytes));
  }
  return {};
}

int major_of(const std::string& version) {
  const size_t begin = version.find_first_of("0123456789");
  if (begin == std::string::npos) return -1;
  const size_t end = std::min(version.find_first_not_of("0123456789", begin), version.size());
  return end - begin > 6 ? -1 : std::stoi(version.substr(begin, end - begin));
}

}  // namespace stratagem
