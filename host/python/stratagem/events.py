# SPDX-License-Identifier: Apache-2.0
"""What a run tells, as calls of Python functions."""
from __future__ import annotations

import itertools
import json
import weakref
from ctypes import addressof, sizeof
from dataclasses import dataclass
from typing import Any, Callable, Optional

from . import _generated as abi
from ._text import read_text
from .errors import Error, give_error, read_error
from .results import STAGE_NAMES
from .services import LEVELS, Failure
from .trees import Borrowed, Convert

_EVENTS = dict(abi.stg_session_events._fields_)


@dataclass(frozen=True)
class Progress:
    """How far a run is. Counts that have no limit have -1."""

    stage: str  #: fit, validate, test or predict
    epoch: int  #: completed
    max_epochs: int
    batch: int  #: of the epoch or the evaluation, completed
    num_batches: int
    step: int  #: updates done
    max_steps: int
    loss: float  #: the last one that was logged; NaN before the first


def progress_of(given: abi.stg_progress) -> Progress:
    return Progress(STAGE_NAMES.get(given.stage, str(given.stage)), given.epoch, given.max_epochs, given.batch, given.num_batches, given.step,
                    given.max_steps, given.loss)


class Events:
    """The table of a session's events. What a function raises ends the run; `log`, which can't say so, keeps it in `failure`, and the next
    event says it for it.

    The table's functions live as long as the process and find this by its key: a session may still tell something when its last user is gone.
    """

    def __init__(self, failure: Failure, convert: Optional[Convert], **calls: Optional[Callable[..., None]]) -> None:
        self.failure, self.convert = failure, convert
        self.calls = {name: call for name, call in calls.items() if call is not None}
        key = next(_keys)
        _alive[key] = self
        # These two are always there: Python looks for signals only where it runs, and this is where it does.
        told = {"batch_start", "batch_end", *self.calls}
        self.table = abi.stg_session_events(sizeof(abi.stg_session_events), key, **{name: _FUNCTIONS[name] for name in told})


_keys = itertools.count(1)
_alive: "weakref.WeakValueDictionary[int, Events]" = weakref.WeakValueDictionary()


def _log(key: int, level: int, message: abi.stg_string) -> None:
    events = _alive.get(key)
    try:
        if events is not None:
            events.calls["log"](LEVELS.get(level, level), read_text(message))
    except BaseException as error:
        events.failure.keep(error)


def _asked(name: str, tell: Callable[..., None]) -> Any:
    """`tell` calls what was given for the event `name`, with what the event says."""
    def trampoline(key: int, *said: Any) -> Optional[int]:
        events = _alive.get(key)
        if events is None:
            return None
        logs = events.failure.take()
        if logs is not None:
            return give_error(logs, "what log raised before it: ")
        try:
            if name in events.calls:
                tell(events, events.calls[name], *said)
            return None
        except BaseException as error:
            return give_error(error)
    return _EVENTS[name](trampoline)


def _tell_progress(_: Events, call: Callable[[Progress], None], given: Any) -> None:
    call(progress_of(given.contents))


def _tell_metrics(_: Events, call: Callable[[Any], None], line: abi.stg_string) -> None:
    call(json.loads(read_text(line)))


def _tell_end(events: Events, call: Callable[[Progress, Any], None], given: Any, outputs: Any) -> None:
    lent = Borrowed(outputs.contents, events.convert)
    try:
        call(progress_of(given.contents), lent.value)
    finally:
        lent.expire()


def _tell_swap(_: Events, call: Callable[[int, Any, Optional[Error]], None], step: int, strategy: abi.stg_string, error: Any) -> None:
    call(step, json.loads(read_text(strategy)), read_error(addressof(error.contents)) if error else None)


_FUNCTIONS = {"log": _EVENTS["log"](_log), "progress": _asked("progress", _tell_progress), "metrics": _asked("metrics", _tell_metrics),
              "batch_start": _asked("batch_start", _tell_progress), "batch_end": _asked("batch_end", _tell_end), "swap": _asked("swap", _tell_swap)}
