// SPDX-License-Identifier: Apache-2.0
//
// A batch into shares, one per replica that will run: docs/semantics.md, "Splitting a batch". Views over the batch's memory, made by
// arithmetic on the DLPack fields alone, since a LibTorch narrow costs over a microsecond.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/value.hpp"

namespace stratagem {

struct SplitOptions {
  uint64_t num_replicas = 1;
  bool in_chunks = false;      ///< ceil(B/N) rows each, as PyTorch Lightning; else sizes differ by at most one
  stg_dtype floating_dtype{};  ///< floating leaves are copied into this type; {0,0,0}: left as they are
  bool takes_devices = false;  ///< the batch may be on an accelerator
};

struct Shares {
  std::vector<Tree> trees;       ///< at least one; each owns what it needs, whatever became of the batch
  std::vector<double> num_rows;  ///< of each share; 1 for a batch without rows
  bool has_rows = true;          ///< false: no tensor with a batch dimension was there; the root runs alone
};

/// Rows of each share: for B rows over N replicas.
std::vector<int64_t> share_sizes(int64_t num_rows, uint64_t num_replicas, bool in_chunks);

/// Shares of a borrowed batch view its memory: they must be gone before the call ends.
Shares split_batch(Tree batch, const SplitOptions& options);
/// Shares of a batch that is kept by who needs it.
Shares split_batch(const std::shared_ptr<const Tree>& batch, const SplitOptions& options);

/// Every floating leaf in `dtype`, copied where it has another one; other leaves as they are.
Tree cast_floating(Tree tree, stg_dtype dtype);

}  // namespace stratagem
