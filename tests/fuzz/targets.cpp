// SPDX-License-Identifier: Apache-2.0
#include "targets.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "base/note.hpp"
#include "base/npy.hpp"
#include "base/safetensors.hpp"
#include "base/storage.hpp"
#include "libstratagem/data/csv.hpp"
#include "libstratagem/data/idx.hpp"
#include "libstratagem/data/npz.hpp"

namespace stratagem::fuzz {
namespace {

[[noreturn]] void broken(std::string_view what, std::string_view text = "") {
  std::fprintf(stderr, "broken promise: %.*s %.*s\n", static_cast<int>(what.size()), what.data(), static_cast<int>(text.size()),
               text.data());
  std::abort();
}

void promise(bool is_kept, std::string_view what, std::string_view text = "") {
  if (!is_kept) broken(what, text);
}

/// A file in memory. Its path is short and the same in every run.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(memfd_create("fuzz", MFD_CLOEXEC)) { promise(descriptor_ >= 0, "no memfd_create here"); }
  ~MemoryFile() { close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::filesystem::path write(std::span<const uint8_t> bytes) {
    bool is_written = ftruncate(descriptor_, 0) == 0;
    for (size_t done = 0; is_written && done < bytes.size();) {
      const ssize_t some = pwrite(descriptor_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
      is_written = some > 0;
      done += is_written ? static_cast<size_t>(some) : 0;
    }
    promise(is_written, "the file in memory can't be written");
    return "/proc/self/fd/" + std::to_string(descriptor_);
  }

 private:
  int descriptor_;
};

bool is_utf8(std::string_view text) {
  // The reader of JSON, strict about it, rather than rules of our own again.
  return nlohmann::json::accept("\"" + [&] {
    std::string escaped;
    for (const char letter : text) {
      if (static_cast<unsigned char>(letter) < 0x20 || letter == '"' || letter == '\\') continue;
      escaped += letter;
    }
    return escaped;
  }() + "\"");
}

void check_error(const Error& error, const std::filesystem::path& file) {
  static constexpr uint32_t of_files[] = {STG_INVALID_ARGUMENT, STG_NOT_FOUND, STG_UNIMPLEMENTED, STG_DATA_LOSS};
  promise(std::find(std::begin(of_files), std::end(of_files), error.code) != std::end(of_files), "an error of a file's, not",
          code_name(error.code) + ": " + error.message);
  promise(error.message.find(file.string()) != std::string::npos, "the error names the file:", error.message);
  const ErrorPtr crossed(to_abi(error));
  const std::string_view text{crossed->message.data, crossed->message.size_bytes};
  promise(is_utf8(text), "the error's text is UTF-8:", text);
}

std::vector<uint8_t> data_of(const stg_tensor& tensor) {
  std::vector<uint8_t> bytes(static_cast<uint64_t>(numel(tensor.view)) * element_size_bytes(tensor.view.dtype));
  if (!bytes.empty()) std::memcpy(bytes.data(), first_element<uint8_t>(tensor.view), bytes.size());
  return bytes;
}

bool has_shape(const stg_tensor& tensor, std::span<const int64_t> shape) {
  return std::ranges::equal(shape_of(tensor.view), shape);
}

void check_equal(const stg_tensor& a, const stg_tensor& b, std::string_view what) {
  promise(same_dtype(a.view.dtype, b.view.dtype) && has_shape(a, shape_of(b.view)) && data_of(a) == data_of(b), what);
}

// --- one function per parser

void run_note(const std::filesystem::path& file) {
  try {
    const DynamicSection dynamic = read_dynamic_section(file);
    promise(dynamic.needed.size() <= 1024, "no more than 1024 libraries are needed");
  } catch (const Error& error) {
    check_error(error, file);
  }
  const nlohmann::json note = read_note(file);
  const PluginNote parts = read_plugin_note(file);
  promise(!parts.name.empty() && parts.name == note["name"].get<std::string>() && parts.min_minor <= parts.max_minor,
          "the note is checked");
}

void check_safetensors(const SafetensorsFile& file) {
  std::vector<TensorPtr> tensors;
  std::vector<NamedTensor> named;
  for (const SafetensorsFile::Entry& entry : file.entries()) {
    tensors.push_back(file.read(entry));
    promise(file.find(entry.name) == &entry, "an entry is found by its name");
    named.push_back({entry.name, &tensors.back()->view});
  }
  static MemoryFile& again = *new MemoryFile;
  std::vector<uint8_t> written;
  write_safetensors(
      [&](const void* data, uint64_t size_bytes) {
        const auto* bytes = static_cast<const uint8_t*>(data);
        written.insert(written.end(), bytes, bytes + size_bytes);
      },
      named, file.metadata());
  const SafetensorsFile copy(Storage().open(again.write(written).string()));
  promise(copy.metadata() == file.metadata() && copy.entries().size() == tensors.size(), "what was written is read again");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const SafetensorsFile::Entry* entry = copy.find(file.entries()[i].name);
    promise(entry != nullptr, "a name is read again");
    check_equal(*copy.read(*entry), *tensors[i], "a tensor is read again");
  }
}

void run_safetensors(const std::filesystem::path& file) { check_safetensors(SafetensorsFile(Storage().open(file.string()))); }

void run_idx(const std::filesystem::path& file) {
  const TensorPtr tensor = read_idx(file);
  promise(tensor->view.num_dims > 0 && is_contiguous(tensor->view), "an IDX file is an array, row-major");
  data_of(*tensor);
}

void run_npy(const std::filesystem::path& file) {
  const NpyHeader header = read_npy_header(file);
  const TensorPtr tensor = read_npy(file);
  promise(has_shape(*tensor, header.shape) && data_of(*tensor).size() == header.data_size_bytes, "the header says the shape");
  std::vector<uint8_t> written;
  for (const char letter : npy_header(tensor->view)) written.push_back(static_cast<uint8_t>(letter));
  const std::vector<uint8_t> data = data_of(*tensor);
  written.insert(written.end(), data.begin(), data.end());
  check_equal(*read_npy(written, "memory"), *tensor, "what was written is read again");
}

void run_npz(const std::filesystem::path& file) {
  const NpzFile archive(file);
  promise(!archive.names().empty(), "an archive has arrays");
  size_t left = 8;  // opening it again for each of thousands of names would be all that is done
  for (const std::string& name : archive.names()) {
    if (left-- == 0) break;
    try {
      data_of(*archive.read(name));
    } catch (const Error& error) {
      check_error(error, file);
    }
  }
}

void run_csv(const std::filesystem::path& file) {
  const CsvTable table = read_csv(file);
  promise(table.names.empty() || table.names.size() == table.columns.size(), "each column has a name, or none has");
  promise(table.is_whole.size() == table.columns.size(), "each column is whole or not");
  for (const auto& column : table.columns) promise(column.size() == table.columns.front().size(), "columns are of one length");
}

constexpr Target all[] = {
    {"note", run_note}, {"safetensors", run_safetensors}, {"idx", run_idx}, {"npy", run_npy}, {"npz", run_npz}, {"csv", run_csv}};

}  // namespace

const std::span<const Target> targets = all;

void run(const Target& target, std::span<const uint8_t> bytes) {
  static MemoryFile& input = *new MemoryFile;
  const std::filesystem::path file = input.write(bytes);
  try {
    target.run(file);
  } catch (const Error& error) {
    check_error(error, file);
  } catch (const std::exception& error) {
    broken("no exception but Error leaves a parser:", error.what());
  }
}

}  // namespace stratagem::fuzz
