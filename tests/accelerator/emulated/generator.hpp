// SPDX-License-Identifier: Apache-2.0
//
// Random numbers of the devices: the CPU's generator, said to be on a device. An operator takes from it when it is queued, as on a GPU.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace emulated {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
/// The CPU's generator underneath, which is changed in place.
at::Generator cpu_generator(const at::Generator& generator);

}  // namespace emulated
