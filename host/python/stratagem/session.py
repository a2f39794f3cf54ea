# SPDX-License-Identifier: Apache-2.0
"""A run from a config: checked, then trained step by step or whole, evaluated, or swapped to another strategy while it goes on."""
from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import threading
import time
import weakref
from ctypes import POINTER, byref, c_uint32, c_uint64, c_void_p, pointer
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence, Union

from . import _generated as abi
from ._gate import Gate
from ._library import function
from ._text import text
from .errors import Error, check, invalid_argument
from .events import Events, Progress, progress_of
from .plugin import Model, Path
from .results import STAGES, choose, sized
from .services import Failure, log_to_logging
from .sources import Source, as_source, give_source
from .strategy import Strategy, _Instance, functions_of
from .trees import Convert, take_tree

Config = Union[Mapping[str, Any], str, "os.PathLike[str]"]


class _Handle:
    """What the end of a session needs, apart from the Session, so that one that is forgotten ends at once: there is no cycle."""

    def __init__(self) -> None:
        self.handle = 0

    def end(self) -> None:
        if self.handle:
            function("stg_session_close")(self.handle)


class Session:
    """One run.

    `config` is a dict, JSON text (with comments), or the path of a file; the paths in a dict or a text are relative to `folder`, by default
    the working directory. `overrides`: {"optimizer.lr": 1e-3} or ["optimizer.lr=1e-3"]. `stage`: fit, validate, test or predict.

    Called while it runs, on the thread that is inside a call: `progress(Progress)`, `metrics(dict)`, `batch_start(Progress)`,
    `batch_end(Progress, outputs)`, `swap(step, strategy, error)`; and `log(level, message)`, with logging's levels, on any thread. What one of
    them raises ends the run, which saves what was trained as after every error, and is the cause of the Error that the run raises (what `log`
    raises when nothing else is told any more is raised itself). Tensors in `outputs` are lent: keep what `tensor.numpy()` or `.torch()` makes of them.

    `sources`: data sets of your own by name (stratagem.Source, or a dict of arrays). `model`: what {"kind": "host"} in the config means.
    `own_loop`: batches are yours, and `session.strategy` is driven by you. The rest is as for Strategy.
    """

    def __init__(self, config: Config, *, stage: str = "fit", overrides: Union[Mapping[str, Any], Sequence[str]] = (), folder: Path = "",
                 checkpoint: Path = "", output: Path = "", log: Optional[Callable[[int, str], None]] = None,
                 progress: Optional[Callable[[Progress], None]] = None, metrics: Optional[Callable[[dict[str, Any]], None]] = None,
                 batch_start: Optional[Callable[[Progress], None]] = None, batch_end: Optional[Callable[[Progress, Any], None]] = None,
                 swap: Optional[Callable[[int, Any, Optional[Error]], None]] = None,
                 sources: Optional[Mapping[str, Union[Source, Mapping[str, Any]]]] = None, model: Optional[Model] = None, own_loop: bool = False,
                 queue_events: bool = False, caller_thread_only: bool = False, convert: Optional[Convert] = None) -> None:
        self._life = _Handle()
        self._gate = Gate("session", self._life.end)
        self._failure, self._convert, self.stage = Failure(), convert, stage
        self._swaps = 0  # how often the strategy may have become another one
        self._strategy: Optional[_SessionStrategy] = None
        self._interrupted = False
        self._events = Events(self._failure, convert, log=log or (lambda level, message: log_to_logging(level, message, {})), progress=progress,
                              metrics=metrics, batch_start=batch_start, batch_end=batch_end, swap=swap)
        args = sized(abi.stg_session_args, stage=choose(STAGES, stage, "stage"), checkpoint=text(os.fspath(checkpoint)),
                     output=text(os.fspath(output)), events=pointer(self._events.table))
        args.flags = ((abi.STG_SESSION_OWN_LOOP if own_loop else 0) | (abi.STG_SESSION_QUEUE_EVENTS if queue_events else 0) |
                      (abi.STG_SESSION_CALLER_THREAD_ONLY if caller_thread_only else 0))
        _set_config(args, config, folder)
        texts = _overrides(overrides)
        args.overrides, args.num_overrides = (abi.stg_string * len(texts))(*map(text, texts)), len(texts)
        if model is not None:
            args.model = model.pointer
        handle = c_uint64()
        given = [give_source(name, source) for name, source in _sources(sources).items()]
        args.sources = (POINTER(abi.stg_data_source) * len(given))(*map(pointer, given))
        args.num_sources = len(given)
        with _sigint(self):
            check(function("stg_session_open")(byref(args), byref(handle)))
        self._life.handle = handle.value
        _open.add(self)
        self._raise_failure()

    # --- life

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session. A call that is going on, in another thread or around this callback, is asked to stop, and ends the session."""
        if not self._gate.close():
            self.request_stop()

    def __del__(self) -> None:
        if hasattr(self, "_gate"):
            self._gate.close()

    def _raise_failure(self) -> None:
        interrupted, self._interrupted = self._interrupted, False
        self._failure.raise_it()
        if interrupted:
            raise KeyboardInterrupt

    def _run(self, name: str, *arguments: Any) -> None:
        with self._gate, _sigint(self):
            self._swaps += 1
            address = function(name)(self._life.handle, *arguments)
        try:
            check(address)
        finally:
            self._raise_failure()

    # --- training

    def step(self, num_updates: int = 1) -> bool:
        """Trains so many updates more, with what falls between them. True when the run is over; then `fit` gives the result. Control-C: see `run`."""
        is_over = c_uint32()
        if not 1 <= num_updates < 2**64:
            raise invalid_argument(f"num_updates is {num_updates}; at least one, and below 2^64")
        self._run("stg_session_step", num_updates, byref(is_over))
        return bool(is_over.value)

    def run(self) -> dict[str, Any]:
        """Trains what is left, validates, tests or predicts, as `stage` says. Control-C stops a training after its update, saves it, and is
        raised as KeyboardInterrupt then; a second one cancels the update, too."""
        result = abi.stg_tree()
        try:
            self._run("stg_session_run", byref(result))
        finally:
            answer = take_tree(result)
        return json.loads(answer)

    fit = run

    def swap(self, strategy: Mapping[str, Any]) -> None:
        """Exchanges the strategy now, between updates: {"name": "data_parallel", "devices": 2}. On an error the old one goes on."""
        self._run("stg_session_swap", text(json.dumps(strategy)))

    @property
    def strategy(self) -> Strategy:
        """The strategy that is set up now, for steps, predictions or state of your own. It follows swaps, and ends with the session."""
        if self._strategy is None:
            self._strategy = _SessionStrategy(self)
        return self._strategy

    # --- from any thread, also while a call is going on

    def progress(self) -> Progress:
        """How far the run is."""
        out = sized(abi.stg_progress)
        check(function("stg_session_progress")(self._life.handle, byref(out)))
        return progress_of(out)

    def poll(self, timeout_s: float = 0.0) -> Optional[dict[str, Any]]:
        """The next event of a session with `queue_events`, waited for at most so long; None if there was none."""
        end = time.monotonic() + timeout_s
        while True:  # in slices: Python looks for signals between them
            wait_s = min(max(end - time.monotonic(), 0.0), 0.1)
            out = abi.stg_tree()
            check(function("stg_session_poll")(self._life.handle, int(wait_s * 1e9), byref(out)))
            event = take_tree(out)
            if event is not None or wait_s < 0.1:
                return None if event is None else json.loads(event)

    def request_swap(self, strategy: Mapping[str, Any]) -> None:
        """Swaps before the run's next update; the event `swap` says how it went."""
        check(function("stg_session_request_swap")(self._life.handle, text(json.dumps(strategy))))

    def request_reload(self) -> None:
        """Reads the config file again before the next update, and swaps to the strategy in it."""
        function("stg_session_request_reload")(self._life.handle)

    def request_stop(self) -> None:
        """Ends the run soon: it finishes its update and writes a checkpoint."""
        function("stg_session_request_stop")(self._life.handle)

    def cancel(self) -> None:
        """Ends the run now, with an Error of code CANCELLED."""
        function("stg_session_cancel")(self._life.handle)


class _SessionStrategy(Strategy):
    """A session's strategy. The session's gate is its gate, so neither a swap nor the session's end can come under a call."""

    def __init__(self, session: Session) -> None:
        self._start(_Instance(), session._gate, session._failure, session._convert)
        self._session = session
        self._seen_swaps = -1
        self._cancelled = pointer(c_uint32())

    def _ready(self) -> Optional[int]:
        if self._seen_swaps != self._session._swaps:
            api, instance = POINTER(abi.stg_strategy_api)(), c_void_p()
            check(function("stg_session_strategy")(self._session._life.handle, byref(api), byref(instance)))
            self._life.functions, self._life.address = functions_of(api.contents), instance.value
            self._seen_swaps = self._session._swaps
        return self._life.address

    def _query(self, name: str, *arguments: Any) -> None:
        with self._gate:
            instance = self._ready()
            check(self._life.functions[name](instance, *arguments))

    def abort(self) -> None:
        # Not the instance's own: a swap may end that at any time.
        self._cancelled.contents.value = 1
        self._session.cancel()

    def close(self) -> None:
        """It ends with its session."""

    __del__ = close


def _set_config(args: abi.stg_session_args, config: Config, folder: Path) -> None:
    if isinstance(config, Mapping):
        config = json.dumps(config)
    elif isinstance(config, os.PathLike) or (isinstance(config, str) and "{" not in config):
        args.config_path = text(os.path.abspath(config))
        return
    elif not isinstance(config, str):
        raise invalid_argument(f"a config is a dict, JSON text or a path, not a {type(config).__qualname__}")
    args.config_text, args.config_folder = text(config), text(os.path.abspath(folder or "."))


def _overrides(given: Union[Mapping[str, Any], Sequence[str]]) -> list[str]:
    if isinstance(given, Mapping):
        return [f"{key}={json.dumps(value)}" for key, value in given.items()]
    return [given] if isinstance(given, str) else list(given)


def _sources(given: Optional[Mapping[str, Union[Source, Mapping[str, Any]]]]) -> dict[str, Source]:
    return {name: as_source(source) for name, source in (given or {}).items()}


@contextlib.contextmanager
def _sigint(session: Session) -> Iterator[None]:
    """Control-C, while a call goes on: stop at first, then cancel. Raised in the middle of a callback it could be lost. Only where Python's own
    handler would have been called."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(*_: Any) -> None:
        session.cancel() if session._interrupted else session.request_stop()
        session._interrupted = True

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# No call may be inside the library when the interpreter ends: its next callback would find none.
_open: "weakref.WeakSet[Session]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)  # nobody is inside there


@atexit.register
def _close_all() -> None:
    for session in list(_open):
        session.close()
        if not session._gate.wait(10):
            session.cancel()
            session._gate.wait(10)


def fit(config: Config, **options: Any) -> dict[str, Any]:
    """Trains as `config` says, and gives the result. `options`: those of Session."""
    return _run("fit", config, options)


def validate(config: Config, **options: Any) -> dict[str, Any]:
    """Validates, the weights of `checkpoint` say."""
    return _run("validate", config, options)


def test(config: Config, **options: Any) -> dict[str, Any]:
    """Tests."""
    return _run("test", config, options)


def predict(config: Config, **options: Any) -> dict[str, Any]:
    """Predicts, into the file `output`."""
    return _run("predict", config, options)


def _run(stage: str, config: Config, options: Mapping[str, Any]) -> dict[str, Any]:
    with Session(config, stage=stage, **options) as session:
        return session.run()
