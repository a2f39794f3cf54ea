// SPDX-License-Identifier: Apache-2.0
#include "base/npy.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <optional>
#include <string_view>

#include "base/disk.hpp"
#include "base/error.hpp"

namespace stratagem {

namespace {

constexpr std::string_view magic{"\x93NUMPY", 6};
constexpr uint64_t max_npy_header_bytes = 1 << 20;

struct Kind {
  char letter;
  uint8_t code;
  std::array<int, 4> sizes_bytes;
};
constexpr std::array kinds{Kind{'b', STG_DTYPE_BOOL, {1}}, Kind{'i', STG_DTYPE_INT, {1, 2, 4, 8}},
                           Kind{'u', STG_DTYPE_UINT, {1, 2, 4, 8}}, Kind{'f', STG_DTYPE_FLOAT, {2, 4, 8}},
                           Kind{'c', STG_DTYPE_COMPLEX, {8, 16}}};

// The header's dict, in the few words of Python that it is made of. Strict: what NumPy does not write is refused.
class DictReader {
 public:
  DictReader(std::string_view text, const std::string& where) : text_(text), where_(where) {}

  void read(NpyHeader& header) {
    expect('{');
    bool has_descr = false;
    bool has_order = false;
    bool has_shape = false;
    while (!accept('}')) {
      const std::string_view key = quoted();
      expect(':');
      if (key == "descr" && !has_descr) {
        has_descr = read_descr(header);
      } else if (key == "fortran_order" && !has_order) {
        header.is_fortran_order = boolean_word();
        has_order = true;
      } else if (key == "shape" && !has_shape) {
        header.shape = tuple();
        has_shape = true;
      } else {
        fail(concat("the key '", key, "', unknown or twice"));
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_spaces();
    if (at_ != text_.size()) fail("something after the dict");
    if (!has_descr || !has_order || !has_shape) fail("no descr, fortran_order or shape");
  }

 private:
  bool read_descr(NpyHeader& header) {
    skip_spaces();
    if (at_ < text_.size() && text_[at_] == '[') {
      throw invalid_argument(where_, ": an array of structures can't be a tensor; save each field as an array of its own");
    }
    const std::string_view descr = quoted();
    const std::optional<stg_dtype> dtype = dtype_of(descr);
    if (!dtype) {
      throw invalid_argument(where_, ": elements of NumPy's type '", descr,
                             "' can't be a tensor; possible are b1, i1 to i8, u1 to u8, f2, f4, ",
                             "f8, c8 and c16, with any byte order");
    }
    header.dtype = *dtype;
    header.is_swapped = descr[0] == '>';
    return true;
  }

  static std::optional<stg_dtype> dtype_of(std::string_view descr) {
    if (descr.size() < 3 || std::string_view("<>|=").find(descr[0]) == std::string_view::npos) return {};
    const std::string_view digits = descr.substr(2);
    for (const Kind& kind : kinds) {
      for (int size_bytes : kind.sizes_bytes) {
        if (kind.letter != descr[1] || size_bytes == 0 || digits != std::to_string(size_bytes)) continue;
        if (descr[0] == '|' && size_bytes != 1) return {};  // no byte order where one is needed
        return stg_dtype{kind.code, static_cast<uint8_t>(size_bytes * 8), 1};
      }
    }
    return {};
  }

  std::vector<int64_t> tuple() {
    std::vector<int64_t> sizes;
    expect('(');
    while (!accept(')')) {
      sizes.push_back(number());
      if (accept(',')) continue;
      if (sizes.size() == 1) fail("a shape (n) that is no tuple");
      expect(')');
      break;
    }
    return sizes;
  }

  int64_t number() {
    skip_spaces();
    int64_t value = 0;
    const size_t begin = at_;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      if (__builtin_mul_overflow(value, int64_t{10}, &value) ||
          __builtin_add_overflow(value, int64_t{text_[at_] - '0'}, &value)) {
        fail("a size over 2^63");
      }
    }
    if (at_ == begin) fail("a shape that is no tuple of sizes");
    return value;
  }

  bool boolean_word() {
    skip_spaces();
    for (std::string_view word : {"True", "False"}) {
      if (text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        return word == "True";
      }
    }
    fail("a fortran_order that is neither True nor False");
  }

  std::string_view quoted() {
    skip_spaces();
    const char quote = at_ < text_.size() ? text_[at_] : '\0';
    const size_t end = quote == '\'' || quote == '"' ? text_.find(quote, at_ + 1) : std::string_view::npos;
    if (end == std::string_view::npos) fail("no quoted text where one belongs");
    const std::string_view inside = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return inside;
  }

  void expect(char wanted) {
    if (!accept(wanted)) fail(concat("no '", wanted, "' where one belongs"));
  }

  bool accept(char wanted) {
    skip_spaces();
    if (at_ >= text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  void skip_spaces() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
  }

  [[noreturn]] void fail(const std::string& found) const {
    throw data_loss(where_, ": the NPY header is damaged: ", found, " (at character ", at_, " of it)");
  }

  std::string_view text_;
  const std::string& where_;
  size_t at_ = 0;
};

// Where the file's bytes come from: a file, or memory.
struct Source {
  std::string where;
  uint64_t size_bytes;
  std::function<void(uint64_t offset_bytes, void* data, uint64_t size_bytes)> read;
};

Source source_of(std::shared_ptr<disk::OpenFile> file) {
  return {file->path.native(), file->size_bytes, [file](uint64_t offset_bytes, void* data, uint64_t size_bytes) {
            disk::read_exactly(*file, offset_bytes, data, size_bytes);
          }};
}

NpyHeader read_header(const Source& source) {
  std::array<unsigned char, 12> start{};
  const uint64_t num_start = std::min<uint64_t>(source.size_bytes, start.size());
  source.read(0, start.data(), num_start);
  if (num_start < 10 || std::memcmp(start.data(), magic.data(), magic.size()) != 0) {
    throw invalid_argument(source.where, ": not an NPY file (it should begin with \\x93NUMPY)");
  }
  const int major = start[6];
  if (major < 1 || major > 3 || start[7] != 0) {
    throw unimplemented(source.where, ": NPY version ", major, ".", int{start[7]}, "; 1.0, 2.0 and 3.0 are known here");
  }
  const uint64_t text_at = major == 1 ? 10 : 12;
  uint64_t text_bytes = uint64_t{start[8]} | uint64_t{start[9]} << 8;
  if (major > 1) text_bytes |= uint64_t{start[10]} << 16 | uint64_t{start[11]} << 24;
  if (source.size_bytes < text_at || text_bytes > source.size_bytes - text_at || text_bytes > max_npy_header_bytes) {
    throw data_loss(source.where, ": cut off or damaged: an NPY header of ", text_bytes, " bytes is promised, the file has ",
                    source.size_bytes);
  }
  std::string text(text_bytes, '\0');
  source.read(text_at, text.data(), text_bytes);

  NpyHeader header;
  DictReader{text, source.where}.read(header);
  header.data_offset_bytes = text_at + text_bytes;
  if (header.shape.size() > 64)
    throw invalid_argument(source.where, ": ", header.shape.size(), " dimensions; at most 64 are possible");
  const std::optional<uint64_t> expected = checked_size_bytes(header.dtype, header.shape);
  if (!expected) throw data_loss(source.where, ": the NPY header is damaged: its shape needs more than 2^62 bytes");
  header.data_size_bytes = *expected;
  if (const uint64_t found = source.size_bytes - header.data_offset_bytes; found != header.data_size_bytes) {
    throw data_loss(source.where, ": ", header.data_size_bytes, " bytes of data expected, ", found, " found");
  }
  return header;
}

void swap_bytes(stg_dtype dtype, char* data, uint64_t size_bytes) {
  const uint64_t part_bytes = element_size_bytes(dtype) / (dtype.code == STG_DTYPE_COMPLEX ? 2 : 1);
  if (part_bytes == 1) return;
  for (uint64_t at = 0; at < size_bytes; at += part_bytes) std::reverse(data + at, data + at + part_bytes);
}

TensorPtr read_array(const Source& source) {
  const NpyHeader header = read_header(source);
  std::vector<int64_t> stored_shape = header.shape;
  if (header.is_fortran_order) std::reverse(stored_shape.begin(), stored_shape.end());
  TensorPtr tensor = allocate_tensor(header.dtype, stored_shape);
  char* data = first_element<char>(tensor->view);
  source.read(header.data_offset_bytes, data, header.data_size_bytes);
  if (header.is_swapped) swap_bytes(header.dtype, data, header.data_size_bytes);
  if (header.dtype.code == STG_DTYPE_BOOL) {
    // NumPy takes any byte but 0 for true; a tensor's bool must be 0 or 1.
    std::transform(data, data + header.data_size_bytes, data, [](char byte) { return static_cast<char>(byte != 0); });
  }
  if (!header.is_fortran_order || header.shape.size() < 2) return tensor;

  // Column-major data is the row-major data of the transposed array: read it with the strides the other way round.
  std::vector<int64_t> strides = strides_of(tensor->view);
  std::reverse(strides.begin(), strides.end());
  stg_tensor_view transposed = tensor->view;
  std::vector<int64_t> shape = header.shape;
  transposed.shape = shape.data();
  transposed.strides = strides.data();
  return copy_tensor(transposed);
}

}  // namespace

std::string npy_header(const stg_tensor_view& view) {
  char letter = 0;
  for (const Kind& kind : kinds) {
    const bool has_size =
        std::find(kind.sizes_bytes.begin(), kind.sizes_bytes.end(), view.dtype.bits / 8) != kind.sizes_bytes.end();
    if (kind.code == view.dtype.code && has_size && view.dtype.lanes == 1) letter = kind.letter;
  }
  if (letter == 0)
    throw invalid_argument("an NPY file can't hold elements of type ", dtype_name(view.dtype), "; convert them first");
  std::string shape;
  for (int64_t size : shape_of(view)) shape += std::to_string(size) + ", ";
  if (view.num_dims > 1) shape.resize(shape.size() - 2);
  if (view.num_dims == 1) shape.resize(shape.size() - 1);
  const uint64_t size_bytes = element_size_bytes(view.dtype);
  std::string text = concat("{'descr': '", size_bytes == 1 ? '|' : '<', letter, size_bytes,
                            "', 'fortran_order': False, 'shape': (", shape, "), }");
  // The data starts at a multiple of 64 bytes; the last character is a line's end.
  constexpr uint64_t fixed_bytes = 10;
  text.append(63 - (fixed_bytes + text.size()) % 64, ' ').push_back('\n');
  std::string out{magic};
  out.append({'\x01', '\x00', static_cast<char>(text.size() & 0xFF), static_cast<char>(text.size() >> 8)});
  return out + text;
}

NpyHeader read_npy_header(const std::filesystem::path& path) {
  return read_header(source_of(std::make_shared<disk::OpenFile>(disk::open_for_reading(path))));
}

TensorPtr read_npy(const std::filesystem::path& path) {
  return read_array(source_of(std::make_shared<disk::OpenFile>(disk::open_for_reading(path))));
}

TensorPtr read_npy(std::span<const uint8_t> file, const std::string& where) {
  return read_array({where, file.size(), [file](uint64_t offset_bytes, void* data, uint64_t size_bytes) {
                       if (size_bytes != 0) std::memcpy(data, file.data() + offset_bytes, size_bytes);
                     }});
}

void write_npy(const std::filesystem::path& path, const stg_tensor_view& tensor) {
  const std::string header = npy_header(tensor);
  const TensorPtr row_major = is_contiguous(tensor) ? nullptr : copy_tensor(tensor);
  const uint64_t size_bytes = static_cast<uint64_t>(numel(tensor)) * element_size_bytes(tensor.dtype);
  const char* data = size_bytes == 0 ? "" : first_element<char>(row_major == nullptr ? tensor : row_major->view);
  disk::replace_file(path, {header, {data, size_bytes}});
}

}  // namespace stratagem
