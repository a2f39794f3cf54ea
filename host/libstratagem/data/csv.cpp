// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/data/csv.hpp"

#include <csv.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <optional>
#include <string_view>

#include "base/error.hpp"
#include "libstratagem/data/bytes.hpp"

namespace stratagem {
namespace {

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

/// All of `text` as a number of type T.
template <class T>
std::optional<T> number(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool is_exact_whole(std::string_view text) {
  constexpr int64_t limit = int64_t{1} << 53;
  const std::optional<int64_t> value = number<int64_t>(text);
  return value && *value >= -limit && *value <= limit;
}

class Parser {
 public:
  explicit Parser(const std::filesystem::path& file) : file_(file) {
    if (csv_init(&csv_, CSV_STRICT | CSV_STRICT_FINI) != 0) throw std::bad_alloc();
  }
  ~Parser() { csv_free(&csv_); }
  Parser(const Parser&) = delete;
  Parser& operator=(const Parser&) = delete;

  CsvTable read() {
    constexpr uint64_t piece_bytes = uint64_t{1} << 20;
    constexpr uint8_t mark[] = {0xEF, 0xBB, 0xBF};  // what spreadsheets put before UTF-8; a quote behind it opens the first field
    ByteReader reader(file_);
    std::vector<uint8_t> piece = reader.read(piece_bytes);
    if (piece.size() >= 3 && std::equal(mark, mark + 3, piece.begin())) piece.erase(piece.begin(), piece.begin() + 3);
    for (; !piece.empty(); piece = reader.read(piece_bytes)) {
      const size_t num_parsed = csv_parse(&csv_, piece.data(), piece.size(), take_field, end_row, this);
      check(num_parsed == piece.size());
    }
    check(csv_fini(&csv_, take_field, end_row, this) == 0);
    return std::move(table_);
  }

 private:
  // No exception may pass through the library, which is C: it is kept, and the rest is passed over.
  template <class Body>
  void guarded(Body body) {
    try {
      if (!failure_) body();
    } catch (...) {
      failure_ = std::current_exception();
    }
  }
  static void take_field(void* data, size_t size_bytes, void* self) {
    auto& parser = *static_cast<Parser*>(self);
    parser.guarded([&] { parser.row_.emplace_back(static_cast<const char*>(data), size_bytes); });
  }
  static void end_row(int, void* self) {
    auto& parser = *static_cast<Parser*>(self);
    parser.guarded([&] { parser.take_row(); });
    parser.row_.clear();
  }

  void check(bool fine) {
    if (failure_) std::rethrow_exception(failure_);
    if (!fine)
      throw invalid_argument(file_.string(), ", row ", num_rows_ + 1, ": ", csv_strerror(csv_error(&csv_)), " (an odd quote?)");
  }

  void take_row() {
    ++num_rows_;
    if (num_rows_ == 1) {
      table_.columns.resize(row_.size());
      table_.is_whole.assign(row_.size(), true);
      if (std::any_of(row_.begin(), row_.end(), [](const std::string& text) { return !number<double>(trimmed(text)); })) {
        take_names();
        return;
      }
    }
    if (row_.size() != table_.columns.size()) {
      throw invalid_argument(file_.string(), ", row ", num_rows_, " has ", row_.size(), " fields, the first has ",
                             table_.columns.size());
    }
    for (size_t column = 0; column < row_.size(); ++column) {
      const std::string_view text = trimmed(row_[column]);
      const std::optional<double> value = number<double>(text);
      if (!value) {
        throw invalid_argument(file_.string(), ", row ", num_rows_, ", column ",
                               table_.names.empty() ? std::to_string(column + 1) : concat('"', table_.names[column], '"'), ": \"",
                               text, "\" is no number");
      }
      table_.columns[column].push_back(*value);
      table_.is_whole[column] = table_.is_whole[column] && is_exact_whole(text);
    }
  }

  void take_names() {
    for (const std::string& text : row_) {
      std::string name(trimmed(text));
      if (std::find(table_.names.begin(), table_.names.end(), name) != table_.names.end())
        throw invalid_argument(file_.string(), ": two columns are called \"", name, "\"");
      table_.names.push_back(std::move(name));
    }
  }

  const std::filesystem::path file_;
  csv_parser csv_{};
  std::exception_ptr failure_;
  std::vector<std::string> row_;
  uint64_t num_rows_ = 0;
  CsvTable table_;
};

}  // namespace

CsvTable read_csv(const std::filesystem::path& file) { return Parser(file).read(); }

}  // namespace stratagem
