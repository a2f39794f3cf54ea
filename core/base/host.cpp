// SPDX-License-Identifier: Apache-2.0
#include "base/host.hpp"

#include <atomic>
#include <ctime>
#include <utility>

#include "base/structs.hpp"

namespace stratagem {

Host::Host(const stg_host* host) {
  if (host == nullptr) return;
  table_ = read_table(host, STG_HOST_MIN_SIZE, "stg_host");
  check_references(table_, "the host");
  if (table_.retain != nullptr) table_.retain(table_.self);
}

Host::Host(const Host& other) : table_(other.table_) {
  if (table_.retain != nullptr) table_.retain(table_.self);
}

Host& Host::operator=(Host other) noexcept {
  std::swap(table_, other.table_);
  return *this;
}

Host::~Host() {
  if (table_.release != nullptr) table_.release(table_.self);
}

void Host::log(uint32_t level, std::string_view message) const {
  if (table_.log != nullptr) table_.log(table_.self, level, to_abi(message), nullptr);
}

void Host::progress(std::string_view what, uint64_t done, uint64_t total) const {
  if (table_.progress != nullptr) table_.progress(table_.self, to_abi(what), done, total);
}

void Host::trace_begin(std::string_view phase, int32_t replica) const {
  if (table_.trace_begin != nullptr) table_.trace_begin(table_.self, to_abi(phase), replica);
}

void Host::trace_end(std::string_view phase, int32_t replica) const {
  if (table_.trace_end != nullptr) table_.trace_end(table_.self, to_abi(phase), replica);
}

Call::Call(const stg_call* call) {
  if (call == nullptr) return;
  call_ = read_argument(call, STG_CALL_MIN_SIZE, "stg_call");
  if (call_.num_streams != 0 && call_.streams == nullptr)
    throw invalid_argument("stg_call.streams is null with ", call_.num_streams, " streams");
  for (uint64_t i = 0; i < call_.num_streams; ++i) check_stream(call_.streams[i], "stg_call.streams[", i, "]");
}

bool Call::past_deadline() const {
  if (!has_deadline()) return false;
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec) >= call_.deadline_ns;
}

bool Call::cancelled() const {
  return call_.cancel != nullptr &&
         std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(call_.cancel)).load(std::memory_order_acquire) != 0;
}

void Call::check(std::string_view waiting_for) const {
  if (cancelled()) throw Error{STG_CANCELLED, concat("cancelled while waiting for ", waiting_for)};
  if (past_deadline()) throw Error{STG_DEADLINE_EXCEEDED, concat("the deadline passed while waiting for ", waiting_for)};
}

}  // namespace stratagem
