// SPDX-License-Identifier: Apache-2.0
#include "base/storage.hpp"

#include <fcntl.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

#include "base/disk.hpp"
#include "base/structs.hpp"
#include "base/value.hpp"

namespace stratagem {

namespace fs = std::filesystem;

namespace {

// --- the local disk behind the table

const LocalStorage& local(void* self) { return *static_cast<const LocalStorage*>(self); }

struct LocalTransaction {
  fs::path target;
  disk::Temporary folder;
  std::mutex mutex;  // files
  std::map<std::string, disk::FileDescriptor, std::less<>> files;

  ~LocalTransaction() {
    std::error_code ignored;  // what can't be removed is a leftover
    if (!folder.path.empty()) fs::remove_all(folder.path, ignored);
  }
};

// A path whose last part is a name: what can be made, replaced or removed.
fs::path resolve_entry(void* self, stg_string path) {
  fs::path resolved = local(self).resolve(path);
  const std::string name = resolved.filename().native();
  if (text_of(path).empty() || name.empty() || name == "." || name == "..") {
    throw invalid_argument("the path \"", text_of(path), "\" does not end in a name");
  }
  if (disk::is_temporary_name(name)) {
    throw invalid_argument("the name \"", name, "\" is of the kind that temporary files are given; use another");
  }
  return resolved;
}

int file_of(LocalTransaction& transaction, std::string_view name) {
  const std::scoped_lock lock{transaction.mutex};
  const auto known = transaction.files.find(name);
  if (known != transaction.files.end()) return known->second.number();
  if (name.empty() || name == "." || name == ".." || name.find('/') != name.npos || name.find('\0') != name.npos) {
    throw invalid_argument("\"", name, "\" can't be a file of the checkpoint ", transaction.target.native(),
                           ": a plain name is needed");
  }
  const fs::path path = transaction.folder.path / name;
  disk::FileDescriptor file{::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)};
  if (file.number() < 0) throw disk::errno_error(errno, "create", path);
  return transaction.files.emplace(name, std::move(file)).first->second.number();
}

stg_error* local_begin(void* self, stg_string path, void** transaction) {
  return guard([&] {
    const fs::path target = resolve_entry(self, path);
    disk::make_folders(target.parent_path());
    auto made = std::make_unique<LocalTransaction>();
    made->folder = disk::make_temporary_folder(target);
    made->target = target;
    *transaction = made.release();
  });
}

stg_error* local_write(void*, void* handle, stg_string name, uint64_t offset_bytes, const void* data, uint64_t size_bytes) {
  return guard([&] {
    auto& transaction = *static_cast<LocalTransaction*>(handle);
    const int number = file_of(transaction, text_of(name));
    disk::write_all(number, transaction.target / text_of(name), offset_bytes, data, size_bytes);
  });
}

stg_error* local_commit(void*, void* handle) {
  return guard([&] {
    const std::unique_ptr<LocalTransaction> transaction{static_cast<LocalTransaction*>(handle)};
    for (const auto& [name, file] : transaction->files) disk::sync(file.number(), transaction->target / name);
    disk::sync(transaction->folder.descriptor.number(), transaction->folder.path);
    disk::move_folder_into_place(transaction->folder.path, transaction->target);
    transaction->folder.path.clear();  // the name may be somebody else's by now
  });
}

void local_rollback(void*, void* handle) { delete static_cast<LocalTransaction*>(handle); }

stg_error* local_open(void* self, stg_string path, void** file, uint64_t* size_bytes) {
  return guard([&] {
    auto opened = std::make_unique<disk::OpenFile>(disk::open_for_reading(local(self).resolve(path)));
    *size_bytes = opened->size_bytes;
    *file = opened.release();
  });
}

stg_error* local_read(void*, void* file, uint64_t offset_bytes, void* data, uint64_t size_bytes) {
  return guard([&] { disk::read_exactly(*static_cast<disk::OpenFile*>(file), offset_bytes, data, size_bytes); });
}

void local_close(void*, void* file) { delete static_cast<disk::OpenFile*>(file); }

stg_error* local_list(void* self, stg_string path, stg_tree* names) {
  return guard([&] {
    const fs::path folder = local(self).resolve(path);
    std::vector<std::string> found;
    std::error_code error;
    for (fs::directory_iterator it{folder, error}; !error && it != fs::directory_iterator{}; it.increment(error)) {
      if (!disk::is_temporary_name(it->path().filename().native())) found.push_back(it->path().filename().native());
    }
    if (error) throw disk::errno_error(error.value(), "list", folder);
    std::sort(found.begin(), found.end());
    List list;
    for (std::string& name : found) list.emplace_back(std::move(name));
    *names = make_tree(std::move(list)).give();
  });
}

stg_error* local_remove(void* self, stg_string path) {
  return guard([&] { disk::remove(resolve_entry(self, path)); });
}

stg_error* local_replace(void* self, stg_string path, const void* data, uint64_t size_bytes) {
  return guard([&] {
    const fs::path target = resolve_entry(self, path);
    if (data == nullptr && size_bytes != 0)
      throw invalid_argument("a null pointer for ", size_bytes, " bytes of ", target.native());
    disk::make_folders(target.parent_path());
    disk::replace_file(target, {{static_cast<const char*>(data), size_bytes}});
  });
}

// --- any table

// The function of a slot; a table may lack any.
template <class Function>
Function need(Function function, const char* name) {
  if (function == nullptr) throw unimplemented("this checkpoint storage has no function `", name, "`");
  return function;
}

}  // namespace

LocalStorage::LocalStorage(const fs::path& root) : root_(root.empty() ? root : fs::absolute(root)) {
  table_ = {sizeof(stg_storage), this,       local_begin, local_write, local_commit, local_rollback,
            local_open,          local_read, local_close, local_list,  local_remove, local_replace};
}

fs::path LocalStorage::resolve(stg_string path) const {
  std::string_view text = text_of(path);
  if (text.find('\0') != text.npos)
    throw invalid_argument("the path \"", text.substr(0, text.find('\0')), "\" has a zero byte in it");
  while (text.size() > 1 && text.back() == '/') text.remove_suffix(1);
  const fs::path given{text};
  if (root_.empty()) return fs::absolute(given.empty() ? fs::path{"."} : given);
  if (given.is_absolute() || std::find(given.begin(), given.end(), "..") != given.end()) {
    throw invalid_argument("the path \"", text, "\" leads out of the storage's folder ", root_.native(),
                           "; give one relative to it");
  }
  return given.empty() ? root_ : root_ / given;
}

Storage::Storage(const stg_storage* table) {
  if (table == nullptr) {
    // Never destroyed: storages may be used while the process ends.
    static const LocalStorage& whole_disk = *new LocalStorage;
    table = whole_disk.table();
  }
  table_ = std::make_shared<const stg_storage>(read_table(table, STG_STORAGE_MIN_SIZE, "stg_storage"));
}

Transaction Storage::begin(std::string_view path) const {
  // All three are needed to end what begins here.
  need(table_->commit, "commit");
  need(table_->rollback, "rollback");
  void* handle = nullptr;
  check(need(table_->begin, "begin")(table_->self, to_abi(path), &handle));
  return {table_, handle};
}

StorageFile Storage::open(std::string_view path) const {
  need(table_->close, "close");
  void* handle = nullptr;
  uint64_t size_bytes = 0;
  check(need(table_->open, "open")(table_->self, to_abi(path), &handle, &size_bytes));
  return {table_, handle, size_bytes, path};
}

std::string Storage::read_text(std::string_view path, uint64_t max_size_bytes) const {
  const StorageFile file = open(path);
  if (file.size_bytes() > max_size_bytes) {
    throw invalid_argument(path, " has ", file.size_bytes(), " bytes; at most ", max_size_bytes, " are read here");
  }
  std::string content(file.size_bytes(), '\0');
  file.read(0, content.data(), content.size());
  return content;
}

std::vector<std::string> Storage::list(std::string_view path) const {
  stg_tree out{};
  check(need(table_->list, "list")(table_->self, to_abi(path), &out));
  const Tree tree{out};
  validate(tree.root(), "names");
  std::vector<std::string> names;
  for (uint32_t i = 0; tree.root().type == STG_LIST && i < tree.root().count; ++i) {
    const stg_value& item = tree.root().as.items[i];
    if (item.type != STG_STRING)
      throw internal("the storage's list of ", path, " has a ", type_name(item.type), " at ", i, "; names are strings");
    names.emplace_back(text_of(item));
  }
  if (tree.root().type != STG_LIST) throw internal("the storage's list of ", path, " is a ", type_name(tree.root().type));
  std::sort(names.begin(), names.end());
  return names;
}

void Storage::remove(std::string_view path) const { check(need(table_->remove, "remove")(table_->self, to_abi(path))); }

void Storage::replace(std::string_view path, std::string_view content) const {
  check(need(table_->replace, "replace")(table_->self, to_abi(path), content.data(), content.size()));
}

Transaction::Transaction(Transaction&& other) noexcept : table_(std::exchange(other.table_, nullptr)), handle_(other.handle_) {}

Transaction::~Transaction() {
  if (table_ != nullptr) table_->rollback(table_->self, handle_);
}

void Transaction::write(std::string_view name, uint64_t offset_bytes, const void* data, uint64_t size_bytes) {
  if (table_ == nullptr) throw failed_precondition("a write of ", name, " after the checkpoint was committed");
  check(need(table_->write, "write")(table_->self, handle_, to_abi(name), offset_bytes, data, size_bytes));
}

void Transaction::commit() {
  if (table_ == nullptr) throw failed_precondition("a checkpoint was committed twice");
  const std::shared_ptr<const stg_storage> table = std::exchange(table_, nullptr);
  check(table->commit(table->self, handle_));
}

StorageFile::StorageFile(StorageFile&& other) noexcept
    : table_(std::exchange(other.table_, nullptr)),
      handle_(other.handle_),
      size_bytes_(other.size_bytes_),
      path_(std::move(other.path_)) {}

StorageFile::~StorageFile() {
  if (table_ != nullptr) table_->close(table_->self, handle_);
}

void StorageFile::read(uint64_t offset_bytes, void* data, uint64_t size_bytes) const {
  check(need(table_->read, "read")(table_->self, handle_, offset_bytes, data, size_bytes));
}

}  // namespace stratagem
