// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/data/npz.hpp"

#include <minizip/unzip.h>

#include <memory>
#include <type_traits>

#include "base/error.hpp"
#include "base/npy.hpp"

namespace stratagem {
namespace {

using Archive = std::unique_ptr<std::remove_pointer_t<unzFile>, decltype(&unzClose)>;

constexpr std::string_view suffix = ".npy";

Archive open_archive(const std::filesystem::path& path) {
  Archive archive(unzOpen64(path.c_str()), &unzClose);
  if (!archive) throw invalid_argument(path.string(), " is no NPZ file: it is not a ZIP archive, or is cut off");
  return archive;
}

void check_archive(int status, const std::filesystem::path& path, const std::string& what) {
  if (status < 0) throw data_loss(path.string(), ": ", what, " is damaged");
}

std::string current_name(unzFile archive, const std::filesystem::path& path) {
  unz_file_info64 info{};
  std::string name;
  check_archive(unzGetCurrentFileInfo64(archive, &info, nullptr, 0, nullptr, 0, nullptr, 0), path, "its directory");
  name.resize(info.size_filename);
  check_archive(unzGetCurrentFileInfo64(archive, nullptr, name.data(), name.size(), nullptr, 0, nullptr, 0), path,
                "its directory");
  return name;
}

}  // namespace

NpzFile::NpzFile(std::filesystem::path path) : path_(std::move(path)) {
  const Archive archive = open_archive(path_);
  for (int status = unzGoToFirstFile(archive.get()); status != UNZ_END_OF_LIST_OF_FILE; status = unzGoToNextFile(archive.get())) {
    check_archive(status, path_, "its directory");
    const std::string name = current_name(archive.get(), path_);
    if (name.ends_with(suffix)) names_.push_back(name.substr(0, name.size() - suffix.size()));
  }
  if (names_.empty())
    throw invalid_argument(path_.string(), " is no NPZ file: the archive holds no array (a member that ends in .npy)");
}

TensorPtr NpzFile::read(const std::string& name) const {
  const Archive archive = open_archive(path_);
  const std::string member = name + std::string(suffix);
  check_archive(unzLocateFile(archive.get(), member.c_str(), /*case sensitive*/ 1), path_, "its directory");
  check_archive(unzOpenCurrentFile(archive.get()), path_, member);
  // Memory grows with what is there, not with what the directory promises.
  std::vector<uint8_t> bytes;
  for (int num_read = 1; num_read > 0;) {
    constexpr size_t piece_bytes = size_t{1} << 20;
    const size_t have_bytes = bytes.size();
    bytes.resize(have_bytes + piece_bytes);
    num_read = unzReadCurrentFile(archive.get(), bytes.data() + have_bytes, piece_bytes);
    check_archive(num_read, path_, member);
    bytes.resize(have_bytes + static_cast<size_t>(num_read));
  }
  check_archive(unzCloseCurrentFile(archive.get()), path_, concat(member, " (its check sum is wrong, so it)"));
  return read_npy(bytes, concat(path_.string(), ": ", member));
}

}  // namespace stratagem
