// SPDX-License-Identifier: Apache-2.0
#include "accelerator/emulated/detector.hpp"

#include <algorithm>
#include <utility>

#include "accelerator/emulated/memory.hpp"
#include "base/text.hpp"

namespace emulated {

using stratagem::concat;

Counters count;

namespace {

struct Findings {
  std::vector<std::string> texts;
  std::set<std::string> known;
};

// Never destroyed: streams outlive main.
Findings& findings() {
  static auto* instance = new Findings;
  return *instance;
}

bool has_shared_host_clock = false;
Clock& everybody() {
  static auto* clock = new Clock;
  return *clock;
}
thread_local Clock own_clock;

bool overlap(const Trace& trace, size_t begin, size_t end) { return trace.begin < end && begin < trace.end; }

std::string place(const Block& block, size_t begin, size_t end) {
  return concat("bytes ", begin, " to ", end, " of a block of ", block.bytes, " in ",
                block.device < 0 ? "pinned memory" : "memory of " + name_of(block.device));
}

bool is_written_too(const Span& read, const std::vector<Span>& spans) {
  return std::any_of(spans.begin(), spans.end(),
                     [&](const Span& span) { return span.is_write && span.address == read.address && span.bytes == read.bytes; });
}

}  // namespace

std::mutex& world() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

void report(const std::string& text) {
  if (findings().known.insert(text).second) findings().texts.push_back(text);
}

std::vector<std::string> take_reports() {
  const std::lock_guard lock(world());
  findings().known.clear();
  return std::exchange(findings().texts, {});
}

void share_host_clock(bool shared) {
  const std::lock_guard lock(world());
  has_shared_host_clock = shared;
}

Counters counters() {
  const std::lock_guard lock(world());
  return count;
}

Clock& host_clock() { return has_shared_host_clock ? everybody() : own_clock; }
const Clock& all_hosts() { return everybody(); }

void host_waited(const Clock& clock) {
  own_clock.join(clock);
  everybody().join(clock);
  unguard_done();
}

uint64_t advance(Queue& queue) {
  queue.clock.join(host_clock());
  return queue.clock.tick(queue.number);
}

bool is_known_done(const Trace& trace, const Clock& clock) { return trace.time <= clock.at(trace.queue->number); }

std::string describe(const Trace& trace) {
  return concat(*trace.operation, " on ", trace.queue->name(), trace.is_write ? " writes" : " reads");
}

void touch(Queue& queue, uint64_t time, const std::shared_ptr<const std::string>& operation, Block& block, size_t begin,
           size_t end, bool is_write) {
  const Trace now{begin, end, is_write, &queue, time, operation};
  if (!block.is_used) report(concat("use after free: ", describe(now), " ", place(block, begin, end), ", which was given back"));
  for (const Trace& before : block.traces) {
    if (before.queue == &queue || !overlap(before, begin, end) || !(before.is_write || is_write)) continue;
    if (is_known_done(before, queue.clock)) continue;
    report(concat("race: ", describe(now), " ", place(block, begin, end), ", not ordered after ", describe(before),
                  before.is_write == is_write ? " it, too" : " it"));
  }
  // What this one comes after and covers says nothing more than this one does.
  std::erase_if(block.traces, [&](const Trace& before) {
    const bool is_covered = begin <= before.begin && before.end <= end && (is_write || !before.is_write);
    return is_covered && is_known_done(before, queue.clock);
  });
  block.traces.push_back(now);
  if (block.device < 0) block.users.insert(&queue);
}

void check_free(const Block& block) {
  Clock known = all_hosts();
  known.join(block.owner->clock);
  for (const Trace& trace : block.traces) {
    if (block.users.contains(trace.queue) || is_known_done(trace, known)) continue;
    report(concat("use after free: ", place(block, trace.begin, trace.end), ", allocated on ", block.owner->name(),
                  ", is freed while ", describe(trace), " it (record_stream is missing, or a wait of the allocating stream)"));
  }
}

uint64_t launch(Queue& queue, std::string operation, const std::vector<Span>& spans, std::function<void()> work) {
  throw_if_failed(queue.device);
  const std::lock_guard lock(world());
  ++count.operations;
  const uint64_t time = advance(queue);
  const auto name = std::make_shared<const std::string>(std::move(operation));
  // Reads first: a write would hide what the operation must read.
  for (const bool writes : {false, true}) {
    for (const Span& span : spans) {
      if (span.is_write != writes || span.bytes == 0 || (!writes && is_written_too(span, spans))) continue;
      Block* block = find_block(span.address);
      if (block == nullptr) continue;
      const auto begin = static_cast<size_t>(static_cast<const char*>(span.address) - block->address);
      touch(queue, time, name, *block, begin, begin + span.bytes, span.is_write);
      if (block->device < 0) guard(*block);
    }
  }
  queue.push({std::move(work), true, *name});
  return time;
}

}  // namespace emulated
