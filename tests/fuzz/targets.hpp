// SPDX-License-Identifier: Apache-2.0
//
// The parsers that meet bytes of others' making, each as a function of a file. One is run on what libFuzzer makes up (libfuzzer.cpp),
// and on the seeds kept here (replay.cpp), which every build does.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>

namespace stratagem::fuzz {

struct Target {
  const char* name;
  void (*run)(const std::filesystem::path& file);
};

extern const std::span<const Target> targets;

/// Runs one on these bytes. A file is read or refused: by an Error of a kind that a file can have, in UTF-8, with the file's path. What
/// was read keeps its promises, and where we write such files, too, it comes back equal. All else aborts, with a line that says what.
void run(const Target& target, std::span<const uint8_t> bytes);

}  // namespace stratagem::fuzz
