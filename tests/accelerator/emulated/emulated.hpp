// SPDX-License-Identifier: Apache-2.0
//
// An accelerator without hardware, for tests: LibTorch's PrivateUse1 under the name "emulated". Kernels are the CPU's, run by a thread per
// stream, as late as a test wishes. What goes wrong on a GPU only sometimes goes wrong here each time, or is reported:
//
//   memory     the host can't touch a device's; what is freed is filled with 0xFF in the order of its stream, and reused per stream
//   order      a happens-before detector looks at each operation when it is queued, so that no delay is needed to see a missing wait
//   host       reading pinned memory that a stream may still write, or writing what it may still read, is reported
//
// How the detector orders: operations of one stream; an event, from where it was recorded to streams that wait for it; and the host,
// after it has waited for a stream, event or device (also: asked one that said yes), before all that the same host thread queues later.
// A hand-over between host threads is not seen: share_host_clock. Memory is freed after what any thread has waited for. An allocation
// counts as a write by the stream that is current then: as on a GPU, its earlier owner may still be at work on it.
//
// An event or stream that is asked whether it is done says no the first time unless the thread had waited for it, so that a lucky
// question doesn't order what it orders only by luck. is_idle tells the truth.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "accelerator/accelerators.hpp"

namespace emulated {

#define EMULATED_API [[gnu::visibility("default")]]

/// Before the first use of a device; 1 to 16, else 4.
EMULATED_API void set_num_devices(int num_devices);

/// From here on each operation of a stream begins up to `longest` later. 0: no delay.
EMULATED_API void set_delays(uint64_t seed, std::chrono::microseconds longest);

/// One clock for all host threads: what one has waited for is ordered before what another queues. Hides some races.
EMULATED_API void share_host_clock(bool shared);

/// Holds a stream where it was made until it is opened or destroyed. It orders nothing.
class EMULATED_API Gate {
 public:
  explicit Gate(const c10::Stream& stream);
  Gate(Gate&&) noexcept;
  Gate& operator=(Gate&&) = delete;
  ~Gate();
  void open();
  /// Waits until the stream has come to it.
  void await_reached() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// Whether all that is queued was done. The detector doesn't hear of it.
EMULATED_API bool is_idle(const c10::Stream& stream);
/// Waits for it. The detector doesn't hear of it, and no error is thrown.
EMULATED_API void drain();

/// What the detector has found since, each once.
EMULATED_API std::vector<std::string> take_reports();

// ---- counting

struct Counters {
  uint64_t synchronisations = 0;  ///< the host waited for a stream, event or device, also inside of a copy or of an operator
  uint64_t new_blocks = 0;        ///< memory that came from the driver, not from what was freed; devices and pinned
  uint64_t host_reads = 0;        ///< item() and its like
  uint64_t operations = 0;        ///< queued kernels, copies and collectives
};
EMULATED_API Counters counters();
/// Bytes of a device's memory that are in use.
EMULATED_API uint64_t used_bytes(int device);

// ---- faults

/// The next operation that the device runs fails, and all of the device's after it until `heal`.
EMULATED_API void fail_device(int device, std::string why);
EMULATED_API void heal();
/// An allocation with which more bytes of the device would be in use is c10::OutOfMemoryError. 0: no limit.
EMULATED_API void limit_memory(int device, uint64_t bytes);

// ---- the collectives

/// Sums are made in the order of ranks, so that all get the same bits. Known settings: {"label": any string}.
EMULATED_API const stratagem::TransportApi& transport();
/// Groups that are open or opened from here on: this rank doesn't come to collectives, nor to the opening, until release_ranks.
EMULATED_API void hold_rank(uint64_t rank);
EMULATED_API void release_ranks();
/// poll says this of each open group, until release_ranks.
EMULATED_API void fail_transport(uint64_t rank, std::string why);
/// The n-th call of a function of the table from here on (1: the next) is an error. 0: none.
EMULATED_API void fail_transport_call(uint64_t n, std::string why);
/// What groups were asked for since, in order: "open 2" or "open label 2", "begin", "all_reduce rank 0 numel 12 dtype 2/32 factor 0.5 stream 3", "end".
EMULATED_API std::vector<std::string> take_transport_log();

// ---- for stratagem::Accelerator

EMULATED_API stratagem::Accelerator::Found find();
EMULATED_API const stratagem::TransportApi& open();

}  // namespace emulated
