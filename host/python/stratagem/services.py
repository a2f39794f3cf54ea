# SPDX-License-Identifier: Apache-2.0
"""What this host offers to plugins and models: a log, progress of long work, and traces of phases."""
from __future__ import annotations

import logging
import weakref
from ctypes import addressof, pointer, sizeof
from typing import Any, Callable, Mapping, Optional

from . import _generated as abi
from ._text import read_text
from .trees import Borrowed

LEVELS = {abi.STG_LOG_DEBUG: logging.DEBUG, abi.STG_LOG_INFO: logging.INFO, abi.STG_LOG_WARNING: logging.WARNING, abi.STG_LOG_ERROR: logging.ERROR}
_HOST = dict(abi.stg_host._fields_)
_logger = logging.getLogger("stratagem")

Log = Callable[[int, str, Mapping[str, Any]], None]

# By the address of the table: who is alive, and once per reference that a plugin has. Lists, whose append and pop need no lock: a
# release may come on any thread, and out of a garbage collection.
_alive: "weakref.WeakValueDictionary[int, Services]" = weakref.WeakValueDictionary()
_references: "dict[int, list[Services]]" = {}


@_HOST["retain"]
def _retain(table: int) -> None:
    _references[table].append(_alive[table])


@_HOST["release"]
def _release(table: int) -> None:
    _references[table].pop()


def log_to_logging(level: int, message: str, fields: Mapping[str, Any]) -> None:
    """The log where none is given: the logger "stratagem" of the module logging."""
    _logger.log(level, "%s%s", message, f" {dict(fields)}" if fields else "")


class Failure:
    """What a callback raised that can't tell an error itself; it is raised when the call that it was in returns."""

    def __init__(self) -> None:
        self._raised: Optional[BaseException] = None

    @property
    def is_kept(self) -> bool:
        return self._raised is not None

    def keep(self, error: BaseException) -> None:
        self._raised = self._raised or error

    def take(self) -> Optional[BaseException]:
        raised, self._raised = self._raised, None
        return raised

    def raise_it(self) -> None:
        raised = self.take()
        if raised is not None:
            raise raised


class Services:
    """`log(level, message, fields)`, with the levels of the module logging; `progress(what, done, total)`, total 0: unknown;
    `trace(phase, replica, begins)`. They may be called on any thread."""

    def __init__(self, log: Log = log_to_logging, progress: Optional[Callable[[str, int, int], None]] = None,
                 trace: Optional[Callable[[str, int, bool], None]] = None) -> None:
        self.failure = Failure()
        guarded = self._guarded

        @_HOST["log"]
        def call_log(_: Any, level: int, message: Any, fields: Any) -> None:
            guarded(lambda: log(LEVELS.get(level, logging.INFO), read_text(message), Borrowed(fields.contents.root).value if fields else {}))

        @_HOST["progress"]
        def call_progress(_: Any, what: Any, done: int, total: int) -> None:
            guarded(lambda: progress and progress(read_text(what), done, total))

        @_HOST["trace_begin"]
        def call_begin(_: Any, phase: Any, replica: int) -> None:
            guarded(lambda: trace and trace(read_text(phase), replica, True))

        @_HOST["trace_end"]
        def call_end(_: Any, phase: Any, replica: int) -> None:
            guarded(lambda: trace and trace(read_text(phase), replica, False))

        self._table = abi.stg_host(struct_size=sizeof(abi.stg_host), retain=_retain, release=_release, log=call_log)
        if progress is not None:
            self._table.progress = call_progress
        if trace is not None:
            self._table.trace_begin, self._table.trace_end = call_begin, call_end
        self._callbacks = (call_log, call_progress, call_begin, call_end)
        self._table.self = addressof(self._table)
        _references[self._table.self] = []
        _alive[self._table.self] = self

    def __del__(self, references: dict[int, Any] = _references) -> None:
        references.pop(self._table.self, None)

    def _guarded(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            self.failure.keep(error)

    @property
    def pointer(self) -> Any:
        return pointer(self._table)
