// SPDX-License-Identifier: Apache-2.0
//
// The rules for growing structs (abi/stratagem/common.h), once, for everyone: arguments are read into a local of the size that we were
// compiled with, results are written as far as the caller knows them, and missing slots of a function table read as null.
#pragma once

#include <stratagem/common.h>

#include <algorithm>
#include <cstring>

#include "base/error.hpp"

namespace stratagem {

/// Checks a growing struct's pointer and size. Returns the size in bytes that both sides know.
template <class T>
uint64_t known_size_bytes(const T* value, uint64_t min_size_bytes, const char* name) {
  if (value == nullptr) throw invalid_argument(name, " is null");
  const uint64_t size = value->struct_size;
  if (size < min_size_bytes || size > STG_MAX_STRUCT_SIZE_BYTES) {
    throw invalid_argument(name, ".struct_size is ", size, "; expected ", min_size_bytes, " to ", STG_MAX_STRUCT_SIZE_BYTES,
                           " (set it to the size of the struct)");
  }
  return std::min<uint64_t>(size, sizeof(T));
}

/// Reads an argument struct. What the caller's headers lack is zero; a field that we don't know must be zero.
template <class T>
T read_argument(const T* value, uint64_t min_size_bytes, const char* name) {
  T local{};
  std::memcpy(&local, value, known_size_bytes(value, min_size_bytes, name));
  const auto* bytes = reinterpret_cast<const unsigned char*>(value);
  for (uint64_t offset = sizeof(T); offset < value->struct_size; ++offset) {
    if (bytes[offset] != 0) {
      throw unimplemented(name, " has a field at offset ", offset, " that is newer than this library (which knows ", sizeof(T),
                          " bytes); leave it 0, or use a newer one");
    }
  }
  return local;
}

/// Reads a function table: what is past our size is not looked at, and a slot that its size cuts in two is absent.
template <class T>
T read_table(const T* value, uint64_t min_size_bytes, const char* name) {
  static_assert(alignof(T) == sizeof(void*) && sizeof(T) % sizeof(void*) == 0);
  T local{};
  std::memcpy(&local, value, known_size_bytes(value, min_size_bytes, name) / sizeof(void*) * sizeof(void*));
  return local;
}

/// Checks a table of an object that counts its references.
template <class T>
void check_references(const T& table, const char* what) {
  if ((table.retain == nullptr) == (table.release == nullptr)) return;
  throw invalid_argument(what, table.retain == nullptr ? " has release, but no retain" : " has retain, but no release",
                         "; it needs both, or neither where it outlives everything that uses it");
}

/// Writes a result that the caller sized (checked before by known_size_bytes), and tells how much of it was honoured.
template <class T>
void write_result(T* out, T value) {
  const uint64_t size = std::min<uint64_t>(out->struct_size, sizeof(T));
  value.struct_size = size;
  std::memcpy(static_cast<void*>(out), &value, size);
}

/// A struct of ours, zeroed, with its size set.
template <class T>
T sized() {
  T value{};
  value.struct_size = sizeof(T);
  return value;
}

}  // namespace stratagem
