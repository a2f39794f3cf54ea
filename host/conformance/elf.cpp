// SPDX-License-Identifier: Apache-2.0
#include "conformance/elf.hpp"

#include <elf.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "base/error.hpp"

namespace stratagem::conformance {
namespace {

class Reader {
 public:
  explicit Reader(const std::filesystem::path& path) : name_(path.native()) {
    std::ifstream file(path, std::ios::binary);
    if (!file || !std::filesystem::is_regular_file(path)) throw not_found("there is no file ", name_, ", or it can't be read");
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
  }

  template <class T>
  T at(uint64_t offset) const {
    if (offset > bytes_.size() || sizeof(T) > bytes_.size() - offset) {
      throw data_loss(name_, " is damaged or cut off: byte ", offset, " + ", sizeof(T), " is asked for, it has ", bytes_.size());
    }
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof(T));
    return value;
  }

  std::string text(uint64_t offset) const {
    if (offset >= bytes_.size()) throw data_loss(name_, " is damaged: a text at byte ", offset, ", it has ", bytes_.size());
    const size_t end = bytes_.find('\0', offset);
    return bytes_.substr(offset, end == std::string::npos ? end : end - offset);
  }

  const std::string& name() const { return name_; }

 private:
  std::string name_, bytes_;
};

Elf64_Ehdr read_header(const Reader& file) {
  const auto header = file.at<Elf64_Ehdr>(0);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_ident[EI_DATA] != ELFDATA2LSB || header.e_type != ET_DYN) {
    throw invalid_argument(file.name(), " is not a 64-bit little-endian shared library");
  }
  return header;
}

// What the dynamic section points to, as file offsets.
class Layout {
 public:
  Layout(const Reader& file, const Elf64_Ehdr& header) : file_(file) {
    for (uint64_t i = 0; i < header.e_phnum; ++i)
      segments_.push_back(file.at<Elf64_Phdr>(header.e_phoff + i * sizeof(Elf64_Phdr)));
  }

  const std::vector<Elf64_Phdr>& segments() const { return segments_; }

  uint64_t offset_of(uint64_t address) const {
    for (const Elf64_Phdr& segment : segments_) {
      if (segment.p_type == PT_LOAD && address >= segment.p_vaddr && address - segment.p_vaddr < segment.p_filesz)
        return segment.p_offset + (address - segment.p_vaddr);
    }
    throw data_loss(file_.name(), " is damaged: ", address, " is in none of its segments");
  }

  std::vector<Elf64_Dyn> dynamic() const {
    std::vector<Elf64_Dyn> entries;
    for (const Elf64_Phdr& segment : segments_) {
      for (uint64_t at = 0; segment.p_type == PT_DYNAMIC && at + sizeof(Elf64_Dyn) <= segment.p_filesz; at += sizeof(Elf64_Dyn)) {
        entries.push_back(file_.at<Elf64_Dyn>(segment.p_offset + at));
        if (entries.back().d_tag == DT_NULL) break;
      }
    }
    return entries;
  }

 private:
  const Reader& file_;
  std::vector<Elf64_Phdr> segments_;
};

void read_symbols(const Reader& file, const Elf64_Ehdr& header, ElfTables& out) {
  for (uint64_t i = 0; i < header.e_shnum; ++i) {
    const auto section = file.at<Elf64_Shdr>(header.e_shoff + i * sizeof(Elf64_Shdr));
    if (section.sh_type != SHT_DYNSYM) continue;
    const auto texts = file.at<Elf64_Shdr>(header.e_shoff + section.sh_link * sizeof(Elf64_Shdr));
    for (uint64_t at = sizeof(Elf64_Sym); at + sizeof(Elf64_Sym) <= section.sh_size; at += sizeof(Elf64_Sym)) {
      const auto symbol = file.at<Elf64_Sym>(section.sh_offset + at);
      const unsigned binding = ELF64_ST_BIND(symbol.st_info), visibility = ELF64_ST_VISIBILITY(symbol.st_other);
      if (symbol.st_shndx == SHN_UNDEF || symbol.st_shndx == SHN_ABS || binding == STB_LOCAL) continue;
      if (visibility != STV_DEFAULT && visibility != STV_PROTECTED) continue;
      out.exported.push_back({file.text(texts.sh_offset + symbol.st_name), binding == STB_GNU_UNIQUE});
    }
    return;
  }
  throw data_loss(file.name(), " has no section of dynamic symbols (was it stripped of its section headers?)");
}

void read_dynamic(const Reader& file, const Layout& layout, ElfTables& out) {
  const std::vector<Elf64_Dyn> entries = layout.dynamic();
  uint64_t texts = 0;
  for (const Elf64_Dyn& entry : entries) {
    if (entry.d_tag == DT_STRTAB) texts = layout.offset_of(entry.d_un.d_ptr);
  }
  for (const Elf64_Dyn& entry : entries) {
    if (entry.d_tag == DT_FLAGS_1) out.is_never_unloaded = (entry.d_un.d_val & DF_1_NODELETE) != 0;
    if (entry.d_tag == DT_TEXTREL || (entry.d_tag == DT_FLAGS && (entry.d_un.d_val & DF_TEXTREL) != 0))
      out.has_text_relocations = true;
    if (entry.d_tag == DT_NEEDED) out.needed.push_back(file.text(texts + entry.d_un.d_val));
    if (entry.d_tag != DT_RUNPATH && entry.d_tag != DT_RPATH) continue;
    out.is_run_path_old = entry.d_tag == DT_RPATH;
    const std::string all = file.text(texts + entry.d_un.d_val);
    for (size_t begin = 0; begin <= all.size();) {
      const size_t end = std::min(all.find(':', begin), all.size());
      out.run_path.push_back(all.substr(begin, end - begin));
      begin = end + 1;
    }
  }
}

}  // namespace

ElfTables read_elf_tables(const std::filesystem::path& path) {
  const Reader file(path);
  const Elf64_Ehdr header = read_header(file);
  const Layout layout(file, header);
  ElfTables out;
  for (const Elf64_Phdr& segment : layout.segments()) {
    const bool is_executable = (segment.p_flags & PF_X) != 0, is_writable = (segment.p_flags & PF_W) != 0;
    if (segment.p_type == PT_LOAD && is_executable && is_writable) out.has_writable_code = true;
    if (segment.p_type != PT_GNU_STACK) continue;
    out.has_stack_header = true;
    out.is_stack_executable = is_executable;
  }
  read_symbols(file, header, out);
  read_dynamic(file, layout, out);
  return out;
}

}  // namespace stratagem::conformance
