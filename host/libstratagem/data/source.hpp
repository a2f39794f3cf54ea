// SPDX-License-Identifier: Apache-2.0
//
// A data set of the host's own, as it came through the C API: what it gives is checked before anybody relies on it.
#pragma once

#include <stratagem/session.h>

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/value.hpp"

namespace stratagem {

/// `mutex_` orders the reads: one data set may be read for training, ahead, and for validation.
class DataSource {
 public:
  /// Takes it over: releases it at its end.
  explicit DataSource(const stg_data_source& table);
  DataSource(const DataSource&) = delete;
  DataSource& operator=(const DataSource&) = delete;
  ~DataSource();

  const std::string& name() const { return name_; }
  int64_t num_samples() const { return table_.num_samples; }
  bool any_thread() const { return (table_.flags & STG_SOURCE_ANY_THREAD) != 0; }
  /// Throws INVALID_ARGUMENT where it can't be used.
  void check() const;
  /// A batch of these samples. Throws what the source says, as a cause, and INVALID_ARGUMENT for one that isn't as promised.
  Tree read(std::span<const int64_t> rows);

 private:
  stg_data_source table_;
  std::string name_;
  std::mutex mutex_;
};

using DataSources = std::vector<std::shared_ptr<DataSource>>;

/// Takes all over, and then throws INVALID_ARGUMENT for what can't be used.
DataSources take_sources(const stg_data_source* const* given, uint64_t num_sources);

/// Null if there is none of that name.
std::shared_ptr<DataSource> find_source(const DataSources& sources, const std::string& name);
std::vector<std::string> names_of(const DataSources& sources);

}  // namespace stratagem
