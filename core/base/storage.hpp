// SPDX-License-Identifier: Apache-2.0
//
// Checkpoint storage: the ABI's table over the local disk (LocalStorage), and the C++ face of any table (Storage), the local one or
// a host's own.
//
// What a folder goes through on the local disk:
//   begin     makes `.<name>.tmp-<pid>-<n>` beside it (list does not show it; see disk.hpp for how leftovers are told)
//   write     into files of that folder
//   commit    syncs the files and the folder, puts it in place in one rename (an older folder of that name is exchanged in the same
//             rename and then removed), syncs the folder above
// Killed at any point, the old folder or the new one is there, whole.
#pragma once

#include <stratagem/host.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace stratagem {

/// A storage table over the local disk. Must outlive what was made through its table; any thread.
class LocalStorage {
 public:
  /// With a root, paths must stay inside it: relative and without "..". (Not a fence against symbolic links.) Without one, they are
  /// what the process makes of them: absolute, or relative to the working directory.
  explicit LocalStorage(const std::filesystem::path& root = {});
  LocalStorage(const LocalStorage&) = delete;
  LocalStorage& operator=(const LocalStorage&) = delete;

  const stg_storage* table() const { return &table_; }
  /// The path of the disk for a path of the table.
  std::filesystem::path resolve(stg_string path) const;

 private:
  std::filesystem::path root_;
  stg_storage table_{};
};

class Transaction;
class StorageFile;

/// A storage with exceptions. Copies share the table, which must outlive them and what they make. Any thread.
class Storage {
 public:
  /// Null: the local disk, without a root.
  explicit Storage(const stg_storage* table = nullptr);

  /// A folder that nobody sees until commit.
  Transaction begin(std::string_view path) const;
  StorageFile open(std::string_view path) const;
  /// A whole small file; more than `max_size_bytes` are refused before they are read.
  std::string read_text(std::string_view path, uint64_t max_size_bytes = uint64_t{64} << 20) const;
  /// Sorted.
  std::vector<std::string> list(std::string_view path) const;
  /// Nothing there is no error.
  void remove(std::string_view path) const;
  /// Replaces a small file as a whole.
  void replace(std::string_view path, std::string_view content) const;

 private:
  friend class Transaction;
  friend class StorageFile;
  std::shared_ptr<const stg_storage> table_;
};

/// Rolled back unless committed.
class Transaction {
 public:
  Transaction(Transaction&& other) noexcept;
  Transaction& operator=(Transaction&&) = delete;
  ~Transaction();

  void write(std::string_view name, uint64_t offset_bytes, const void* data, uint64_t size_bytes);
  void write(std::string_view name, std::string_view content) { write(name, 0, content.data(), content.size()); }
  /// Ends the transaction, on success and on an error.
  void commit();

 private:
  friend class Storage;
  Transaction(std::shared_ptr<const stg_storage> table, void* handle) : table_(std::move(table)), handle_(handle) {}
  std::shared_ptr<const stg_storage> table_;  // null once it has ended
  void* handle_;
};

/// A file open for reading.
class StorageFile {
 public:
  StorageFile(StorageFile&& other) noexcept;
  StorageFile& operator=(StorageFile&&) = delete;
  ~StorageFile();

  /// As it was opened: for messages.
  const std::string& path() const { return path_; }
  uint64_t size_bytes() const { return size_bytes_; }
  /// All of them, or STG_DATA_LOSS.
  void read(uint64_t offset_bytes, void* data, uint64_t size_bytes) const;

 private:
  friend class Storage;
  StorageFile(std::shared_ptr<const stg_storage> table, void* handle, uint64_t size_bytes, std::string_view path)
      : table_(std::move(table)), handle_(handle), size_bytes_(size_bytes), path_(path) {}
  std::shared_ptr<const stg_storage> table_;  // null once it was moved from
  void* handle_;
  uint64_t size_bytes_;
  std::string path_;
};

}  // namespace stratagem
