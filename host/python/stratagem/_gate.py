# SPDX-License-Identifier: Apache-2.0
"""One caller at a time, and an end that waits for the caller who is inside.

Guarantees: a second caller, and one that comes from inside a callback of the first, gets an Error; `finish` runs once, when nobody is
inside. The lock is held by who is inside, and waited for only where a wait is asked for, so nothing here can hang.
"""
from __future__ import annotations

import threading
from typing import Any, Callable

from .errors import failed_precondition


class Gate:
    __slots__ = ("_lock", "_what", "_finish", "closed")

    def __init__(self, what: str, finish: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._what, self._finish = what, finish
        self.closed = False

    def enter(self) -> None:
        if self.closed:
            raise failed_precondition(f"the {self._what} is closed")
        if not self._lock.acquire(False):
            raise failed_precondition(f"the {self._what} is in a call already, on another thread or around this callback; one caller at a time")
        if self.closed:
            self.leave()
            raise failed_precondition(f"the {self._what} is closed")

    def leave(self) -> None:
        self._lock.release()
        if self.closed:  # looked at after the release: whoever closed it before saw the lock held, and left the end to this
            self._end()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: Any) -> None:
        self.leave()

    def close(self) -> bool:
        """Closes it for everybody. False if a caller is inside, who will finish it."""
        self.closed = True
        return self._end()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the caller who is inside, if any. For the end of the process."""
        inside = not self._lock.acquire(timeout=timeout_s)
        if not inside:
            self._lock.release()
        return not inside

    def _end(self) -> bool:
        if not self._lock.acquire(False):
            return False
        try:
            finish, self._finish = self._finish, _nothing
            finish()
        finally:
            self._lock.release()
        return True


def _nothing() -> None:
    pass
