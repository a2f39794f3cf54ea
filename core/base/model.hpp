// SPDX-License-Identifier: Apache-2.0
//
// A model of whoever's making, on the C++ side: the table with absent slots read as null, errors as exceptions, replicas and graphs
// owned. This is how a strategy sees a model; how to make one on LibTorch is in core/model.
#pragma once

#include <stratagem/model.h>

#include <memory>

#include "base/structs.hpp"

namespace stratagem {

/// A reference to a model. Copies share.
class Model {
 public:
  Model() = default;
  /// Checks the table (slots through release_graph must be there) and retains it.
  explicit Model(const stg_model* model);
  explicit operator bool() const { return table_ != nullptr; }
  const stg_model& table() const { return *table_; }
  void* self() const { return table_->self; }

 private:
  std::shared_ptr<const stg_model> table_;
};

struct ReplicaDestroy {
  Model model;
  void operator()(stg_replica* replica) const noexcept { model.table().destroy_replica(model.self(), replica); }
};
using ReplicaPtr = std::unique_ptr<stg_replica, ReplicaDestroy>;

}  // namespace stratagem
