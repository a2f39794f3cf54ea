# SPDX-License-Identifier: Apache-2.0
"""Models written in Python: the table stg_model over objects of the caller's. What they raise is the cause of the Error that comes of it.

Python's lock lets one replica's Python code run at a time; what a library computes without it (PyTorch does) runs side by side.
"""
from __future__ import annotations

import itertools
import threading
from ctypes import POINTER, cast, memset, pointer, sizeof
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Optional, Protocol

from . import _generated as abi
from ._text import text
from .errors import check, give_error, invalid_argument
from .plugin import Model
from .results import STAGE_NAMES, choose
from .tensors import delete_tensor, give_tensor
from .trees import Tree, take_tree

_MODEL = dict(abi.stg_model._fields_)
_DTYPES = {(0, 0): None, (abi.STG_DTYPE_FLOAT, 64): "float64", (abi.STG_DTYPE_FLOAT, 32): "float32", (abi.STG_DTYPE_FLOAT, 16): "float16",
           (abi.STG_DTYPE_BFLOAT, 16): "bfloat16"}


@dataclass(frozen=True)
class ReplicaArgs:
    """How a replica is to be made."""

    device: tuple[int, int]  #: (kind, index), as in DLPack; a logical CPU device has an index of its own
    replica: int  #: 0 is the root
    num_replicas: int
    dtype: Optional[str]  #: of floating parameters, "float64" and so on; None: the model's own
    seed: int  #: initial weights depend on it alone


@dataclass(frozen=True)
class StepContext:
    """What a step is told."""

    stage: str  #: fit, validate, test or predict
    gradient: bool  #: keep a graph for backward
    batch_index: int
    global_step: int  #: updates done
    replica: int


@dataclass(frozen=True)
class StepOutput:
    """What a step gives: in training `outputs` is the loss, a 0-dim tensor, or a dict with one under "loss"; `graph` is what backward gets."""

    outputs: Any
    graph: Any = None
    denominator: Optional[float] = None  #: how much the share counts; None: its rows


class Replica(Protocol):
    """A model on one device. Called by one thread at a time, others at the same time."""

    parameters: Mapping[str, Any]  #: tensors, written in place by the strategy; the same ones for life
    buffers: Mapping[str, Any]

    def set_mode(self, train: bool) -> None: ...

    def step(self, batch: Any, context: StepContext) -> StepOutput: ...

    def backward(self, graph: Any, scale: float) -> Mapping[str, Any]:
        """The gradients of the loss times `scale`, by name; a parameter that is not in it got none."""


class PythonModel(Model):
    """A model whose replicas `replicate` makes. `loss`: whether a step's loss is the "mean" or the "sum" over its rows."""

    def __init__(self, replicate: Callable[[ReplicaArgs], Replica], *, loss: str = "mean") -> None:
        key = next(_keys)
        core = _Core(replicate, choose({"mean": abi.STG_LOSS_MEAN, "sum": abi.STG_LOSS_SUM}, loss, "loss"), key)
        _models[key] = [core]
        super().__init__(pointer(core.table), getattr(replicate, "__qualname__", "python"))


class _Core:
    """What references hold. Not the PythonModel: its end drops the caller's."""

    def __init__(self, replicate: Callable[[ReplicaArgs], Replica], loss_kind: int, key: int) -> None:
        self.replicate, self.loss_kind = replicate, loss_kind
        self.table = abi.stg_model(struct_size=sizeof(abi.stg_model), self=key, **_FUNCTIONS)


class _Held:
    """A replica with the handles over its parameters, which live until it is destroyed."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.handles: list[int] = []
        self.names = list(replica.parameters)
        self.described = [self._describe(replica.parameters, abi.STG_PARAMETER_REQUIRES_GRAD), self._describe(replica.buffers, 0)]

    def _describe(self, tensors: Mapping[str, Any], flags: int) -> Any:
        made = []
        for name, tensor in tensors.items():
            self.handles.append(give_tensor(tensor, name))
            names = (abi.stg_string * 1)(text(name))
            made.append(abi.stg_parameter(sizeof(abi.stg_parameter), names, 1, cast(self.handles[-1], POINTER(abi.stg_tensor)),
                                          flags | abi.STG_PARAMETER_PERSISTENT | abi.STG_PARAMETER_PINNED))
        return (POINTER(abi.stg_parameter) * len(made))(*map(pointer, made))

    def drop(self) -> None:
        for handle in self.handles:
            delete_tensor(handle)
        self.handles = []


_keys = itertools.count(1)
_models: dict[int, list[_Core]] = {}  # once per reference
_replicas: dict[int, _Held] = {}
_graphs: dict[int, Any] = {}


def _answers(function: Callable[..., None]) -> Callable[..., Optional[int]]:
    """What it raises is its answer."""
    def answering(*arguments: Any) -> Optional[int]:
        try:
            function(*arguments)
            return None
        except BaseException as error:
            return give_error(error)
    return answering


def _retain(key: int) -> None:
    _models[key].append(_models[key][0])


def _release(key: int) -> None:
    references = _models[key]
    last = references.pop()
    if not references:
        _models.pop(key, None)
    del last


def _replicate(key: int, given: Any, out: Any) -> None:
    args = given.contents
    dtype = _DTYPES[args.floating_dtype.code, args.floating_dtype.bits]
    held = _Held(_models[key][0].replicate(ReplicaArgs((args.device.kind, args.device.index), args.replica, args.num_replicas, dtype, args.seed)))
    handle = next(_keys)
    _replicas[handle] = held
    out[0] = handle


def _destroy_replica(_: int, replica: int) -> None:
    _replicas.pop(replica).drop()


def _describe(key: int, replica: int, out: Any) -> None:
    held, description = _replicas[replica], out.contents
    description.parameters, description.num_parameters = held.described[0], len(held.described[0])
    description.buffers, description.num_buffers = held.described[1], len(held.described[1])
    description.loss_kind = _models[key][0].loss_kind


def _set_mode(_: int, replica: int, train: int) -> None:
    _replicas[replica].replica.set_mode(bool(train))


def _step(_: int, replica: int, context: Any, batch: Any, result: Any) -> None:
    values = take_tree(batch.contents)
    memset(batch, 0, sizeof(abi.stg_tree))
    told = context.contents
    output = _replicas[replica].replica.step(values, StepContext(STAGE_NAMES[told.stage], bool(told.flags & abi.STG_STEP_GRADIENT), told.batch_index,
                                                                 told.global_step, told.replica))
    if not isinstance(output, StepOutput):
        raise invalid_argument(f"a step gave a {type(output).__qualname__}; it gives a stratagem.StepOutput")
    out = result.contents
    outputs = Tree(output.outputs, where="outputs")
    if output.denominator is not None:
        out.denominator.type, out.denominator.f64 = abi.STG_DOUBLE, float(output.denominator)
    if told.flags & abi.STG_STEP_GRADIENT:
        handle = next(_keys)
        _graphs[handle] = output.graph
        out.graph = handle
    out.outputs = outputs.abi


def _backward(_: int, replica: int, graph: int, scale: float, flags: int, sink: Any) -> None:
    held, table = _replicas[replica], sink.contents
    gradients = held.replica.backward(_graphs.pop(graph), scale)
    unknown = set(gradients) - set(held.names)
    if unknown:
        raise invalid_argument(f"backward gave gradients of {', '.join(sorted(unknown))}, which are no parameters")
    for index, name in enumerate(held.names):
        gradient = gradients.get(name)
        handle = None if gradient is None else cast(give_tensor(gradient, name), POINTER(abi.stg_tensor))
        check(table.ready(table.self, index, handle, None))


def _release_graph(_: int, __: int, graph: int) -> None:
    _graphs.pop(graph, None)


_FUNCTIONS = {"retain": _MODEL["retain"](_retain), "release": _MODEL["release"](_release), "replicate": _MODEL["replicate"](_answers(_replicate)),
              "destroy_replica": _MODEL["destroy_replica"](_destroy_replica), "describe": _MODEL["describe"](_answers(_describe)),
              "set_mode": _MODEL["set_mode"](_answers(_set_mode)), "step": _MODEL["step"](_answers(_step)),
              "backward": _MODEL["backward"](_answers(_backward)), "release_graph": _MODEL["release_graph"](_release_graph)}


class TorchModel(PythonModel):
    """A model of torch modules: `make()` gives one, and `step(module, batch, stage)` its loss, or a dict with the loss and more.

    Batches come as torch tensors. Not there: states of generators (what a module draws is not saved), CUDA, autocast.
    """

    def __init__(self, make: Callable[[], Any], step: Callable[[Any, Any, str], Any], *, loss: str = "mean") -> None:
        lock = threading.Lock()  # torch's generator is one for all threads

        def replicate(args: ReplicaArgs) -> Replica:
            import torch
            with lock:
                torch.manual_seed(args.seed)
                module = make()
            return _TorchReplica(module if args.dtype is None else module.to(getattr(torch, args.dtype)), step)

        super().__init__(replicate, loss=loss)


class _TorchReplica:
    def __init__(self, module: Any, step: Callable[[Any, Any, str], Any]) -> None:
        self.module, self.make_step = module, step
        self.trained = dict(module.named_parameters())
        self.parameters = {name: parameter.detach() for name, parameter in self.trained.items()}
        self.buffers = dict(module.named_buffers())

    def set_mode(self, train: bool) -> None:
        self.module.train(train)

    def step(self, batch: Any, context: StepContext) -> StepOutput:
        import torch
        with torch.set_grad_enabled(context.gradient):
            outputs = self.make_step(self.module, _to_torch(batch), context.stage)
        loss = outputs["loss"] if isinstance(outputs, Mapping) and context.gradient else outputs
        return StepOutput(_detached(outputs), loss if context.gradient else None)

    def backward(self, graph: Any, scale: float) -> Mapping[str, Any]:
        (graph if scale == 1 else graph * scale).backward()
        gradients = {name: parameter.grad for name, parameter in self.trained.items() if parameter.grad is not None}
        for parameter in self.trained.values():
            parameter.grad = None
        return gradients


def _to_torch(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_torch(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_to_torch, value))
    return value.torch() if hasattr(value, "torch") else value


def _detached(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_detached, value))
    return value.detach() if hasattr(value, "detach") else value
