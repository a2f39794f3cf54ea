// SPDX-License-Identifier: Apache-2.0
//
// An instance's config (stg_create_args.config_json) as a struct. Every bad value is an error that names its JSON pointer.
#pragma once

#include <stratagem/tensor.h>

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace stratagem {

struct Accelerator;

struct OptimizerOptions {
  std::string name;  ///< "sgd", "adam", "adamw", "rmsprop" or "adagrad"
  double weight_decay = 0;
  bool maximize = false;
  // sgd, rmsprop
  double momentum = 0;
  // sgd
  double dampening = 0;
  bool nesterov = false;
  // adam, adamw
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;  ///< of rmsprop and adagrad, too
  bool amsgrad = false;
  // rmsprop
  double alpha = 0.99;
  bool centered = false;
  // adagrad
  double lr_decay = 0;
  double initial_accumulator_value = 0;
};

/// How gradients are gathered into buckets, on accelerators.
struct BucketOptions {
  int64_t size_bytes = int64_t{25} << 20;
  int64_t first_bytes = int64_t{1} << 20;
  bool compress = false;          ///< float32 crosses between devices as bfloat16
  bool shards_optimizer = false;  ///< each device has a part of each bucket, and the optimizer's state for it
};

/// What an instance may be given, by strategy.
enum class Topology { single_device, data_parallel };

struct Options {
  std::vector<stg_device> devices;  ///< the first is the root
  size_t num_devices_given = 1;     ///< single_device uses the first of them
  stg_dtype floating_dtype{};       ///< of floating parameters, buffers and batch leaves; {0,0,0}: as they are
  stg_dtype autocast_dtype{};       ///< of what a step computes in it; {0,0,0}: no autocast
  bool scales_loss = false;         ///< so that small gradients survive float16
  std::optional<OptimizerOptions> optimizer;
  uint64_t seed = 0;
  bool deterministic = false;  ///< asked of the model; what the strategy does on a CPU is so either way
  uint32_t num_threads = 0;    ///< of all replicas together; 0: the process's
  bool split_in_chunks = false;
  const Accelerator* accelerator = nullptr;  ///< null: the CPU
  std::string fallback;                      ///< why "auto" took the CPU, to be told; empty: nothing to tell
  BucketOptions buckets;
  std::string transport_settings = "{}";  ///< a JSON object
  bool lightning = false;                 ///< as PyTorch Lightning does, where it differs
};

/// STG_DEVICE_* of all that the plugins can use.
std::array<uint32_t, 4> device_kinds();

/// Looks for the devices, too.
Options read_options(const nlohmann::json& config, Topology topology);

}  // namespace stratagem
