# SPDX-License-Identifier: Apache-2.0
"""What a run tells, as calls of Python functions."""
from __future__ import annotations

import json
from ctypes import addressof, sizeof
from dataclasses import dataclass
from typing import Any, Callable, Optional

from . import _generated as abi
from ._text import read_text
from .errors import Error, give_error, read_error
from .results import STAGES
from .services import LEVELS, Failure
from .trees import Borrowed, Convert

_EVENTS = dict(abi.stg_session_events._fields_)
_STAGE_NAMES = {number: name for name, number in STAGES.items()}


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
    return Progress(_STAGE_NAMES.get(given.stage, str(given.stage)), given.epoch, given.max_epochs, given.batch, given.num_batches, given.step,
                    given.max_steps, given.loss)


class Events:
    """The table of a session's events. What a function raises ends the run: those that can't say so keep it in `failure`, and the next
    batch_start or batch_end says it for them."""

    def __init__(self, failure: Failure, convert: Optional[Convert], *, log: Optional[Callable[[int, str], None]],
                 progress: Optional[Callable[[Progress], None]], metrics: Optional[Callable[[Any], None]],
                 batch_start: Optional[Callable[[Progress], None]], batch_end: Optional[Callable[[Progress, Any], None]],
                 swap: Optional[Callable[[int, Any, Optional[Error]], None]]) -> None:
        def told(name: str, call: Callable[..., None]) -> Any:
            """A function that can't return an error."""
            def trampoline(_: Any, *arguments: Any) -> None:
                try:
                    call(*arguments)
                except BaseException as error:
                    failure.keep(error)
            return _EVENTS[name](trampoline)

        def asked(name: str, call: Optional[Callable[..., None]]) -> Any:
            """One that can. Always there: Python looks for signals only where it runs, and this is where it does."""
            def trampoline(_: Any, *arguments: Any) -> Optional[int]:
                try:
                    if call is not None and not failure.is_kept:
                        call(*arguments)
                    kept = failure.take()
                    return None if kept is None else give_error(kept)
                except BaseException as error:
                    return give_error(error)
            return _EVENTS[name](trampoline)

        def end(given: Any, outputs: Any) -> None:
            assert batch_end is not None
            borrowed = Borrowed(outputs.contents, convert) if outputs else None
            try:
                batch_end(progress_of(given.contents), borrowed.value if borrowed else None)
            finally:
                if borrowed is not None:
                    borrowed.expire()

        self.table = abi.stg_session_events(struct_size=sizeof(abi.stg_session_events))
        if log is not None:
            self.table.log = told("log", lambda level, message: log(LEVELS.get(level, level), read_text(message)))
        if progress is not None:
            self.table.progress = told("progress", lambda given: progress(progress_of(given.contents)))
        if metrics is not None:
            self.table.metrics = told("metrics", lambda line: metrics(json.loads(read_text(line))))
        if swap is not None:
            self.table.swap = told("swap", lambda step, strategy, error: swap(
                step, json.loads(read_text(strategy)), read_error(addressof(error.contents)) if error else None))
        self.table.batch_start = asked("batch_start", batch_start and (lambda given: batch_start(progress_of(given.contents))))
        self.table.batch_end = asked("batch_end", end if batch_end is not None else None)
