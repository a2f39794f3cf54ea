// SPDX-License-Identifier: Apache-2.0
#include "base/disk.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <limits>
#include <optional>
#include <system_error>

namespace stratagem::disk {

namespace fs = std::filesystem;

namespace {

uint32_t code_of(int error_number) {
  switch (error_number) {
    case ENOENT:
      return STG_NOT_FOUND;
    case EEXIST:
      return STG_ALREADY_EXISTS;
    case EACCES:
    case EPERM:
    case EROFS:
      return STG_PERMISSION_DENIED;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      return STG_RESOURCE_EXHAUSTED;
    case EINVAL:
    case EISDIR:
    case ENOTDIR:
    case ELOOP:
    case ENAMETOOLONG:
      return STG_INVALID_ARGUMENT;
    default:
      return STG_UNKNOWN;
  }
}

// Positions are off_t: signed.
void check_range(const fs::path& path, uint64_t offset_bytes, const void* data, uint64_t size_bytes) {
  constexpr auto limit = static_cast<uint64_t>(std::numeric_limits<off_t>::max());
  if (offset_bytes > limit || size_bytes > limit - offset_bytes) {
    throw invalid_argument(size_bytes, " bytes at offset ", offset_bytes, " of ", fs::absolute(path).native(),
                           " reach over 2^63 bytes");
  }
  if (data == nullptr && size_bytes != 0) {
    throw invalid_argument("a null pointer for ", size_bytes, " bytes of ", fs::absolute(path).native());
  }
}

fs::path parent_of(const fs::path& path) { return fs::absolute(path).parent_path(); }

fs::path name_beside(const fs::path& target, const char* kind) {
  static std::atomic<uint64_t> counter{0};
  return parent_of(target) / concat(".", target.filename().native(), ".", kind, "-", getpid(), "-", counter++);
}

enum class Lock { held, taken, unknown };

// Whether `descriptor` now holds the lock of what stands under `path`.
Lock try_lock(const FileDescriptor& descriptor, const fs::path& path) {
  if (flock(descriptor.number(), LOCK_EX | LOCK_NB) != 0) return errno == EWOULDBLOCK ? Lock::taken : Lock::unknown;
  struct stat opened {};
  struct stat named {};
  if (fstat(descriptor.number(), &opened) != 0 || lstat(path.c_str(), &named) != 0) return Lock::taken;
  return opened.st_dev == named.st_dev && opened.st_ino == named.st_ino ? Lock::held : Lock::taken;
}

// Makes something new by `create` (0, or -1 with errno) under the first free name, open and locked. Between making and locking, a
// cleaner may have taken it for a leftover: then the next name is tried.
template <class Create>
Temporary make_temporary(const fs::path& target, int open_flags, const Create& create) {
  for (;;) {
    Temporary made{name_beside(target, "tmp"), {}};
    if (create(made.path.c_str()) != 0) {
      if (errno == EEXIST) continue;
      throw errno_error(errno, "create", made.path);
    }
    made.descriptor = FileDescriptor{open(made.path.c_str(), open_flags | O_CLOEXEC)};
    if (made.descriptor.number() < 0) {
      if (errno == ENOENT) continue;
      const Error error = errno_error(errno, "open", made.path);
      ::remove(made.path.c_str());
      throw error;
    }
    if (try_lock(made.descriptor, made.path) != Lock::taken) return made;
  }
}

// The parts of `.<target>.tmp-<pid>-<n>` or `.<target>.old-<pid>-<n>`.
struct TemporaryName {
  std::string target;
  bool is_old = false;
};

std::optional<TemporaryName> parse_temporary_name(std::string_view name) {
  for (int number = 0; number < 2; ++number) {
    const size_t dash = name.find_last_not_of("0123456789");
    if (dash == std::string_view::npos || dash + 1 == name.size() || name[dash] != '-') return {};
    name = name.substr(0, dash);
  }
  const bool is_old = name.ends_with(".old");
  if ((!is_old && !name.ends_with(".tmp")) || name.size() < 6 || name.front() != '.') return {};
  return TemporaryName{std::string(name.substr(1, name.size() - 5)), is_old};
}

void rename_to(const fs::path& from, const fs::path& to) {
  if (rename(from.c_str(), to.c_str()) != 0) throw errno_error(errno, concat("rename ", from.native(), " to"), to);
}

// Removes the content of something whose name nobody looks for any more; what can't be removed stays as a leftover.
void remove_quietly(const fs::path& path) noexcept {
  std::error_code ignored;
  fs::remove_all(path, ignored);
}

bool is_folder(const fs::path& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

bool is_there(const fs::path& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0;
}

bool exchange(const fs::path& a, const fs::path& b) {
  return renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
}

}  // namespace

Error errno_error(int error_number, std::string_view action, const fs::path& path) {
  std::error_code no_working_directory;
  const fs::path absolute = fs::absolute(path, no_working_directory);
  return {code_of(error_number), concat("can't ", action, " ", (no_working_directory ? path : absolute).native(), ": ",
                                        std::generic_category().message(error_number))};
}

FileDescriptor::~FileDescriptor() {
  if (number_ >= 0) close(number_);
}

OpenFile open_for_reading(const fs::path& path) {
  // Not blocking: opening a pipe would wait for a writer.
  OpenFile file{fs::absolute(path), FileDescriptor{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)}};
  struct stat status {};
  if (file.descriptor.number() < 0 || fstat(file.descriptor.number(), &status) != 0) throw errno_error(errno, "open", path);
  if (!S_ISREG(status.st_mode)) {
    throw invalid_argument("can't read ", file.path.native(), ": it is ",
                           S_ISDIR(status.st_mode) ? "a folder" : "no regular file");
  }
  file.size_bytes = static_cast<uint64_t>(status.st_size);
  return file;
}

void read_exactly(const OpenFile& file, uint64_t offset_bytes, void* data, uint64_t size_bytes) {
  check_range(file.path, offset_bytes, data, size_bytes);
  uint64_t num_done = 0;
  while (num_done < size_bytes) {
    const ssize_t got = pread(file.descriptor.number(), static_cast<char*>(data) + num_done, size_bytes - num_done,
                              static_cast<off_t>(offset_bytes + num_done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw errno_error(errno, "read", file.path);
    if (got == 0) {
      throw data_loss(file.path.native(), " is too short: ", size_bytes, " bytes wanted at offset ", offset_bytes, ", ", num_done,
                      " there");
    }
    num_done += static_cast<uint64_t>(got);
  }
}

void write_all(int file, const fs::path& path, uint64_t offset_bytes, const void* data, uint64_t size_bytes) {
  check_range(path, offset_bytes, data, size_bytes);
  uint64_t num_done = 0;
  while (num_done < size_bytes) {
    const ssize_t put = pwrite(file, static_cast<const char*>(data) + num_done, size_bytes - num_done,
                               static_cast<off_t>(offset_bytes + num_done));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw errno_error(errno, "write", path);
    num_done += static_cast<uint64_t>(put);
  }
}

void sync(int file, const fs::path& path) {
  if (fsync(file) != 0) throw errno_error(errno, "sync", path);
}

void sync_folder(const fs::path& folder) {
  const FileDescriptor descriptor{open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  if (descriptor.number() < 0) throw errno_error(errno, "open", folder);
  sync(descriptor.number(), folder);
}

void make_folders(const fs::path& folder) {
  if (mkdir(folder.c_str(), 0777) == 0) {
    sync_folder(parent_of(folder));
    return;
  }
  if (errno == ENOENT && folder.has_parent_path() && folder != folder.root_path()) {
    make_folders(folder.parent_path());
    if (mkdir(folder.c_str(), 0777) == 0) return sync_folder(parent_of(folder));
  }
  const int error_number = errno;
  if (error_number == EEXIST && fs::is_directory(folder)) return;
  throw errno_error(error_number == EEXIST ? ENOTDIR : error_number, "create the folder", folder);
}

Temporary make_temporary_file(const fs::path& target) {
  return make_temporary(target, O_RDWR, [](const char* path) {
    const FileDescriptor made{open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666)};
    return made.number() < 0 ? -1 : 0;
  });
}

Temporary make_temporary_folder(const fs::path& target) {
  return make_temporary(target, O_RDONLY | O_DIRECTORY, [](const char* path) { return mkdir(path, 0777); });
}

bool is_temporary_name(std::string_view name) { return parse_temporary_name(name).has_value(); }

void move_folder_into_place(const fs::path& folder, const fs::path& target) {
  for (;;) {
    // Replaces nothing but an empty folder.
    if (rename(folder.c_str(), target.c_str()) == 0) return sync_folder(parent_of(target));
    if (errno == ENOTDIR) {
      throw Error{STG_ALREADY_EXISTS, concat("can't replace ", fs::absolute(target).native(), " by a folder: it is none")};
    }
    if (errno != ENOTEMPTY && errno != EEXIST) throw errno_error(errno, concat("rename ", folder.native(), " to"), target);
    if (exchange(folder, target)) break;
    if (errno == ENOENT) continue;  // somebody removed it just now
    if (errno == EINVAL || errno == ENOSYS || errno == EXDEV) return replace_folder_in_two_steps(folder, target);
    throw errno_error(errno, concat("exchange ", folder.native(), " with"), target);
  }
  try {
    sync_folder(parent_of(target));
  } catch (...) {
    exchange(folder, target);
    throw;
  }
  remove_quietly(folder);
}

void replace_folder_in_two_steps(const fs::path& folder, const fs::path& target) {
  const fs::path aside = name_beside(target, "old");
  const FileDescriptor lock{open(target.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  if (lock.number() >= 0) flock(lock.number(), LOCK_EX | LOCK_NB);
  rename_to(target, aside);
  try {
    rename_to(folder, target);
    sync_folder(parent_of(target));
  } catch (...) {
    if (is_there(target)) static_cast<void>(rename(target.c_str(), folder.c_str()));
    static_cast<void>(rename(aside.c_str(), target.c_str()));
    throw;
  }
  remove_quietly(aside);
}

NewFile::NewFile(fs::path target) : target_(std::move(target)), file_(make_temporary_file(target_)) {}

NewFile::~NewFile() {
  if (!is_committed_) remove_quietly(file_.path);
}

void NewFile::append(const void* data, uint64_t size_bytes) {
  write_all(file_.descriptor.number(), target_, size_bytes_, data, size_bytes);
  size_bytes_ += size_bytes;
}

void NewFile::commit() {
  sync(file_.descriptor.number(), target_);
  rename_to(file_.path, target_);
  is_committed_ = true;
  sync_folder(parent_of(target_));
}

void replace_file(const fs::path& target, const std::vector<std::string_view>& parts) {
  NewFile file(target);
  for (const std::string_view part : parts) file.append(part.data(), part.size());
  file.commit();
}

void remove(const fs::path& path) {
  fs::path doomed = path;
  if (is_folder(path)) {
    // Not file by file under its own name: killed in between, half a checkpoint would be left.
    doomed = name_beside(path, "tmp");
    if (rename(path.c_str(), doomed.c_str()) != 0) {
      if (errno == ENOENT) return;  // somebody else removed it just now
      throw errno_error(errno, concat("rename ", path.native(), " to"), doomed);
    }
    sync_folder(parent_of(path));
  }
  // Another process that clears leftovers may remove the same, and then what it took is not found.
  std::error_code error;
  do {
    fs::remove_all(doomed, error);
  } while (error == std::errc::no_such_file_or_directory && is_there(doomed));
  if (error && error != std::errc::no_such_file_or_directory) throw errno_error(error.value(), "remove", doomed);
}

std::vector<std::string> remove_leftovers(const fs::path& folder) {
  std::vector<std::string> found;
  std::error_code error;
  for (fs::directory_iterator it{folder, error}; !error && it != fs::directory_iterator{}; it.increment(error)) {
    const std::string name = it->path().filename().native();
    const std::optional<TemporaryName> parts = parse_temporary_name(name);
    if (!parts) continue;
    const FileDescriptor descriptor{open(it->path().c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW)};
    if (descriptor.number() < 0 || try_lock(descriptor, it->path()) != Lock::held) continue;
    const fs::path target = folder / parts->target;
    const bool put_back = parts->is_old && !is_there(target) && rename(it->path().c_str(), target.c_str()) == 0;
    if (!put_back) remove_quietly(it->path());
    found.push_back(name);
  }
  if (error && error != std::errc::no_such_file_or_directory) throw errno_error(error.value(), "list", folder);
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace stratagem::disk
