// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/data/bytes.hpp"

#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <new>

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

// Not by zlib's gzread, which takes whatever follows a gzip stream for nothing.
struct ByteReader::Stream {
  std::ifstream in;
  bool compressed = false;
  bool within = false;  // a gzip stream has begun and not ended
  std::vector<char> buffer = std::vector<char>(chunk_bytes / 4);
  z_stream zlib{};
};

ByteReader::ByteReader(const std::filesystem::path& file) : path_(file), stream_(std::make_unique<Stream>()) {
  stream_->in.open(file, std::ios::binary);
  if (!stream_->in) throw invalid_argument("can't read ", file.string(), ": ", std::strerror(errno));
  stream_->compressed = is_gzip(file);
  constexpr int gzip_only = 16;
  if (inflateInit2(&stream_->zlib, MAX_WBITS + gzip_only) != Z_OK) throw std::bad_alloc();
}

ByteReader::~ByteReader() { inflateEnd(&stream_->zlib); }

/// More of the file into the buffer. Returns whether there was any.
bool ByteReader::fill() {
  std::ifstream& in = stream_->in;
  in.read(stream_->buffer.data(), static_cast<std::streamsize>(stream_->buffer.size()));
  if (in.bad()) throw invalid_argument("can't read ", path_.string(), ": ", std::strerror(errno));
  stream_->zlib.next_in = reinterpret_cast<Bytef*>(stream_->buffer.data());
  stream_->zlib.avail_in = static_cast<unsigned>(in.gcount());
  return in.gcount() != 0;
}

uint64_t ByteReader::inflate_some(void* into, unsigned size_bytes) {
  z_stream& zlib = stream_->zlib;
  zlib.next_out = static_cast<Bytef*>(into);
  zlib.avail_out = size_bytes;
  while (zlib.avail_out == size_bytes) {
    if (zlib.avail_in == 0 && !fill()) {
      if (stream_->within) throw data_loss(path_.string(), " is a damaged or truncated gzip file: it ends too early");
      break;
    }
    stream_->within = true;
    const int code = inflate(&zlib, Z_NO_FLUSH);
    if (code == Z_STREAM_END) {
      stream_->within = false;
      inflateReset(&zlib);
    } else if (code != Z_OK && code != Z_BUF_ERROR) {
      throw data_loss(path_.string(), " is a damaged or truncated gzip file, or there is something behind it: ",
                      zlib.msg == nullptr ? "out of memory" : zlib.msg);
    }
  }
  return size_bytes - zlib.avail_out;
}

uint64_t ByteReader::read_some(void* into, unsigned size_bytes) {
  if (stream_->compressed) return inflate_some(into, size_bytes);
  stream_->in.read(static_cast<char*>(into), size_bytes);
  if (stream_->in.bad()) throw invalid_argument("can't read ", path_.string(), ": ", std::strerror(errno));
  return static_cast<uint64_t>(stream_->in.gcount());
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
