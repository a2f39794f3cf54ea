# SPDX-License-Identifier: Apache-2.0
"""A strategy, driven by a loop of the caller's own: the functions of stg_strategy_api, by their names. docs/semantics.md says what each does.

Batches and objects go in without a copy, and what comes out shares their memory where the strategy hands them through. A call takes one
caller at a time; a second one gets an Error.
"""
from __future__ import annotations

import atexit
import json
import os
import threading
import time
import weakref
from ctypes import POINTER, addressof, byref, c_uint32, c_uint64, c_void_p, sizeof
from typing import Any, Callable, Mapping, Optional

from . import _generated as abi
from ._gate import Gate
from ._steps import Steps
from ._text import read_text, text
from .errors import Code, Error, check, failed_precondition
from .plugin import Model, Plugin
from .results import DEVICE_KINDS, REDUCTIONS, STAGES, STATES, Parameter, Ranks, Status, choose, sized
from .services import Failure, Services
from .trees import Convert, Tree, take_tree


class _Instance:
    """What the end of a strategy needs, apart from the Strategy, so that one that is forgotten ends at once: there is no cycle."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held by queries, and where the address is taken away
        self.address: Optional[int] = None
        self.functions: Mapping[str, Callable[..., Any]] = {}
        self.services: Optional[Services] = None  # held until the end: a plugin need not

    def end(self) -> None:
        with self.lock:
            address, self.address = self.address, None
        if address is not None:
            self.functions["destroy"](address)


class Strategy(Steps):
    """An instance of a strategy. `config` is a dict: accelerator, devices, precision, optimizer, seed, options, ... (stg_create_args).

    `timeout_s`, which may be changed at any time, is how long a call may take before it gives up with DEADLINE_EXCEEDED. `convert` is applied to
    every tensor that comes out: stratagem.Tensor.numpy, stratagem.Tensor.torch, or nothing.
    """

    def __init__(self, plugin: Plugin, name: Optional[str] = None, config: Optional[Mapping[str, Any]] = None, *, services: Optional[Services] = None,
                 caller_thread_only: bool = False, convert: Optional[Convert] = None) -> None:
        factory = plugin.strategy_factory(name)
        services = services or Services()
        life = _Instance()
        self._start(life, Gate("strategy", life.end), services.failure, convert)
        api, instance = factory.api.contents, c_void_p()
        args = sized(abi.stg_create_args, config_json=text(json.dumps(config or {})), host=services.pointer,
                     flags=abi.STG_CREATE_CALLER_THREAD_ONLY if caller_thread_only else 0)
        check(api.create(byref(args), byref(instance)))
        life.functions, life.address, life.services = functions_of(api), instance.value, services
        _open.add(self)
        self._failure.raise_it()

    def _start(self, life: _Instance, gate: Gate, failure: Failure, convert: Optional[Convert]) -> None:
        self._life, self._gate, self._failure, self._convert = life, gate, failure, convert
        self.timeout_s: Optional[float] = None
        self._cancelled: Any = None  # a pointer to what ends calls once it isn't 0

    # --- life

    def __enter__(self) -> "Strategy":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the strategy. Tensors that it returned stay valid. A call that is going on is given up, and ends the strategy when it returns."""
        if not self._gate.close():
            self.abort()

    def __del__(self) -> None:
        if hasattr(self, "_gate"):
            self._gate.close()

    def _call(self, name: str, *arguments: Any) -> None:
        """A function that may block."""
        gate = self._gate
        gate.enter()
        try:
            instance = self._ready()
            address = self._life.functions[name](instance, self._limits(), *arguments)
        finally:
            gate.leave()
        if address is not None or self._failure.is_kept:
            check(address)
            self._failure.raise_it()

    def _ready(self) -> Optional[int]:
        """The instance, where a call may begin."""
        return self._life.address

    def _limits(self) -> Any:
        if self.timeout_s is None and self._cancelled is None:
            return None
        deadline_ns = 0 if self.timeout_s is None else time.monotonic_ns() + max(1, int(self.timeout_s * 1e9))
        return byref(sized(abi.stg_call, deadline_ns=deadline_ns, cancel=self._cancelled))

    def _query(self, name: str, *arguments: Any) -> None:
        """What may be asked at any time; from another thread, too, while a call is going on."""
        with self._life.lock:
            if self._life.address is None:
                raise failed_precondition("the strategy is closed")
            check(self._life.functions[name](self._life.address, *arguments))

    def abort(self) -> None:
        """Makes the call that is going on, on another thread, give up; then only close is left."""
        with self._life.lock:
            if self._life.address is not None:
                self._life.functions["abort"](self._life.address)

    def setup(self, model: Optional[Model] = None, *, state: Any = None, stage: str = "fit") -> None:
        """Puts the model on the devices. Without one only reduce_gradients can be used. `state`, as export_state gives it, is where to begin."""
        args = sized(abi.stg_setup_args, stage=choose(STAGES, stage, "stage"))
        if model is not None:
            args.model = model.pointer
        if state is None:
            return self._call("setup", byref(args))
        with Tree(state, moved=False, where="state") as tree:
            args.state = tree
            self._call("setup", byref(args))

    def teardown(self) -> None:
        """Model and optimizer go; setup may follow."""
        self._call("teardown")

    # --- queries

    def status(self) -> Status:
        out = sized(abi.stg_status)
        self._query("status", byref(out))
        return Status(STATES.get(out.state, str(out.state)), out.num_micro_batches, out.num_updates, bool(out.has_graph))

    def devices(self) -> list[tuple[int, int]]:
        """(kind, index) of each, as in DLPack; the first is the root."""
        out, count = POINTER(abi.stg_device)(), c_uint64()
        self._query("devices", byref(out), byref(count))
        return [(device.kind, device.index) for device in out[:count.value]]

    def ranks(self) -> Ranks:
        out = sized(abi.stg_ranks)
        self._query("ranks", byref(out))
        return Ranks(out.global_rank, out.local_rank, out.node_rank, out.world_size)

    def describe_parameters(self) -> tuple[list[Parameter], list[Parameter]]:
        """The parameters and the buffers of the root."""
        out = sized(abi.stg_model_description)
        with self._gate:
            instance = self._ready()
            check(self._life.functions["describe_parameters"](instance, byref(out)))
            # Read here: it lives until the next call.
            return ([_parameter(p.contents) for p in out.parameters[:out.num_parameters]],
                    [_parameter(p.contents) for p in out.buffers[:out.num_buffers]])

    # --- data

    def _through(self, name: str, value: Any, *arguments: Any) -> Any:
        """An object goes in, moved, and one comes out."""
        out = abi.stg_tree()
        with Tree(value) as tree:
            self._call(name, tree, *arguments, byref(out))
        return take_tree(out, self._convert)

    def model_to_device(self) -> None:
        """The whole model to the root, replicas refreshed from it."""
        self._call("model_to_device")

    def batch_to_device(self, batch: Any, device: Optional[tuple[str, int]] = None, dataloader_index: int = 0) -> Any:
        """The batch where the strategy needs it, or on ("cpu", 0) or another device."""
        out = abi.stg_tree()
        with Tree(batch, where="batch") as tree:
            self._call("batch_to_device", byref(transfer_args(tree, device, dataloader_index)), byref(out))
        return take_tree(out, self._convert)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """The object of rank `src` on every rank."""
        return self._through("broadcast", value, src)

    def all_gather(self, value: Any) -> Any:
        """Every rank's object, tensors joined in a new first dimension when there are several ranks."""
        return self._through("all_gather", value)

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """Every tensor becomes one number over all its elements: mean, sum, min or max."""
        return self._through("reduce", value, choose(REDUCTIONS, op, "op"))

    def reduce_boolean_decision(self, decision: bool, mode: str = "all") -> bool:
        """One decision of all ranks: "all" or "any" of them say yes."""
        out = c_uint32()
        self._call("reduce_boolean_decision", int(decision), choose({"all": abi.STG_DECIDE_ALL, "any": abi.STG_DECIDE_ANY}, mode, "mode"), byref(out))
        return bool(out.value)

    def barrier(self, name: str = "") -> None:
        """Returns when every device's work is done and every rank is here."""
        self._call("barrier", text(name))

    def to_host(self, value: Any) -> Any:
        """Every tensor in host memory."""
        return self._through("to_host", value)

    def announce_batch(self, batch: Any, stage: str = "fit", dataloader_index: int = 0) -> int:
        """Takes the next batch early. The ticket goes into one step, as `announced`, in place of a batch."""
        ticket = c_uint64()
        with Tree(batch, where="batch") as tree:
            self._call("announce_batch", byref(transfer_args(tree, None, dataloader_index)), choose(STAGES, stage, "stage"), byref(ticket))
        return ticket.value


def transfer_args(tree: Any, device: Optional[tuple[str, int]], dataloader_index: int) -> abi.stg_transfer_args:
    kind, index = (abi.STG_DEVICE_NONE, -1) if device is None else (choose(DEVICE_KINDS, device[0], "device"), device[1])
    return sized(abi.stg_transfer_args, batch=tree, device=abi.stg_device(kind, index), dataloader_index=dataloader_index)


def _parameter(given: abi.stg_parameter) -> Parameter:
    view = given.tensor.contents.view
    return Parameter(tuple(read_text(name) for name in given.names[:given.num_names]), tuple(view.shape[:view.num_dims]),
                     bool(given.flags & abi.STG_PARAMETER_REQUIRES_GRAD), bool(given.flags & abi.STG_PARAMETER_PERSISTENT))


# --- tables of functions

_tables: dict[int, Mapping[str, Callable[..., Any]]] = {}


def functions_of(api: abi.stg_strategy_api) -> Mapping[str, Callable[..., Any]]:
    """A table's functions by name, read once: it lives as long as the process."""
    if addressof(api) not in _tables:
        _tables[addressof(api)] = {name: _slot(api, name) for name, _ in abi.stg_strategy_api._fields_[1:]}
    return _tables[addressof(api)]


def _slot(api: abi.stg_strategy_api, name: str) -> Callable[..., Any]:
    offset = getattr(abi.stg_strategy_api, name).offset
    function = getattr(api, name) if api.struct_size >= offset + sizeof(c_void_p) else None
    return function or _absent(name)


def _absent(name: str) -> Callable[..., Any]:
    def absent(*_: Any) -> None:
        raise Error(Code.UNIMPLEMENTED, f"this strategy has no {name}")
    return absent


# No call may be inside a plugin when the interpreter ends, and no thread of its own is left.
_open: "weakref.WeakSet[Strategy]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)


@atexit.register
def _close_all() -> None:
    for strategy in list(_open):
        strategy.close()
        strategy._gate.wait(10)
