// SPDX-License-Identifier: Apache-2.0
//
// The replicas' outputs as one tree: docs/semantics.md, "Gathering outputs"; and the losses of a training step as one number.
#pragma once

#include <vector>

#include "base/value.hpp"

namespace stratagem {

struct GatherOptions {
  bool lightning = false;  ///< plain numbers become float32
};

/// Joins `outputs`, one per replica that ran, in replica order. Takes what it can hand on; tensors, which it reads, stay: on an accelerator
/// they are yet to be read when it returns. Differences in structure, dtype or shape are errors that name key path and replica.
Tree gather_outputs(std::vector<Tree>& outputs, const GatherOptions& options);

/// Where a training step's outputs have their loss: the outputs themselves, or "loss" of a dict. Checked: a 0-dim floating tensor.
const stg_value& find_loss(const stg_value& outputs);

/// The 0-dim loss of all, of the first one's type: (sum of weight x loss) / divisor. Losses of weight 0 aren't read.
TensorPtr combine_losses(const std::vector<const stg_value*>& losses, const std::vector<double>& weights, double divisor);

/// Replaces the loss in gathered outputs (a tensor, or the entry "loss").
Tree with_loss(Tree outputs, TensorPtr loss);

}  // namespace stratagem
