// SPDX-License-Identifier: Apache-2.0
//
// Sessions as the C API names them: numbers, looked up in a table of a fixed size. A handle is a slot's index and how often the slot
// was given before, so that one that is closed is told from one that was never given, and neither is ever followed into freed memory.
//
// What a signal handler may touch, a slot's requests, is never freed, and a slot is not given again while somebody is asking something
// of it. All else is guarded by one mutex, which is held for a look-up only.
#pragma once

#include <stratagem/session.h>

#include <functional>
#include <memory>

#include "libstratagem/loop/events.hpp"
#include "libstratagem/session.hpp"

namespace stratagem {

/// Gives a handle to the session that `make` makes; the requests and the mailbox are those of its handle. Throws RESOURCE_EXHAUSTED when
/// all are in use.
stg_session open_handle(std::shared_ptr<Mailbox> mailbox, const std::function<std::unique_ptr<Session>(Requests&)>& make);

/// An [owner] function of the C API, while it lives. Throws INVALID_ARGUMENT for what never was a handle, FAILED_PRECONDITION for one
/// that is closed, and where another call of the session is going on. Its end frees a session that was closed meanwhile.
class SessionCall {
 public:
  explicit SessionCall(stg_session handle);
  SessionCall(const SessionCall&) = delete;
  SessionCall& operator=(const SessionCall&) = delete;
  ~SessionCall();

  Session* operator->() const { return session_; }

 private:
  struct Slot* slot_;
  Session* session_;
};

/// What can be looked at from any thread, while a call is going on, too. Throws as SessionCall does for a wrong handle.
std::shared_ptr<Mailbox> mailbox_of(stg_session handle);

/// Runs `ask` on the requests of a session that is open; else does nothing. Safe in a signal handler, if `ask` is.
void with_requests(stg_session handle, void (*ask)(Requests&)) noexcept;

/// Asks the session for a swap before its next update. Throws as SessionCall does for a wrong handle.
void request_swap(stg_session handle, const std::function<Json()>& read_strategy);

/// Closes the handle, and frees the session, or leaves that to the call that is going on. A closed one, and none at all, are allowed.
void close_handle(stg_session handle) noexcept;

}  // namespace stratagem
