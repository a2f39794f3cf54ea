// SPDX-License-Identifier: Apache-2.0
#include "base/sdk_entry.hpp"

#include <pthread.h>

#include <mutex>

namespace stratagem::sdk {

namespace {

struct FunctionRule {
  const char* name;
  uint32_t thread;
  uint32_t states;
};

constexpr FunctionRule rules[] = {
#define STRATAGEM_RULE(name, thread, states) {#name, thread, states},
    STG_STRATEGY_FUNCTIONS(STRATAGEM_RULE)
#undef STRATAGEM_RULE
};

std::atomic<bool> is_child{false};

std::string states_text(uint32_t states) {
  std::vector<std::string> names;
  for (const auto& [bit, name] :
       {std::pair{STG_STATE_CREATED, "created"}, std::pair{STG_STATE_FIT, "set up for fit"},
        std::pair{STG_STATE_EVALUATE, "set up for evaluation"}, std::pair{STG_STATE_MODELLESS, "set up without a model"},
        std::pair{STG_STATE_DRAINING, "draining"}}) {
    if ((states & bit) != 0) names.emplace_back(name);
  }
  return join(names, " or ");
}

// How to get from a state to one of the legal ones.
std::string way_out(uint32_t state, uint32_t legal) {
  if (state == STG_STATE_DRAINING)
    return "only abort, destroy, status, devices and ranks are left: destroy it and create another";
  if ((legal & STG_STATE_CREATED) != 0) return "call teardown first";
  const char* const setup = (legal & STG_STATE_FIT) == 0        ? "setup without a model"
                            : (legal & STG_STATE_EVALUATE) == 0 ? "setup with a model, for fit"
                                                                : "setup with a model";
  return concat("call ", state == STG_STATE_CREATED ? "" : "teardown and then ", setup);
}

}  // namespace

bool is_forked_child() noexcept { return is_child.load(std::memory_order_relaxed); }

void refuse_forked_child() {
  if (!is_forked_child()) return;
  throw failed_precondition(
      "this process is a child of fork, which has none of its parent's threads; call exec, or start a new process");
}

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { is_child.store(true); }); });
}

const void* this_thread() noexcept {
  thread_local char anchor;
  return &anchor;
}

Instance& Instance::of(stg_strategy* self) {
  if (self == nullptr) throw invalid_argument("the strategy instance is null");
  refuse_forked_child();
  return *reinterpret_cast<Instance*>(self);
}

Entry::Entry(stg_strategy* self, Function function) : instance_(Instance::of(self)) {
  const FunctionRule& rule = rules[static_cast<uint32_t>(function)];
  const void* inside = nullptr;
  if (!instance_.caller.compare_exchange_strong(inside, this_thread(), std::memory_order_acquire)) {
    const bool is_callback = inside == this_thread() || instance_.strategy->is_own_thread();
    throw failed_precondition(rule.name,
                              is_callback ? " was called from inside one of the instance's own callbacks"
                                          : " was called while another thread is inside the instance",
                              "; an instance takes one call at a time");
  }
  const uint32_t state = instance_.state.load(std::memory_order_relaxed);
  if ((rule.states & state) == 0) {
    instance_.caller.store(nullptr, std::memory_order_release);
    Error error = failed_precondition(rule.name, ": the instance is ", states_text(state), ", it must be ",
                                      states_text(rule.states), "; ", way_out(state, rule.states));
    if (state == STG_STATE_DRAINING) error.flags = STG_ERROR_INSTANCE_DRAINING;
    throw error;
  }
}

void Entry::move_to(uint32_t state) {
  uint32_t before = instance_.state.load();
  while (before != STG_STATE_DRAINING) {
    if (instance_.state.compare_exchange_weak(before, state)) return;
  }
  Error error{STG_ABORTED, "the instance was aborted"};
  error.flags = STG_ERROR_INSTANCE_DRAINING;
  throw error;
}

std::string_view checked_text(stg_string text, const char* name) {
  if (text.data == nullptr && text.size_bytes != 0) throw invalid_argument(name, " is null with ", text.size_bytes, " bytes");
  return text_of(text);
}

void check_flags(uint64_t flags, uint64_t known, const char* name) {
  if ((flags & ~known) != 0) throw invalid_argument(name, " has the unknown bits ", flags & ~known, "; known are ", known);
}

void check_enumerator(uint64_t value, uint64_t last, const char* name) {
  if (value > last) throw invalid_argument(name, " is ", value, "; known are 0 to ", last);
}

Tree checked(Tree tree, const char* name) {
  validate(tree.root(), name);
  return tree;
}

}  // namespace stratagem::sdk
