// SPDX-License-Identifier: Apache-2.0
//
// What every entry of a strategy's table begins and ends with; for the sdk_*.cpp files alone. An entry takes over what was moved in (it
// is consumed on every return), checks sizes, who calls and in which state, validates trees, calls, and writes the result.
#pragma once

#include <atomic>
#include <memory>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/strategy.hpp"

namespace stratagem::sdk {

enum class Function : uint32_t {
#define STRATAGEM_ENUMERATOR(name, thread, states) name,
  STG_STRATEGY_FUNCTIONS(STRATAGEM_ENUMERATOR)
#undef STRATAGEM_ENUMERATOR
};

/// The functions behind the table's slots: entries::setup is what stg_strategy_api::setup points to.
namespace entries {
#define STRATAGEM_DECLARATION(name, thread, states) std::remove_pointer_t<decltype(stg_strategy_api::name)> name;
STG_STRATEGY_FUNCTIONS(STRATAGEM_DECLARATION)
#undef STRATAGEM_DECLARATION
}  // namespace entries

/// Whether this process is a child of fork, where the replicas' threads don't exist. Watched from watch_forks on.
bool is_forked_child() noexcept;
void refuse_forked_child();
void watch_forks();
/// Tells threads apart for less than std::thread::id costs.
const void* this_thread() noexcept;

struct Instance {
  std::unique_ptr<Strategy> strategy;
  std::atomic<uint32_t> state{STG_STATE_CREATED};
  std::atomic<uint32_t> stage{STG_STAGE_FIT};
  std::atomic<const void*> caller{nullptr};  // the thread inside an [owner] function; null: none
  std::vector<double> weights;               // lent by the last step's result; written inside [owner] functions only
  bool caller_thread_only = false;

  /// Throws for null, and in a forked child.
  static Instance& of(stg_strategy* self);
};

// One [owner] call: refuses a second caller and the wrong state; lets go at the end.
class Entry {
 public:
  Entry(stg_strategy* self, Function function);
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  ~Entry() { instance_.caller.store(nullptr, std::memory_order_release); }

  Strategy* operator->() const { return instance_.strategy.get(); }
  /// To the state after a setup or teardown. An abort that came in between wins: the call ends as aborted.
  void move_to(uint32_t state);
  Instance& instance() const { return instance_; }

 private:
  Instance& instance_;
};

// Runs `body(entry)` as one [owner] call; an error that leaves the instance draining moves its state.
template <class Body>
void run(stg_strategy* self, Function function, Body&& body) {
  Entry entry(self, function);
  try {
    body(entry);
  } catch (const Error& error) {
    if ((error.own_flags() & STG_ERROR_INSTANCE_DRAINING) != 0) entry.instance().state.store(STG_STATE_DRAINING);
    throw;
  }
}

template <class T>
T* required(T* pointer, const char* name) {
  if (pointer == nullptr) throw invalid_argument(name, " is null");
  return pointer;
}

/// The text, checked for null with a size.
std::string_view checked_text(stg_string text, const char* name);
void check_flags(uint64_t flags, uint64_t known, const char* name);
void check_enumerator(uint64_t value, uint64_t last, const char* name);
/// Validates a tree that came in.
Tree checked(Tree tree, const char* name);

}  // namespace stratagem::sdk
