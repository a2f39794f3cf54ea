// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/data/source.hpp"

#include <algorithm>
#include <set>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "base/structs.hpp"

namespace stratagem {

DataSource::DataSource(const stg_data_source& table) : table_(table), name_(text_of(table.name)) {}

DataSource::~DataSource() {
  if (table_.release != nullptr) table_.release(table_.self);
}

void DataSource::check() const {
  if (name_.empty()) throw invalid_argument("a source has no name; the config names it in the place of files");
  if (table_.read == nullptr) throw invalid_argument("the source \"", name_, "\" has no read");
  if (table_.num_samples < 1)
    throw invalid_argument("the source \"", name_, "\" has ", table_.num_samples, " samples; it must have one at least");
  if ((table_.flags & ~uint64_t{STG_SOURCE_ANY_THREAD}) != 0)
    throw invalid_argument("the source \"", name_, "\" has the flags ", table_.flags, "; known is STG_SOURCE_ANY_THREAD (1)");
}

Tree DataSource::read(std::span<const int64_t> rows) {
  const std::lock_guard lock(mutex_);
  const std::string what = concat("the source \"", name_, "\"");
  try {
    stg_tree given{};
    stratagem::check(table_.read(table_.self, rows.data(), rows.size(), &given));
    Tree batch(given);
    if (batch.root().type == STG_NONE) throw invalid_argument("it gave no batch for ", rows.size(), " samples");
    if (batch.borrowed()) throw invalid_argument("its batch has no release; it must be the caller's to release");
    validate(batch.root(), "batch");
    for_each_leaf(std::as_const(batch).root(), [&](const KeyPath& path, const stg_value& leaf) {
      if (leaf.type != STG_TENSOR) return;
      const stg_tensor_view& view = leaf.as.tensor->view;
      if (view.num_dims != 0 && view.shape[0] == static_cast<int64_t>(rows.size())) return;
      throw invalid_argument("it was asked for ", rows.size(), " samples, and the tensor ", path, " of its batch has shape ",
                             shape_text(view), "; each must have one row per sample");
    });
    return batch;
  } catch (const Error& error) {
    throw error.within(what, error.replica, error.device);
  }
}

DataSources take_sources(const stg_data_source* const* given, uint64_t num_sources) {
  if (num_sources != 0 && given == nullptr) throw invalid_argument("sources is null, and num_sources ", num_sources);
  DataSources sources;
  std::exception_ptr refused;
  for (uint64_t i = 0; i < num_sources; ++i) {
    try {
      sources.push_back(
          std::make_shared<DataSource>(read_table(given[i], STG_DATA_SOURCE_MIN_SIZE, concat("sources[", i, "]").c_str())));
    } catch (const Error&) {
      if (!refused) refused = std::current_exception();
    }
  }
  if (refused) std::rethrow_exception(refused);
  std::set<std::string> names;
  for (const auto& source : sources) {
    source->check();
    if (!names.insert(source->name()).second) throw invalid_argument("two sources are called \"", source->name(), "\"");
  }
  return sources;
}

std::shared_ptr<DataSource> find_source(const DataSources& sources, const std::string& name) {
  const auto found = std::find_if(sources.begin(), sources.end(), [&](const auto& source) { return source->name() == name; });
  return found == sources.end() ? nullptr : *found;
}

std::vector<std::string> names_of(const DataSources& sources) {
  std::vector<std::string> names;
  for (const auto& source : sources) names.push_back(source->name());
  return names;
}

}  // namespace stratagem
