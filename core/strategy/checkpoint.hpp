// SPDX-License-Identifier: Apache-2.0
//
// A state as a checkpoint folder:
//
//   weights.safetensors     the model's parameters and persistent buffers, under their main names
//   optimizer.safetensors   its state, as <parameter>.<slot>; absent without an optimizer
//   state.json              everything else: aliases, optimizer name and step, generators, versions, the files' checksums, its own, the host's JSON
//
// Written as a whole or not at all, on the local disk or into the host's own storage.
#pragma once

#include <string>

#include "base/host.hpp"
#include "base/value.hpp"

namespace stratagem {

struct Checkpoint {
  Tree state;             ///< in the layout of abi/stratagem/strategy.h
  std::string host_json;  ///< empty if none was given
};

void save_checkpoint(const Tree& state, const Host& host, const std::string& path, const std::string& host_json);

/// STG_DATA_LOSS for a damaged or truncated file, which it names.
Checkpoint load_checkpoint(const Host& host, const std::string& path);

}  // namespace stratagem
