// SPDX-License-Identifier: Apache-2.0
//
// The note reader against files of every kind: one made by the linker, and ones put together byte by byte.
#include "base/note.hpp"

#include <elf.h>
#include <stratagem/plugin.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <random>

#include "unit/support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::string good_json =
    R"({"name": "crafted", "version": "1.0", "abi": {"major": 1, "min_minor": 0, "max_minor": 0}, "strategies": ["crafted"], "models": []})";

template <class T>
std::string bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

std::string padded(std::string text, size_t alignment) {
  text.resize((text.size() + alignment - 1) / alignment * alignment);
  return text;
}

std::string note(const std::string& owner, uint32_t type, const std::string& description, size_t alignment = 4) {
  Elf64_Nhdr header{};
  header.n_namesz = static_cast<uint32_t>(owner.size() + 1);
  header.n_descsz = static_cast<uint32_t>(description.size());
  header.n_type = type;
  return padded(padded(bytes_of(header) + owner + '\0', alignment) + description, alignment);
}

std::string our_note(const std::string& json) { return note(STG_NOTE_OWNER, STG_NOTE_TYPE, padded(json + '\0', 4)); }

// A file with one note segment: header, program headers, notes. Each part can be changed before it is put together.
struct Elf {
  Elf() {
    std::memcpy(header.e_ident, ELFMAG, SELFMAG);
    header.e_ident[EI_CLASS] = ELFCLASS64;
    header.e_ident[EI_DATA] = ELFDATA2LSB;
    header.e_type = ET_DYN;
#if defined(__x86_64__)
    header.e_machine = EM_X86_64;
#else
    header.e_machine = EM_AARCH64;
#endif
    header.e_phoff = sizeof(Elf64_Ehdr);
    header.e_phentsize = sizeof(Elf64_Phdr);
    header.e_phnum = 2;
    segments[0].p_type = PT_LOAD;
    segments[0].p_offset = UINT64_MAX;  // of no concern to a note
    segments[1].p_type = PT_NOTE;
    segments[1].p_offset = sizeof(Elf64_Ehdr) + 2 * sizeof(Elf64_Phdr);
    segments[1].p_align = 4;
  }
  std::string text() {
    if (segments[1].p_filesz == 0) segments[1].p_filesz = notes.size();
    return bytes_of(header) + bytes_of(segments[0]) + bytes_of(segments[1]) + notes;
  }

  Elf64_Ehdr header{};
  Elf64_Phdr segments[2]{};
  std::string notes = note("GNU", NT_GNU_BUILD_ID, "0123456789") + our_note(good_json);
};

class NoteFile {
 public:
  nlohmann::json read(const std::string& content) {
    write_file(path(), content);
    return read_note(path());
  }
  std::string path() const { return folder_ / "crafted.so"; }
  // Checks that the error has the absolute path, too.
  void refused(const std::string& content, uint32_t code, std::initializer_list<std::string> parts) {
    const Error error = error_of([&] { read(content); });
    check_error(error, code, parts);
    check_error(error, code, {path()});
  }
  void refused(Elf elf, const std::function<void(Elf&)>& spoil, uint32_t code, std::initializer_list<std::string> parts) {
    spoil(elf);
    refused(elf.text(), code, parts);
  }

 private:
  TemporaryFolder folder_;
};

}  // namespace

TEST_CASE("the note that the macro puts into a library is read from the file") {
  const PluginNote note = read_plugin_note(NOTED_LIBRARY);
  CHECK(note.name == "noted");
  CHECK(note.version == "1.2.3");
  CHECK(note.abi_major == 1);
  CHECK(note.min_minor == 0);
  CHECK(note.max_minor == 4);
  CHECK(note.strategies == std::vector<std::string>{"first", "second"});
  CHECK(note.models.empty());
  CHECK(note.libtorch == "2.15.0");
  CHECK(note.cuda.empty());
  CHECK(note.nccl.empty());
  CHECK(read_note(NOTED_LIBRARY)["later"][0] == 1);  // unknown keys stay
}

TEST_CASE("a note is found among others, in any segment alignment and with any filling") {
  NoteFile file;
  Elf elf;
  CHECK(file.read(elf.text())["name"] == "crafted");

  Elf eight;
  eight.segments[1].p_align = 8;
  eight.notes = note("GNU", 5, std::string(12, 'p'), 8) + note(STG_NOTE_OWNER, STG_NOTE_TYPE, good_json, 8);
  CHECK(file.read(eight.text())["name"] == "crafted");

  Elf unfilled;  // a description without its NUL, at the very end of the file
  unfilled.notes = note(STG_NOTE_OWNER, STG_NOTE_TYPE, good_json);
  unfilled.notes.resize(sizeof(Elf64_Nhdr) + 12 + good_json.size());
  CHECK(file.read(unfilled.text())["name"] == "crafted");

  Elf others;  // of our name with another type, of our type with another name
  others.notes = note(STG_NOTE_OWNER, 2, "{}") + note("stratagem", STG_NOTE_TYPE, "{}") + our_note(good_json);
  CHECK(file.read(others.text())["name"] == "crafted");
}

TEST_CASE("a file that is not there, or is none, is refused by its absolute path") {
  const TemporaryFolder folder;
  check_error(error_of([&] { read_note(folder / "none.so"); }), STG_NOT_FOUND, {folder / "none.so", "No such file"});
  check_error(error_of([&] { read_note(folder.path()); }), STG_INVALID_ARGUMENT, {folder.path().native(), "a folder"});
  check_error(error_of([&] { read_note("no/such/plugin.so"); }), STG_NOT_FOUND,
              {std::filesystem::absolute("no/such/plugin.so").native()});
}

TEST_CASE("what is not ELF is refused") {
  NoteFile file;
  for (const std::string& content : {std::string(),
                                     std::string("\x7F"
                                                 "EL"),
                                     std::string("#!/bin/sh\nexit 0\n"), std::string(5000, '\0'), std::string("!<arch>\n")}) {
    file.refused(content, STG_INVALID_ARGUMENT, {"not an ELF file"});
  }
}

TEST_CASE("ELF files of another kind are refused by what they are") {
  NoteFile file;
  const Elf elf;
  file.refused(elf, [](Elf& e) { e.header.e_ident[EI_CLASS] = ELFCLASS32; }, STG_INVALID_ARGUMENT, {"64-bit little-endian"});
  file.refused(elf, [](Elf& e) { e.header.e_ident[EI_DATA] = ELFDATA2MSB; }, STG_INVALID_ARGUMENT, {"64-bit little-endian"});
  file.refused(elf, [](Elf& e) { e.header.e_machine = EM_PPC64; }, STG_INVALID_ARGUMENT, {"PowerPC 64", "this program runs on"});
  file.refused(elf, [](Elf& e) { e.header.e_machine = 4711; }, STG_INVALID_ARGUMENT, {"ELF machine 4711"});
  file.refused(elf, [](Elf& e) { e.header.e_type = ET_EXEC; }, STG_INVALID_ARGUMENT, {"an executable"});
  file.refused(elf, [](Elf& e) { e.header.e_type = ET_CORE; }, STG_INVALID_ARGUMENT, {"core dump"});
  file.refused(elf, [](Elf& e) { e.header.e_type = 9; }, STG_INVALID_ARGUMENT, {"type 9"});
  check_error(error_of([] { read_note(NOTED_OBJECT); }), STG_INVALID_ARGUMENT, {NOTED_OBJECT, "object file that was not linked"});
}

TEST_CASE("a library without our note is no plugin") {
  NoteFile file;
  const Elf elf;
  file.refused(elf, [](Elf& e) { e.notes = note("GNU", NT_GNU_BUILD_ID, "0123"); }, STG_NOT_FOUND,
               {"without a note", "Stratagem"});
  file.refused(elf, [](Elf& e) { e.segments[1].p_type = PT_NULL; }, STG_NOT_FOUND, {"without a note"});
  file.refused(elf, [](Elf& e) { e.header.e_phnum = 0; }, STG_NOT_FOUND, {"without a note"});
  check_error(error_of([] { read_note("/proc/self/exe"); }), STG_NOT_FOUND, {"without a note"});
}

TEST_CASE("two notes of ours in a file are refused") {
  NoteFile file;
  file.refused({}, [](Elf& e) { e.notes += our_note(good_json); }, STG_INVALID_ARGUMENT, {"two Stratagem notes"});
}

TEST_CASE("places and sizes that lead out of the file are damage, however large") {
  NoteFile file;
  const Elf elf;
  for (const uint64_t offset : {uint64_t{300'000}, uint64_t{1} << 40, UINT64_MAX, UINT64_MAX - 60}) {
    file.refused(elf, [&](Elf& e) { e.header.e_phoff = offset; }, STG_DATA_LOSS, {"program headers"});
    file.refused(elf, [&](Elf& e) { e.segments[1].p_offset = offset; }, STG_DATA_LOSS, {"note segment"});
    file.refused(elf, [&](Elf& e) { e.segments[1].p_filesz = offset; }, STG_DATA_LOSS, {"note segment"});
  }
  file.refused(elf, [](Elf& e) { e.header.e_phnum = 0xFFFF; }, STG_DATA_LOSS, {"65535 program headers"});
  file.refused(elf, [](Elf& e) { e.header.e_phentsize = 32; }, STG_DATA_LOSS, {"32 bytes each"});
  for (const uint32_t size : {4096U, 0x7FFFFFFFU, 0xFFFFFFFFU, 0xFFFFFFFDU}) {
    const auto spoil = [size](size_t at) {
      return [size, at](Elf& e) {
        e.notes = our_note(good_json);
        std::memcpy(e.notes.data() + at, &size, sizeof(size));
      };
    };
    file.refused(elf, spoil(offsetof(Elf64_Nhdr, n_namesz)), STG_DATA_LOSS, {"damaged"});
    file.refused(elf, spoil(offsetof(Elf64_Nhdr, n_descsz)), STG_DATA_LOSS, {"damaged"});
  }
}

TEST_CASE("a note that is too large is not read") {
  NoteFile file;
  file.refused({}, [](Elf& e) { e.notes = our_note(std::string(2'000'000, ' ')); }, STG_INVALID_ARGUMENT,
               {"2000004 bytes; at most 1048576"});
}

TEST_CASE("a segment of notes that is too large is not walked through") {
  NoteFile file;
  file.refused({}, [](Elf& e) { e.notes = std::string((size_t{16} << 20) + 4, '\0'); }, STG_INVALID_ARGUMENT,
               {"note segments of 16777220 bytes; at most 16777216"});
}

TEST_CASE("notes that many segments name over and over are not walked through as often") {
  NoteFile file;
  const auto twice = [](Elf& e) {
    e.notes = note("GNU", 1, std::string(size_t{9} << 20, '\0'));
    e.segments[0] = e.segments[1];
    e.segments[0].p_filesz = e.notes.size();
  };
  file.refused({}, twice, STG_INVALID_ARGUMENT, {"note segments of 18874400 bytes; at most 16777216"});
}

TEST_CASE("a note that is no JSON, or not the JSON that was agreed on, is refused by key") {
  NoteFile file;
  const auto refused = [&](const std::string& json, std::initializer_list<std::string> parts) {
    file.refused(
        {}, [&](Elf& e) { e.notes = our_note(json); }, STG_INVALID_ARGUMENT, parts);
  };
  const auto changed = [](const char* pointer, const nlohmann::json& value) {
    nlohmann::json json = nlohmann::json::parse(good_json);
    json[nlohmann::json::json_pointer(pointer)] = value;
    return json.dump();
  };
  refused("", {"not JSON"});
  refused("{\"name\": ", {"not JSON"});
  refused(good_json + "x", {"not JSON"});
  refused("[]", {"an object"});
  refused(R"({"name": "a", "name": "b"})", {"/name is there twice"});
  for (const char* key : {"name", "version", "abi", "strategies", "models"}) {
    nlohmann::json json = nlohmann::json::parse(good_json);
    json.erase(key);
    refused(json.dump(), {std::string("/") + key + " is missing"});
  }
  for (const char* key : {"major", "min_minor", "max_minor"}) {
    nlohmann::json json = nlohmann::json::parse(good_json);
    json["abi"].erase(key);
    refused(json.dump(), {std::string("/abi/") + key + " is missing"});
    refused(changed((std::string("/abi/") + key).c_str(), -1), {std::string("/abi/") + key + " is -1"});
    refused(changed((std::string("/abi/") + key).c_str(), "1"), {std::string("/abi/") + key});
    refused(changed((std::string("/abi/") + key).c_str(), 4294967296), {"4294967296"});
  }
  refused(changed("/name", 7), {"/name is 7", "a text"});
  refused(changed("/name", ""), {"/name"});
  refused(changed("/abi", nullptr), {"/abi is null"});
  refused(changed("/abi/min_minor", 5), {"/abi/min_minor is 5", "/abi/max_minor"});
  refused(changed("/strategies", "crafted"), {"/strategies", "a list of texts"});
  refused(changed("/models", {1}), {"/models is [1]"});
  refused(changed("/libtorch", 2.15), {"/libtorch is 2.15"});
}

TEST_CASE("a library that is cut off anywhere is refused") {
  NoteFile file;
  const std::string whole = Elf{}.text();
  const size_t needed = whole.find_last_not_of('\0') + 1;
  for (size_t size = 0; size < needed; ++size) {
    INFO("cut after " << size << " bytes");
    const Error error = error_of([&] { file.read(whole.substr(0, size)); });
    check_error(error, size < SELFMAG ? STG_INVALID_ARGUMENT : STG_DATA_LOSS, {file.path()});
  }
}

TEST_CASE("a library whose code is cut off is refused, though its note is whole") {
  NoteFile file;
  Elf elf;
  elf.segments[0].p_offset = 0;
  elf.segments[0].p_filesz = elf.text().size();
  CHECK(file.read(elf.text())["name"] == "crafted");
  ++elf.segments[0].p_filesz;
  file.refused(elf.text(), STG_DATA_LOSS, {"damaged or cut off: a segment of", std::to_string(elf.segments[0].p_filesz)});
}

TEST_CASE("the folders that a library searches for what it needs are read from the file") {
  const std::filesystem::path library = NOTED_LIBRARY;
  CHECK(read_run_path(library) == std::vector<std::filesystem::path>{"/first/folder", library.parent_path() / "beside"});
  NoteFile file;
  file.read(Elf{}.text());
  CHECK(read_run_path(file.path()).empty());
}

TEST_CASE("what a library needs, and whether its own folders come before LD_LIBRARY_PATH, is read from the file") {
  const DynamicSection newer = read_dynamic_section(NOTED_LIBRARY), older = read_dynamic_section(NOTED_WITH_RPATH);
  CHECK(std::count(newer.needed.begin(), newer.needed.end(), "libz.so.1") == 1);
  CHECK(!newer.is_run_path_first);
  CHECK(older.run_path == std::vector<std::filesystem::path>{"/older"});
  CHECK(older.is_run_path_first);
}

TEST_CASE("a real library with any byte of its tables changed has a run path, none, or an error with its path") {
  NoteFile file;
  std::ifstream in(NOTED_LIBRARY, std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(in), {}};
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random{seed};
  for (int round = 0; round < 3000; ++round) {
    std::string changed = whole;
    const size_t at = random() % (round % 2 == 0 ? std::min<size_t>(whole.size(), 1024) : whole.size());
    changed[at] = static_cast<char>(changed[at] ^ (1 + random() % 255));
    write_file(file.path(), changed);
    try {
      const DynamicSection found = read_dynamic_section(file.path());
      CHECK(found.run_path.size() + found.needed.size() < changed.size());
    } catch (const Error& error) {
      check_error(error, error.code, {file.path()});
    }
  }
}

TEST_CASE("a file with any byte changed gives a note or an error with its path") {
  NoteFile file;
  const std::string whole = Elf{}.text();
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random{seed};
  int num_refused = 0;
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ (1 + random() % 255));
    try {
      const nlohmann::json read = file.read(changed);
      CHECK(read.is_object());
    } catch (const Error& error) {
      ++num_refused;
      check_error(error, error.code, {file.path()});
    }
  }
  CHECK(num_refused > 20);
}
