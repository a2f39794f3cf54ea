// SPDX-License-Identifier: Apache-2.0
//
// Checksums of checkpoint files: a damaged disk or copy is told before its numbers reach a model. CRC-32, as in zlib and gzip; it
// is no defence against somebody who means it.
#pragma once

#include <cstdint>
#include <string>

#include "base/storage.hpp"

namespace stratagem {

/// The checksum of bytes as they pass.
class Checksum {
 public:
  void add(const void* data, uint64_t size_bytes);
  /// "crc32:8 hexadecimal digits".
  std::string text() const;

 private:
  uint32_t crc_ = 0;
};

/// Of a whole file.
std::string checksum_of(const StorageFile& file);
/// STG_DATA_LOSS, with both, if the file's is not `expected`.
void verify_checksum(const StorageFile& file, const std::string& expected);

}  // namespace stratagem
