// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/data/idx.hpp"

#include <algorithm>
#include <bit>
#include <optional>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "libstratagem/data/bytes.hpp"

namespace stratagem {
namespace {

std::optional<stg_dtype> dtype_of(uint8_t code) {
  switch (code) {
    case 0x08:
      return uint8;
    case 0x09:
      return stg_dtype{STG_DTYPE_INT, 8, 1};
    case 0x0B:
      return stg_dtype{STG_DTYPE_INT, 16, 1};
    case 0x0C:
      return stg_dtype{STG_DTYPE_INT, 32, 1};
    case 0x0D:
      return float32;
    case 0x0E:
      return float64;
    default:
      return std::nullopt;
  }
}

uint32_t big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

void to_native(std::vector<uint8_t>& data, uint64_t element_bytes) {
  if (std::endian::native == std::endian::big || element_bytes == 1) return;
  for (uint64_t i = 0; i + element_bytes <= data.size(); i += element_bytes) {
    std::reverse(data.begin() + static_cast<int64_t>(i), data.begin() + static_cast<int64_t>(i + element_bytes));
  }
}

struct Header {
  stg_dtype dtype{};
  std::vector<int64_t> shape;
  uint64_t size_bytes = 0;  // of the elements
};

Header read_header(ByteReader& reader, const std::string& name) {
  const std::vector<uint8_t> magic = reader.read(4);
  if (magic.size() < 4) throw data_loss(name, " is no IDX file: it has ", magic.size(), " bytes, its header alone needs 4");
  Header header;
  const auto dtype = dtype_of(magic[2]);
  if (magic[0] != 0 || magic[1] != 0 || !dtype || magic[3] == 0) {
    throw invalid_argument(name, " is no IDX file (nor a gzipped one): it begins with the bytes ", int{magic[0]}, " ",
                           int{magic[1]}, " ", int{magic[2]}, " ", int{magic[3]},
                           "; two zeros, a type (8, 9, 11, 12, 13, 14) and the number of dimensions were expected");
  }
  header.dtype = *dtype;
  const std::vector<uint8_t> sizes = reader.read(uint64_t{4} * magic[3]);
  if (sizes.size() < size_t{4} * magic[3]) throw data_loss(name, " ends within its header");
  if (magic[3] > 64) throw invalid_argument(name, ": ", int{magic[3]}, " dimensions; at most 64 are possible");
  for (size_t i = 0; i < sizes.size(); i += 4) header.shape.push_back(big_endian(&sizes[i]));
  const std::optional<uint64_t> size_bytes = checked_size_bytes(*dtype, header.shape);
  if (!size_bytes) throw invalid_argument(name, ": its header promises more elements than can be counted");
  header.size_bytes = *size_bytes;
  return header;
}

}  // namespace

TensorPtr read_idx(const std::filesystem::path& file) {
  const std::string name = file.string();
  ByteReader reader(file);
  Header header = read_header(reader, name);
  auto data = std::make_shared<std::vector<uint8_t>>(reader.read(header.size_bytes));
  const uint64_t found = data->size() + reader.skip_rest();
  if (found != header.size_bytes) {
    throw data_loss(name, ": ", header.size_bytes, " bytes of elements expected by its header, ", found, " found");
  }
  to_native(*data, element_size_bytes(header.dtype));
  uint8_t* const first = data->data();
  return make_tensor(std::move(data), first, header.dtype, std::move(header.shape));
}

}  // namespace stratagem
