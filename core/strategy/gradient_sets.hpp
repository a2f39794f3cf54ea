// SPDX-License-Identifier: Apache-2.0
//
// reduce_gradients: a host's own gradients, one set per device, reduced in place. Needs no model.
#pragma once

#include <stratagem/strategy.h>

#include <vector>

#include "strategy/workers.hpp"

namespace stratagem {

class Lanes;
class DeviceReduction;

/// Checks all before anything is written. `op` is STG_REDUCE_MEAN or STG_REDUCE_SUM.
void reduce_gradient_sets(const std::vector<stg_gradient_set*>& sets, uint64_t op, const std::vector<stg_device>& devices,
                          Workers& workers, const Call& call);

/// Checks all. Gives by set what its gradients count in the result.
std::vector<double> check_gradient_sets(const std::vector<stg_gradient_set*>& sets, uint64_t op,
                                        const std::vector<stg_device>& devices);
/// The same for sets on an accelerator. What it reads and writes is ordered with each set's stream.
void reduce_device_gradient_sets(const std::vector<stg_gradient_set*>& sets, uint64_t op, const std::vector<stg_device>& devices,
                                 const Lanes& lanes, DeviceReduction& reduction);

}  // namespace stratagem
