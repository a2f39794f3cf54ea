// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/data/bytes.hpp"

#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/error.hpp"

namespace stratagem {
namespace {

constexpr unsigned chunk_bytes = 1u << 20;

}  // namespace

bool is_gzip(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  char magic[2] = {};
  in.read(magic, sizeof magic);
  return in.gcount() == sizeof magic && magic[0] == '\x1f' && magic[1] == '\x8b';
}

// zlib's gz functions read a plain file as it is, and tell the two apart by the content.
ByteReader::ByteReader(const std::filesystem::path& file) : path_(file), file_(gzopen(file.c_str(), "rb")) {
  if (file_ == nullptr)
    throw invalid_argument("can't read ", file.string(), ": ", errno == 0 ? "out of memory" : std::strerror(errno));
  gzbuffer(static_cast<gzFile>(file_), chunk_bytes / 4);
}

ByteReader::~ByteReader() { gzclose_r(static_cast<gzFile>(file_)); }

uint64_t ByteReader::read_some(void* into, unsigned size_bytes) {
  auto* const file = static_cast<gzFile>(file_);
  const int got = gzread(file, into, size_bytes);
  int code = Z_OK;
  const char* text = gzerror(file, &code);
  // A stream that stops early is no error of gzread, only of gzerror.
  if (got < 0 || code == Z_BUF_ERROR) {
    if (code == Z_ERRNO) throw invalid_argument("can't read ", path_.string(), ": ", std::strerror(errno));
    throw data_loss(path_.string(), " is a damaged or truncated gzip file: ", text);
  }
  return static_cast<uint64_t>(got);
}

std::vector<uint8_t> ByteReader::read(uint64_t size_bytes) {
  std::vector<uint8_t> data;
  while (data.size() < size_bytes) {
    const uint64_t before = data.size();
    const uint64_t want = std::min<uint64_t>(size_bytes - before, std::max<uint64_t>(chunk_bytes, before));
    data.resize(before + want);
    uint64_t got = 0;
    while (got < want) {
      const uint64_t some =
          read_some(data.data() + before + got, static_cast<unsigned>(std::min<uint64_t>(want - got, 1u << 30)));
      if (some == 0) break;
      got += some;
    }
    data.resize(before + got);
    if (got < want) break;
  }
  return data;
}

uint64_t ByteReader::skip_rest() {
  std::vector<uint8_t> buffer(chunk_bytes);
  uint64_t total = 0;
  while (const uint64_t got = read_some(buffer.data(), chunk_bytes)) total += got;
  return total;
}

}  // namespace stratagem
