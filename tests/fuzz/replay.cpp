// SPDX-License-Identifier: Apache-2.0
//
// The seeds, and what was found before: replay SEEDS, a folder with one folder per target. So that a mended fault stays mended without
// Clang, and what is run here is compiled everywhere.
//
// Each file is also run cut off at every length, and with each of its bytes changed: what a damaged disk makes of it.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

#include "targets.hpp"

namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<uint8_t>;

Bytes read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

uint64_t run_damaged(const stratagem::fuzz::Target& target, const Bytes& whole) {
  constexpr size_t most_places = 300;
  const size_t step = whole.size() / most_places + 1;
  uint64_t num_runs = 0;
  for (size_t at = 0; at < whole.size(); at += step) {
    Bytes damaged(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(at));
    stratagem::fuzz::run(target, damaged);
    damaged = whole;
    damaged[at] ^= 0xFF;
    stratagem::fuzz::run(target, damaged);
    num_runs += 2;
  }
  return num_runs;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: replay SEEDS\n");
    return 2;
  }
  bool is_complete = true;
  for (const stratagem::fuzz::Target& target : stratagem::fuzz::targets) {
    uint64_t num_files = 0, num_runs = 0;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(fs::path(argv[1]) / target.name, none)) {
      std::printf("%s\n", entry.path().c_str());
      std::fflush(stdout);  // the last line names the file if it ends here
      const Bytes bytes = read_file(entry.path());
      stratagem::fuzz::run(target, bytes);
      num_runs += 1 + run_damaged(target, bytes);
      ++num_files;
    }
    std::printf("%s: %llu files, %llu runs\n", target.name, static_cast<unsigned long long>(num_files),
                static_cast<unsigned long long>(num_runs));
    is_complete = is_complete && num_files > 0;
  }
  if (!is_complete) std::fprintf(stderr, "a target without seeds\n");
  return is_complete ? 0 : 1;
}
