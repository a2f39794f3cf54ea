// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/handles.hpp"

#include <atomic>
#include <mutex>
#include <thread>

#include "base/error.hpp"
#include "base/sdk_entry.hpp"
#include "libstratagem/data/batches.hpp"

namespace stratagem {

struct Slot {
  std::atomic<stg_session> open{0};     // its handle; 0 while it is not open
  std::atomic<uint32_t> num_asking{0};  // those who are inside with_requests
  Requests requests;
  // Guarded by `table_mutex`.
  uint64_t num_given = 0;
  bool is_taken = false;
  std::unique_ptr<Session> session;
  std::shared_ptr<Mailbox> mailbox;
  bool is_in_call = false;
  std::thread::id caller;
};

namespace {

static_assert(std::atomic<stg_session>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free &&
              std::atomic<bool>::is_always_lock_free);

std::mutex table_mutex;
// Never freed: a process may end while sessions are open, and signals come as long as it lives.
Slot* const slots = new Slot[STG_MAX_SESSIONS];

stg_session handle_of(const Slot& slot) { return slot.num_given * STG_MAX_SESSIONS + static_cast<stg_session>(&slot - slots); }

Slot& slot_of(stg_session handle) { return slots[handle % STG_MAX_SESSIONS]; }

/// Requires `table_mutex`.
Slot& open_slot(stg_session handle) {
  if (handle == 0) throw invalid_argument("the session is 0, which is none");
  Slot& slot = slot_of(handle);
  if (handle < STG_MAX_SESSIONS || handle > handle_of(slot))
    throw invalid_argument(handle, " is no session: stg_session_open has never given it");
  if (slot.open != handle) throw failed_precondition("the session ", handle, " is closed; open another one");
  return slot;
}

Slot& take_slot(std::shared_ptr<Mailbox> mailbox) {
  const std::lock_guard lock(table_mutex);
  for (uint64_t i = 0; i < STG_MAX_SESSIONS; ++i) {
    if (slots[i].is_taken) continue;
    slots[i].is_taken = true;
    slots[i].mailbox = std::move(mailbox);
    return slots[i];
  }
  throw Error(STG_RESOURCE_EXHAUSTED, concat(STG_MAX_SESSIONS, " sessions are open, which is the most; close one"));
}

/// The slot's session is gone, or was never made. Nobody finds the requests any more; those who have wait for nothing.
void give_slot_back(Slot& slot) {
  while (slot.num_asking != 0) std::this_thread::yield();
  slot.requests.clear();
  const std::lock_guard lock(table_mutex);
  slot.mailbox = nullptr;
  slot.is_taken = false;
}

}  // namespace

stg_session open_handle(std::shared_ptr<Mailbox> mailbox, const std::function<std::unique_ptr<Session>(Requests&)>& make) {
  sdk::watch_forks();
  sdk::refuse_forked_child();
  Slot& slot = take_slot(std::move(mailbox));
  try {
    std::unique_ptr<Session> session = make(slot.requests);
    const std::lock_guard lock(table_mutex);
    slot.session = std::move(session);
    ++slot.num_given;
    slot.open = handle_of(slot);
    return slot.open;
  } catch (...) {
    give_slot_back(slot);
    throw;
  }
}

SessionCall::SessionCall(stg_session handle) {
  sdk::refuse_forked_child();
  const std::lock_guard lock(table_mutex);
  slot_ = &open_slot(handle);
  if (slot_->is_in_call && slot_->caller == std::this_thread::get_id())
    throw failed_precondition("the session ", handle, " is called from inside one of its own events, sources or models");
  if (slot_->is_in_call)
    throw failed_precondition("the session ", handle, " is in a call of another thread; it takes one caller at a time");
  slot_->is_in_call = true;
  slot_->caller = std::this_thread::get_id();
  session_ = slot_->session.get();
}

SessionCall::~SessionCall() {
  std::unique_ptr<Session> closed;
  {
    const std::lock_guard lock(table_mutex);
    slot_->is_in_call = false;
    if (slot_->open == 0) closed = std::move(slot_->session);
  }
  if (closed == nullptr) return;
  closed.reset();
  give_slot_back(*slot_);
}

std::shared_ptr<Mailbox> mailbox_of(stg_session handle) {
  sdk::refuse_forked_child();
  const std::lock_guard lock(table_mutex);
  return open_slot(handle).mailbox;
}

void with_requests(stg_session handle, void (*ask)(Requests&)) noexcept {
  Slot& slot = slot_of(handle);
  ++slot.num_asking;
  if (handle != 0 && slot.open == handle) ask(slot.requests);
  --slot.num_asking;
}

void request_swap(stg_session handle, const std::function<Json()>& read_strategy) {
  sdk::refuse_forked_child();
  const std::lock_guard lock(table_mutex);
  const Session& session = *open_slot(handle).session;
  session.request_swap(read_strategy());
}

void close_handle(stg_session handle) noexcept {
  if (sdk::is_forked_child()) return;  // its threads are the parent's: it can't be ended here
  Slot& slot = slot_of(handle);
  std::unique_ptr<Session> closed;
  {
    const std::lock_guard lock(table_mutex);
    if (handle == 0 || slot.open != handle) return;
    slot.open = 0;
    slot.requests.stop = true;
    slot.mailbox->close();
    if (slot.is_in_call) return;
    closed = std::move(slot.session);
  }
  const auto end = [&slot](std::unique_ptr<Session> session) {
    session.reset();
    give_slot_back(slot);
  };
  // A source that is read ahead may close its session: its reader is waited for by another thread then, not by itself.
  if (BatchStream::is_reader_thread()) {
    std::thread(end, std::move(closed)).detach();
  } else {
    end(std::move(closed));
  }
}

}  // namespace stratagem
