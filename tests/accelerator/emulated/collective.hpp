// SPDX-License-Identifier: Apache-2.0
//
// Groups of ranks and what they do together. A collective is one job per rank, on that rank's stream; the last rank that comes to it does
// the work of all, the others wait. To the detector each rank touches only its own buffers, and no rank's stream is ordered after another's.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "accelerator/emulated/plain.hpp"

namespace emulated {

enum class Kind { all_reduce, reduce_scatter, all_gather, broadcast };
const char* name_of(Kind kind);

/// A rank's part in a collective.
struct Part {
  Kind kind = Kind::all_reduce;
  at::ScalarType dtype = at::kFloat;
  Plain in;
  Plain out;
  std::vector<Span> spans;
  double factor = 1;
  std::optional<Plain> factor_on_device;
  uint64_t source = 0;  // of a broadcast
  Queue* queue = nullptr;
};

struct Launched {
  Queue* queue;
  uint64_t time;
};

/// What the jobs of a group share, so that they may outlive it. Everything is under `meeting`.
struct Ranks {
  explicit Ranks(std::vector<int> devices_of_ranks) : devices(std::move(devices_of_ranks)) {}
  const std::vector<int> devices;
  bool is_aborted = false;
};

/// Of all groups: what ranks that wait look at.
struct Meeting {
  std::mutex mutex;
  std::condition_variable changed;
  std::set<uint64_t> held;
  std::map<uint64_t, std::string> failed;  // by rank: what poll says
};
Meeting& meeting();

/// Queues the collective of which rank r has the r-th part.
std::vector<Launched> launch_collective(const std::shared_ptr<Ranks>& ranks, std::vector<Part> parts);

}  // namespace emulated
