// SPDX-License-Identifier: Apache-2.0
//
// What the ELF tables of a plugin say, read from the file's bytes: nothing of it runs. core/base/note.hpp reads the note; this is the
// rest that rule A3 and the one exported symbol of A1 are about.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace stratagem::conformance {

struct ElfSymbol {
  std::string name;
  bool is_unique = false;  ///< STB_GNU_UNIQUE
};

struct ElfTables {
  std::vector<ElfSymbol> exported;  ///< defined, and seen by others
  std::vector<std::string> needed;
  std::vector<std::string> run_path;  ///< entries of DT_RUNPATH or DT_RPATH as they stand, empty ones too
  bool is_run_path_old = false;       ///< DT_RPATH
  bool is_never_unloaded = false;     ///< DF_1_NODELETE
  bool has_text_relocations = false;
  bool has_stack_header = false;  ///< PT_GNU_STACK; without it the stack is executable
  bool is_stack_executable = false;
  bool has_writable_code = false;  ///< a segment that is both writable and executable
};

/// Throws Error for what is no shared library, or is damaged.
ElfTables read_elf_tables(const std::filesystem::path& path);

}  // namespace stratagem::conformance
