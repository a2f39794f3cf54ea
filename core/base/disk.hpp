// SPDX-License-Identifier: Apache-2.0
//
// What files on the local disk need beyond std::filesystem: errors that say errno's text and the whole path, positioned reads and
// writes, fsync, and names that appear whole or not at all.
//
// Something new is made beside its target as `.<name>.tmp-<pid>-<n>` and holds a flock while its maker lives; the kernel drops the
// lock with the process, however it ends. So a temporary that can be locked is a leftover (a process id alone could have been given
// to another process, or mean nothing in this container), and remove_leftovers() may take it away.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace stratagem::disk {

/// "can't <action> <absolute path>: <errno's text>", with the code that fits `error_number`.
Error errno_error(int error_number, std::string_view action, const std::filesystem::path& path);

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int number) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~FileDescriptor();

  int number() const { return number_; }

 private:
  int number_ = -1;
};

struct OpenFile {
  std::filesystem::path path;
  FileDescriptor descriptor;
  uint64_t size_bytes = 0;
};

/// Opens a regular file for reading; anything else (a folder, a pipe) is refused.
OpenFile open_for_reading(const std::filesystem::path& path);
/// STG_DATA_LOSS with both numbers if the file is shorter.
void read_exactly(const OpenFile& file, uint64_t offset_bytes, void* data, uint64_t size_bytes);
void write_all(int file, const std::filesystem::path& path, uint64_t offset_bytes, const void* data, uint64_t size_bytes);

void sync(int file, const std::filesystem::path& path);
void sync_folder(const std::filesystem::path& folder);
/// Makes the folder and those above it that are missing, durably.
void make_folders(const std::filesystem::path& folder);

/// A file or folder under a temporary name beside its target. The descriptor holds the lock.
struct Temporary {
  std::filesystem::path path;
  FileDescriptor descriptor;
};
Temporary make_temporary_file(const std::filesystem::path& target);
Temporary make_temporary_folder(const std::filesystem::path& target);
bool is_temporary_name(std::string_view name);

/// Gives `folder` the name `target`, durably. A folder of that name is replaced and removed; until then, and on an error, it
/// stands.
void move_folder_into_place(const std::filesystem::path& folder, const std::filesystem::path& target);
/// The same in two renames, for file systems that can't exchange two names in one: between them there is no `target`; whoever
/// calls remove_leftovers after a crash in between gets the old one back.
void replace_folder_in_two_steps(const std::filesystem::path& folder, const std::filesystem::path& target);

/// A file that gets its name, durably, when it is whole; until then, and if it never is, what has that name stands.
class NewFile {
 public:
  explicit NewFile(std::filesystem::path target);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  /// Where it is now, for a library that writes it itself.
  const std::filesystem::path& path() const { return file_.path; }
  void append(const void* data, uint64_t size_bytes);
  void commit();

 private:
  std::filesystem::path target_;
  Temporary file_;
  uint64_t size_bytes_ = 0;
  bool is_committed_ = false;
};

/// Writes `parts` one after the other as the new content of the file `target`: whole or not at all, durably.
void replace_file(const std::filesystem::path& target, const std::vector<std::string_view>& parts);
/// Removes a file or a folder; a folder disappears from its name as a whole. Nothing there is no error.
void remove(const std::filesystem::path& path);

/// Removes what ended processes left in `folder` and puts back what they had moved aside. Returns the names that were there.
/// Where the file system can't lock (some network ones), nothing is touched.
std::vector<std::string> remove_leftovers(const std::filesystem::path& folder);

}  // namespace stratagem::disk
