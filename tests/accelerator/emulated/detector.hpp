// SPDX-License-Identifier: Apache-2.0
//
// The happens-before detector. Each block of memory keeps which operations touched it last; an operation that touches it without being
// ordered after those is a race, whatever the threads do. All functions but those that say so are under the world's lock.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "accelerator/emulated/emulated.hpp"
#include "accelerator/emulated/queue.hpp"

namespace emulated {

/// Guards clocks, blocks and counters, and keeps the order of clocks that of queues. No tensor is let go and no host memory of others
/// is touched under it.
std::mutex& world();
extern Counters count;

struct Trace {
  size_t begin;
  size_t end;
  bool is_write;
  Queue* queue;
  uint64_t time;  ///< of the queue
  std::shared_ptr<const std::string> operation;
};

struct Block {
  char* address;  ///< as tensors have it
  char* memory;   ///< as jobs have it
  size_t bytes;
  int device;    ///< -1: pinned memory of the host
  Queue* owner;  ///< whose allocation it is; null: pinned
  bool is_used = true;
  bool is_guarded = false;   ///< pinned, and the host's view is protected
  std::set<Queue*> users{};  ///< record_stream; of pinned memory: who copied
  std::vector<Trace> traces{};
};

/// Memory that an operation reads or writes; not under the lock.
struct Span {
  const void* address;
  size_t bytes;
  bool is_write;
};

void report(const std::string& text);

/// What the calling host thread knows to be done, and what any knows.
Clock& host_clock();
const Clock& all_hosts();
/// The calling thread has waited for all of `clock`.
void host_waited(const Clock& clock);

/// The queue's next operation, after what the host knows: its time.
uint64_t advance(Queue& queue);
/// An access of the operation at `time`, which was just advanced to.
void touch(Queue& queue, uint64_t time, const std::shared_ptr<const std::string>& operation, Block& block, size_t begin,
           size_t end, bool is_write);
/// The block is given back: who may still use it without having said so?
void check_free(const Block& block);
bool is_known_done(const Trace& trace, const Clock& clock);
std::string describe(const Trace& trace);

/// Queues an operation that touches `spans`: its time. Takes the lock.
uint64_t launch(Queue& queue, std::string operation, const std::vector<Span>& spans, std::function<void()> work);

}  // namespace emulated
