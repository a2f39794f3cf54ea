// SPDX-License-Identifier: Apache-2.0
#include "base/note.hpp"

#include <elf.h>
#include <stratagem/plugin.h>

#include <cstring>
#include <limits>
#include <optional>

#include "base/disk.hpp"
#include "base/error.hpp"
#include "base/json.hpp"

namespace stratagem {

namespace {

#if defined(__x86_64__)
constexpr uint16_t own_machine = EM_X86_64;
#elif defined(__aarch64__)
constexpr uint16_t own_machine = EM_AARCH64;
#else
#error "e_machine of this platform is not known here"
#endif

constexpr uint64_t max_description_bytes = 1 << 20;
constexpr uint64_t max_note_segments_bytes = 16 << 20;  // of all of them: a file of one such size can name it thousands of times
constexpr uint64_t max_program_headers = 4096;
constexpr uint64_t max_needed = 1024, max_name_bytes = 4096;  // a damaged file must not keep us long

std::string machine_name(uint16_t machine) {
  switch (machine) {
    case EM_X86_64:
      return "x86-64";
    case EM_AARCH64:
      return "AArch64";
    case EM_386:
      return "x86 (32-bit)";
    case EM_ARM:
      return "ARM (32-bit)";
    case EM_RISCV:
      return "RISC-V";
    case EM_PPC64:
      return "PowerPC 64";
    case EM_S390:
      return "S/390";
    case 258:  // not in every elf.h
      return "LoongArch";
    default:
      return concat("ELF machine ", machine);
  }
}

std::string file_kind(uint16_t type) {
  switch (type) {
    case ET_REL:
      return "an object file that was not linked";
    case ET_EXEC:
      return "an executable";
    case ET_CORE:
      return "a core dump";
    default:
      return concat("of the ELF type ", type);
  }
}

class ElfFile {
 public:
  explicit ElfFile(const std::filesystem::path& path) : file_(disk::open_for_reading(path)) {}

  std::string description() const {
    std::optional<std::string> found;
    uint64_t note_bytes = 0;
    for (const Elf64_Phdr& segment : read_segments()) {
      // The dynamic loader maps what a truncated file promises, and the process dies of SIGBUS.
      const bool is_note = segment.p_type == PT_NOTE, is_read = is_note || (segment.p_type == PT_LOAD && segment.p_filesz != 0);
      if (is_read && !fits(segment.p_offset, segment.p_filesz)) {
        throw data_loss(name(), " is damaged or cut off: a ", is_note ? "note segment" : "segment", " of ", segment.p_filesz,
                        " bytes at byte ", segment.p_offset, ", the file has ", file_.size_bytes);
      }
      if (!is_note) continue;
      note_bytes += segment.p_filesz;
      if (note_bytes > max_note_segments_bytes) {
        throw invalid_argument(name(), ": note segments of ", note_bytes, " bytes; at most ", max_note_segments_bytes,
                               " are read");
      }
      visit_segment(segment, found);
    }
    if (!found)
      throw not_found(name(),
                      " is no Stratagem plugin: it is a shared library without a note of the owner \"" STG_NOTE_OWNER "\"");
    return *std::move(found);
  }

  const std::string& name() const { return file_.path.native(); }

  struct Dynamic {
    std::vector<std::string> needed;
    std::string run_path;
    bool is_old_path = false;
  };

  Dynamic dynamic() const {
    const std::vector<Elf64_Phdr> segments = read_segments();
    std::optional<uint64_t> texts, old_path, path;
    std::vector<uint64_t> needed;
    for (const Elf64_Phdr& segment : segments) {
      if (segment.p_type != PT_DYNAMIC) continue;
      for (uint64_t at = 0; at + sizeof(Elf64_Dyn) <= segment.p_filesz; at += sizeof(Elf64_Dyn)) {
        const auto entry = read<Elf64_Dyn>(segment.p_offset + at, "its dynamic section");
        if (entry.d_tag == DT_NULL) break;
        if (entry.d_tag == DT_STRTAB) texts = entry.d_un.d_ptr;
        if (entry.d_tag == DT_RPATH) old_path = entry.d_un.d_val;
        if (entry.d_tag == DT_RUNPATH) path = entry.d_un.d_val;
        if (entry.d_tag == DT_NEEDED && needed.size() < max_needed) needed.push_back(entry.d_un.d_val);
      }
    }
    Dynamic found;
    found.is_old_path = !path && old_path;
    if (!path) path = old_path;
    if (!texts) return found;
    const uint64_t texts_at = offset_of(*texts, segments);
    for (const uint64_t name : needed) found.needed.push_back(read_text(texts_at + name, max_name_bytes));
    if (path) found.run_path = read_text(texts_at + *path, max_description_bytes);
    return found;
  }

 private:
  std::vector<Elf64_Phdr> read_segments() const {
    const Elf64_Ehdr header = read_header();
    std::vector<Elf64_Phdr> segments;
    for (uint64_t i = 0; i < header.e_phnum; ++i)
      segments.push_back(read<Elf64_Phdr>(header.e_phoff + i * sizeof(Elf64_Phdr), "its program headers"));
    return segments;
  }

  // Where in the file an address of the loaded library comes from.
  uint64_t offset_of(uint64_t address, const std::vector<Elf64_Phdr>& segments) const {
    for (const Elf64_Phdr& segment : segments) {
      if (segment.p_type == PT_LOAD && address >= segment.p_vaddr && address - segment.p_vaddr < segment.p_filesz)
        return segment.p_offset + (address - segment.p_vaddr);
    }
    throw data_loss(name(), " is damaged: its dynamic section points to ", address, ", which is in none of its segments");
  }

  std::string read_text(uint64_t at, uint64_t max_bytes) const {
    std::string text;
    for (char next = 0; text.size() < max_bytes; text += next, ++at) {
      next = read<char>(at, "a text of its dynamic section");
      if (next == 0) break;
    }
    return text;
  }

  // `size_bytes` at `offset` lie in the file.
  bool fits(uint64_t offset, uint64_t size_bytes) const {
    return offset <= file_.size_bytes && size_bytes <= file_.size_bytes - offset;
  }

  template <class T>
  T read(uint64_t offset, const char* what) const {
    if (!fits(offset, sizeof(T))) {
      throw data_loss(name(), " is damaged or cut off: ", what, " should reach to byte ", offset, " + ", sizeof(T),
                      ", the file has ", file_.size_bytes);
    }
    T value;
    disk::read_exactly(file_, offset, &value, sizeof(T));
    return value;
  }

  Elf64_Ehdr read_header() const {
    char magic[SELFMAG] = {};
    if (fits(0, SELFMAG)) disk::read_exactly(file_, 0, magic, SELFMAG);
    if (std::memcmp(magic, ELFMAG, SELFMAG) != 0) throw invalid_argument(name(), " is no plugin: it is not an ELF file");
    const auto ident = read<std::array<unsigned char, EI_NIDENT>>(0, "its ELF header");
    if (ident[EI_CLASS] != ELFCLASS64 || ident[EI_DATA] != ELFDATA2LSB) {
      throw invalid_argument(name(), " is no plugin for this machine: an ELF file, but not a 64-bit little-endian one");
    }
    const auto header = read<Elf64_Ehdr>(0, "its ELF header");
    if (header.e_machine != own_machine) {
      throw invalid_argument(name(), " was built for ", machine_name(header.e_machine), "; this program runs on ",
                             machine_name(own_machine));
    }
    if (header.e_type != ET_DYN)
      throw invalid_argument(name(), " is no plugin: it is ", file_kind(header.e_type), ", not a shared library");
    if (header.e_phnum != 0 && header.e_phentsize != sizeof(Elf64_Phdr)) {
      throw data_loss(name(), " is damaged: its program headers have ", header.e_phentsize, " bytes each; expected ",
                      sizeof(Elf64_Phdr));
    }
    if (header.e_phnum > max_program_headers || !fits(header.e_phoff, header.e_phnum * sizeof(Elf64_Phdr))) {
      throw data_loss(name(), " is damaged or cut off: ", header.e_phnum, " program headers at byte ", header.e_phoff,
                      ", the file has ", file_.size_bytes);
    }
    return header;
  }

  // Goes from note to note; each advances by at least a note's header, so that it ends.
  void visit_segment(const Elf64_Phdr& segment, std::optional<std::string>& found) const {
    const uint64_t alignment = segment.p_align == 8 ? 8 : 4;
    const auto aligned = [&](uint64_t offset) { return (offset + alignment - 1) / alignment * alignment; };
    uint64_t at = 0;
    while (segment.p_filesz - at >= sizeof(Elf64_Nhdr)) {
      const auto note = read<Elf64_Nhdr>(segment.p_offset + at, "a note");
      const uint64_t description_at = aligned(at + sizeof(Elf64_Nhdr) + note.n_namesz);
      const uint64_t end = description_at + note.n_descsz;
      if (end > segment.p_filesz) {
        throw data_loss(name(), " is damaged: a note of ", note.n_namesz, " + ", note.n_descsz, " bytes in a segment of ",
                        segment.p_filesz);
      }
      if (is_ours(note, segment.p_offset + at + sizeof(Elf64_Nhdr))) {
        if (found) throw invalid_argument(name(), " carries two Stratagem notes; STG_PLUGIN_NOTE belongs into one source file");
        found = read_description(segment.p_offset + description_at, note.n_descsz);
      }
      at = std::min<uint64_t>(aligned(end), segment.p_filesz);
    }
  }

  bool is_ours(const Elf64_Nhdr& note, uint64_t owner_at) const {
    char owner[sizeof(STG_NOTE_OWNER)];
    if (note.n_type != STG_NOTE_TYPE || note.n_namesz != sizeof(owner)) return false;
    disk::read_exactly(file_, owner_at, owner, sizeof(owner));
    return std::memcmp(owner, STG_NOTE_OWNER, sizeof(owner)) == 0;
  }

  std::string read_description(uint64_t at, uint64_t size_bytes) const {
    if (size_bytes > max_description_bytes) {
      throw invalid_argument(name(), ": its note has ", size_bytes, " bytes; at most ", max_description_bytes, " are read");
    }
    std::string text(size_bytes, '\0');
    disk::read_exactly(file_, at, text.data(), size_bytes);
    return text.substr(0, text.find('\0'));
  }

  disk::OpenFile file_;
};

class NoteReader {
 public:
  explicit NoteReader(std::string where) : where_(std::move(where)) {}

  PluginNote parts(const nlohmann::json& note) const {
    if (!note.is_object()) fail("", "is", note, "an object");
    const nlohmann::json& abi = need(note, "", "abi");
    if (!abi.is_object()) fail("/abi", "is", abi, "an object");
    PluginNote out;
    out.name = text(note, "name");
    out.version = text(note, "version");
    out.abi_major = number(abi, "major");
    out.min_minor = number(abi, "min_minor");
    out.max_minor = number(abi, "max_minor");
    if (out.min_minor > out.max_minor) {
      throw invalid_argument(where_, ": /abi/min_minor is ", out.min_minor, ", above /abi/max_minor, ", out.max_minor);
    }
    out.strategies = names(note, "strategies");
    out.models = names(note, "models");
    for (auto [key, to] : {std::pair{"libtorch", &out.libtorch}, std::pair{"cuda", &out.cuda}, std::pair{"nccl", &out.nccl}}) {
      if (note.contains(key)) *to = text(note, key);
    }
    return out;
  }

 private:
  const nlohmann::json& need(const nlohmann::json& object, const std::string& pointer, const char* key) const {
    const auto found = object.find(key);
    if (found == object.end()) throw invalid_argument(where_, ": ", pointer, "/", key, " is missing");
    return *found;
  }

  std::string text(const nlohmann::json& note, const char* key) const {
    const nlohmann::json& value = need(note, "", key);
    if (!value.is_string() || value.get_ref<const std::string&>().empty()) fail(concat("/", key), "is", value, "a text");
    return value.get<std::string>();
  }

  uint32_t number(const nlohmann::json& abi, const char* key) const {
    const nlohmann::json& value = need(abi, "/abi", key);
    if (!value.is_number_unsigned() || value.get<uint64_t>() > std::numeric_limits<uint32_t>::max()) {
      fail(concat("/abi/", key), "is", value, "a number from 0 to 2^32 - 1");
    }
    return value.get<uint32_t>();
  }

  std::vector<std::string> names(const nlohmann::json& note, const char* key) const {
    const nlohmann::json& value = need(note, "", key);
    const bool fits =
        value.is_array() && std::all_of(value.begin(), value.end(), [](const auto& item) { return item.is_string(); });
    if (!fits) fail(concat("/", key), "is", value, "a list of texts");
    return value.get<std::vector<std::string>>();
  }

  [[noreturn]] void fail(const std::string& pointer, const char* is, const nlohmann::json& value, const char* expected) const {
    throw invalid_argument(where_, ": ", pointer.empty() ? "the whole" : pointer, " ", is, " ", value.dump().substr(0, 100),
                           "; expected ", expected);
  }

  std::string where_;
};

}  // namespace

nlohmann::json read_note(const std::filesystem::path& path) {
  const ElfFile file{path};
  const std::string where = concat("the Stratagem note of ", file.name());
  nlohmann::json note = parse_json(file.description(), where);
  NoteReader{where}.parts(note);
  return note;
}

DynamicSection read_dynamic_section(const std::filesystem::path& path) {
  const auto dynamic = ElfFile{path}.dynamic();
  const std::string &folders = dynamic.run_path, origin = std::filesystem::absolute(path).parent_path();
  DynamicSection found{dynamic.needed, {}, dynamic.is_old_path};
  for (size_t begin = 0; begin < folders.size();) {
    const size_t end = std::min(folders.find(':', begin), folders.size());
    std::string folder = folders.substr(begin, end - begin);
    for (const std::string word : {"$ORIGIN", "${ORIGIN}"}) {
      if (folder.starts_with(word)) folder.replace(0, word.size(), origin);
    }
    if (!folder.empty()) found.run_path.emplace_back(folder);
    begin = end + 1;
  }
  return found;
}

std::vector<std::filesystem::path> read_run_path(const std::filesystem::path& path) {
  return read_dynamic_section(path).run_path;
}

PluginNote read_plugin_note(const std::filesystem::path& path) {
  const nlohmann::json note = read_note(path);
  return NoteReader{concat("the Stratagem note of ", std::filesystem::absolute(path).native())}.parts(note);
}

}  // namespace stratagem
