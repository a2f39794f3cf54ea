// SPDX-License-Identifier: Apache-2.0
#include "base/checksum.hpp"

#include <zlib.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "base/error.hpp"

namespace stratagem {

void Checksum::add(const void* data, uint64_t size_bytes) {
  if (size_bytes == 0) return;  // zlib takes a null pointer for "start again"
  crc_ = static_cast<uint32_t>(crc32_z(crc_, static_cast<const unsigned char*>(data), size_bytes));
}

std::string Checksum::text() const {
  char digits[9];
  std::snprintf(digits, sizeof(digits), "%08x", crc_);
  return concat("crc32:", digits);
}

std::string checksum_of(const StorageFile& file) {
  constexpr uint64_t chunk_bytes = 1 << 20;
  std::vector<char> chunk(std::min(chunk_bytes, file.size_bytes()));
  Checksum checksum;
  for (uint64_t at = 0; at < file.size_bytes(); at += chunk.size()) {
    const uint64_t size_bytes = std::min<uint64_t>(chunk.size(), file.size_bytes() - at);
    file.read(at, chunk.data(), size_bytes);
    checksum.add(chunk.data(), size_bytes);
  }
  return checksum.text();
}

void verify_checksum(const StorageFile& file, const std::string& expected) {
  const std::string found = checksum_of(file);
  if (found != expected) throw data_loss(file.path(), " is damaged: its checksum is ", found, "; ", expected, " was written");
}

}  // namespace stratagem
