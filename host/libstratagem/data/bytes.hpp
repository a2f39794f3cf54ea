// SPDX-License-Identifier: Apache-2.0
//
// Files as bytes, plain or gzipped: recognised by content, since a compressed file under a plain name is common.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

namespace stratagem {

bool is_gzip(const std::filesystem::path& file);

/// Reads a file from front to back. Memory grows with what is really there, never with what a header promises.
class ByteReader {
 public:
  explicit ByteReader(const std::filesystem::path& file);
  ~ByteReader();
  ByteReader(const ByteReader&) = delete;
  ByteReader& operator=(const ByteReader&) = delete;

  /// Up to `size_bytes` more bytes; fewer only at the end. Throws Error{DATA_LOSS} for a damaged or truncated gzip stream, and for
  /// anything but another one behind it.
  std::vector<uint8_t> read(uint64_t size_bytes);
  /// How many bytes are left; reads and drops them.
  uint64_t skip_rest();

 private:
  struct Stream;
  uint64_t read_some(void* into, unsigned size_bytes);
  uint64_t inflate_some(void* into, unsigned size_bytes);
  bool fill();

  std::filesystem::path path_;
  std::unique_ptr<Stream> stream_;
};

}  // namespace stratagem
