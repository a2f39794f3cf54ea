// SPDX-License-Identifier: Apache-2.0
#include "base/safetensors.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>
#include <unordered_set>

#include "base/checksum.hpp"
#include "base/error.hpp"
#include "base/json.hpp"

namespace stratagem {

namespace {

static_assert(std::endian::native == std::endian::little, "the format's numbers are little-endian");

using Json = nlohmann::ordered_json;
using Entry = SafetensorsFile::Entry;

constexpr uint64_t length_bytes = 8;
constexpr uint64_t max_header_bytes = 100'000'000;  // of the format
constexpr char metadata_key[] = "__metadata__";

struct Name {
  const char* text;
  stg_dtype dtype;
};
constexpr std::array dtype_names{
    Name{"BOOL", {STG_DTYPE_BOOL, 8, 1}},    Name{"U8", {STG_DTYPE_UINT, 8, 1}},     Name{"I8", {STG_DTYPE_INT, 8, 1}},
    Name{"U16", {STG_DTYPE_UINT, 16, 1}},    Name{"I16", {STG_DTYPE_INT, 16, 1}},    Name{"F16", {STG_DTYPE_FLOAT, 16, 1}},
    Name{"BF16", {STG_DTYPE_BFLOAT, 16, 1}}, Name{"U32", {STG_DTYPE_UINT, 32, 1}},   Name{"I32", {STG_DTYPE_INT, 32, 1}},
    Name{"F32", {STG_DTYPE_FLOAT, 32, 1}},   Name{"U64", {STG_DTYPE_UINT, 64, 1}},   Name{"I64", {STG_DTYPE_INT, 64, 1}},
    Name{"F64", {STG_DTYPE_FLOAT, 64, 1}},   Name{"C64", {STG_DTYPE_COMPLEX, 64, 1}}};

std::string known_dtypes() {
  std::vector<std::string> names;
  for (const Name& name : dtype_names) names.emplace_back(name.text);
  return join(names);
}

// --- writing

const char* dtype_text(const NamedTensor& named) {
  for (const Name& name : dtype_names) {
    if (same_dtype(name.dtype, named.tensor->dtype)) return name.text;
  }
  throw invalid_argument("the tensor ", named.name, " can't be written to a safetensors file: its elements are ",
                         dtype_name(named.tensor->dtype), "; possible are ", known_dtypes());
}

uint64_t size_bytes_of(const stg_tensor_view& view) {
  return static_cast<uint64_t>(numel(view)) * element_size_bytes(view.dtype);
}

void check_writable(const std::vector<NamedTensor>& tensors) {
  std::unordered_set<std::string_view> names;
  for (const NamedTensor& named : tensors) {
    if (named.name == metadata_key)
      throw invalid_argument("a tensor can't have the name ", metadata_key, " in a safetensors file");
    if (!names.insert(named.name).second) throw invalid_argument("two tensors have the name ", named.name);
    const uint32_t kind = named.tensor->device.kind;
    if (kind != STG_DEVICE_CPU && kind != STG_DEVICE_CUDA_HOST) {
      throw invalid_argument("the tensor ", named.name, " is on ", device_name(named.tensor->device),
                             "; only host memory can be written");
    }
  }
}

// Which tensor comes when in the data.
std::vector<size_t> data_order(const std::vector<NamedTensor>& tensors) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return element_size_bytes(tensors[a].tensor->dtype) > element_size_bytes(tensors[b].tensor->dtype);
  });
  return order;
}

// The length and the header, filled up with spaces so that the data starts at a multiple of 8 bytes.
std::string header_bytes(const std::vector<NamedTensor>& tensors, const std::vector<size_t>& order,
                         const std::map<std::string, std::string>& metadata) {
  std::vector<std::array<uint64_t, 2>> offsets(tensors.size());
  uint64_t end = 0;
  for (size_t i : order) {
    offsets[i][0] = end;
    end += size_bytes_of(*tensors[i].tensor);
    offsets[i][1] = end;
  }
  Json header = Json::object();
  if (!metadata.empty()) header[metadata_key] = metadata;
  // Not operator[]: an ordered object searches from the front for each key.
  auto& object = header.get_ref<Json::object_t&>();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto shape = shape_of(*tensors[i].tensor);
    Json entry = {{"dtype", dtype_text(tensors[i])}, {"shape", Json::array()}, {"data_offsets", offsets[i]}};
    for (int64_t size : shape) entry["shape"].push_back(size);
    object.emplace_back(tensors[i].name, std::move(entry));
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception& error) {
    throw invalid_argument("the names or the metadata of a safetensors file must be UTF-8: ", error.what());
  }
  text.append((length_bytes - text.size() % length_bytes) % length_bytes, ' ');
  if (text.size() > max_header_bytes) {
    throw invalid_argument("a safetensors header of ", text.size(), " bytes is over the format's limit of ", max_header_bytes);
  }
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), length_bytes) + text;
}

// --- reading

class HeaderReader {
 public:
  HeaderReader(const std::string& path, uint64_t header_size_bytes, uint64_t file_size_bytes)
      : path_(path), data_at_(length_bytes + header_size_bytes), data_size_bytes_(file_size_bytes - data_at_) {}

  Entry entry(const std::string& name, const Json& value) const {
    if (!value.is_object() || value.size() != 3) fail(name, "is no object of dtype, shape and data_offsets");
    Entry out;
    out.name = name;
    out.dtype = dtype(name, need(name, value, "dtype"));
    for (uint64_t size : numbers(name, need(name, value, "shape"), "shape")) out.shape.push_back(static_cast<int64_t>(size));
    const std::vector<uint64_t> offsets = numbers(name, need(name, value, "data_offsets"), "data_offsets");
    if (offsets.size() != 2 || offsets[0] > offsets[1]) fail(name, concat("has data_offsets that are no [begin, end]"));
    out.size_bytes = offsets[1] - offsets[0];
    out.offset_bytes = data_at_ + offsets[0];
    if (out.shape.size() > 64) fail(name, concat("has ", out.shape.size(), " dimensions; at most 64 are possible"));
    if (checked_size_bytes(out.dtype, out.shape) != out.size_bytes) {
      fail(name,
           concat("is promised ", out.size_bytes, " bytes, which is not what its shape of ", dtype_name(out.dtype), " needs"));
    }
    return out;
  }

  // The data must be covered from its first byte to its last, each once.
  void check_coverage(const std::vector<Entry>& entries) const {
    std::vector<const Entry*> sorted;
    for (const Entry& entry : entries) sorted.push_back(&entry);
    std::sort(sorted.begin(), sorted.end(), [](const Entry* a, const Entry* b) {
      return std::pair{a->offset_bytes, a->size_bytes} < std::pair{b->offset_bytes, b->size_bytes};
    });
    uint64_t end = 0;
    for (const Entry* entry : sorted) {
      const uint64_t begin = entry->offset_bytes - data_at_;
      if (begin != end) fail(entry->name, concat("begins at byte ", begin, " of the data; the one before it ends at ", end));
      end = begin + entry->size_bytes;
    }
    if (end != data_size_bytes_) {
      throw data_loss(path_, " is damaged or cut off: its header promises ", end, " bytes of data, ", data_size_bytes_,
                      " are there");
    }
  }

  std::map<std::string, std::string> metadata(const Json& value) const {
    std::map<std::string, std::string> out;
    if (!value.is_object()) fail(metadata_key, "is no object");
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) fail(metadata_key, concat("has a value for ", key, " that is no text"));
      out[key] = text.get<std::string>();
    }
    return out;
  }

 private:
  const Json& need(const std::string& name, const Json& object, const char* key) const {
    const auto found = object.find(key);
    if (found == object.end()) fail(name, concat("has no ", key));
    return *found;
  }

  stg_dtype dtype(const std::string& name, const Json& value) const {
    if (!value.is_string()) fail(name, "has a dtype that is no text");
    for (const Name& known : dtype_names) {
      if (value.get_ref<const std::string&>() == known.text) return known.dtype;
    }
    throw unimplemented(path_, ": ", name, " has elements of type ", value.get<std::string>(), "; known here are ",
                        known_dtypes());
  }

  std::vector<uint64_t> numbers(const std::string& name, const Json& value, const char* key) const {
    const bool fits = value.is_array() && std::all_of(value.begin(), value.end(), [](const Json& item) {
                        return item.is_number_unsigned() && item.get<uint64_t>() <= uint64_t{1} << 62;
                      });
    if (!fits) fail(name, concat("has a ", key, " that is no list of numbers from 0 to 2^62"));
    return value.get<std::vector<uint64_t>>();
  }

  [[noreturn]] void fail(const std::string& name, const std::string& problem) const {
    throw data_loss(path_, ": the safetensors header is damaged: ", name, " ", problem);
  }

  const std::string& path_;
  uint64_t data_at_;
  uint64_t data_size_bytes_;
};

std::string read_header(const StorageFile& file) {
  if (file.size_bytes() < length_bytes) {
    throw data_loss(file.path(), " is no safetensors file or cut off: ", file.size_bytes(), " bytes, at least ", length_bytes,
                    " are needed");
  }
  uint64_t length = 0;
  file.read(0, &length, length_bytes);
  if (length > max_header_bytes || length > file.size_bytes() - length_bytes) {
    throw data_loss(file.path(), " is no safetensors file or cut off: it promises a header of ", length, " bytes, the file has ",
                    file.size_bytes(),
                    length > max_header_bytes ? concat(" (the format's limit is ", max_header_bytes, ")") : "");
  }
  std::string header(length, '\0');
  file.read(length_bytes, header.data(), length);
  if (header.empty() || header[0] != '{')
    throw data_loss(file.path(), " is no safetensors file: its header does not begin with {");
  return header;
}

void parse_header(const StorageFile& file, const std::string& text, const TakeEntry<Json>& take) {
  try {
    parse_json<Json>(text, concat(file.path(), ": the safetensors header"), {.max_depth = 3}, take);
  } catch (Error& error) {
    if (error.code == STG_INVALID_ARGUMENT) error.code = STG_DATA_LOSS;  // the file's fault, not the caller's
    throw;
  }
}

}  // namespace

WrittenFile write_safetensors(Transaction& transaction, const std::string& file, const std::vector<NamedTensor>& tensors,
                              const std::map<std::string, std::string>& metadata) {
  uint64_t offset_bytes = 0;
  const auto append = [&](const void* data, uint64_t size_bytes) {
    transaction.write(file, offset_bytes, data, size_bytes);
    offset_bytes += size_bytes;
  };
  return write_safetensors(append, tensors, metadata);
}

WrittenFile write_safetensors(const std::function<void(const void*, uint64_t)>& write, const std::vector<NamedTensor>& tensors,
                              const std::map<std::string, std::string>& metadata) {
  check_writable(tensors);
  const std::vector<size_t> order = data_order(tensors);
  WrittenFile written;
  Checksum checksum;
  const auto append = [&](const void* data, uint64_t size_bytes) {
    write(data, size_bytes);
    checksum.add(data, size_bytes);
    written.size_bytes += size_bytes;
  };
  const std::string header = header_bytes(tensors, order, metadata);
  append(header.data(), header.size());
  for (size_t i : order) {
    const stg_tensor_view& view = *tensors[i].tensor;
    if (size_bytes_of(view) == 0) continue;
    const TensorPtr row_major = is_contiguous(view) ? nullptr : copy_tensor(view);
    append(first_element<>(row_major == nullptr ? view : row_major->view), size_bytes_of(view));
  }
  written.checksum = checksum.text();
  return written;
}

SafetensorsFile::SafetensorsFile(StorageFile file) : file_(std::move(file)) {
  const std::string text = read_header(file_);
  const HeaderReader reader{file_.path(), text.size(), file_.size_bytes()};
  parse_header(file_, text, [&](const std::string& name, const Json& value) {
    if (name == metadata_key) {
      metadata_ = reader.metadata(value);
    } else {
      entries_.push_back(reader.entry(name, value));
    }
  });
  reader.check_coverage(entries_);
  for (const Entry& entry : entries_) by_name_[entry.name] = &entry;
}

const Entry* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

TensorPtr SafetensorsFile::read(const Entry& entry) const {
  TensorPtr tensor = allocate_tensor(entry.dtype, entry.shape);
  auto* data = first_element<unsigned char>(tensor->view);
  file_.read(entry.offset_bytes, data, entry.size_bytes);
  if (entry.dtype.code == STG_DTYPE_BOOL &&
      std::any_of(data, data + entry.size_bytes, [](unsigned char byte) { return byte > 1; })) {
    throw data_loss(path(), " is damaged: the bool tensor ", entry.name, " has bytes that are neither 0 nor 1");
  }
  return tensor;
}

}  // namespace stratagem
