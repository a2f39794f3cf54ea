# SPDX-License-Identifier: Apache-2.0
"""The part of a strategy that trains: steps, updates, gradients and state."""
from __future__ import annotations

import json
import os
from contextlib import ExitStack
from ctypes import POINTER, addressof, byref, cast, pointer
from dataclasses import dataclass, field
from typing import Any, Optional, Sequence, Union

from . import _generated as abi
from ._text import text
from .errors import invalid_argument
from .results import DEVICE_KINDS, OUTCOMES, REDUCTIONS, StepResult, UpdateResult, choose, sized
from .tensors import Tensor, delete_tensor, give_tensor
from .trees import Convert, Tree, take_tree


@dataclass
class GradientSet:
    """One device's gradients for reduce_gradients: tensors that are written in place, None where there is none."""

    gradients: Sequence[Any]
    weight: float = 1.0
    device: tuple[str, int] = ("cpu", 0)
    #: What reduce_gradients made for a None that other devices had: {index: tensor}.
    made: dict[int, Any] = field(default_factory=dict)


class Steps:
    """Mixed into Strategy, which has `_call`."""

    _convert: Optional[Convert]

    def _call(self, name: str, *arguments: Any) -> None:
        raise NotImplementedError

    def _step(self, name: str, batch: Any, announced: int, moved: bool, update: Any = (), **fields: int) -> StepResult:
        args, out = sized(abi.stg_step_args, announced=announced, **fields), sized(abi.stg_step_result)
        if update:
            args.update = update[0]
        if announced:
            if batch is not None:
                raise invalid_argument("a step takes a batch or the ticket of an announced one, not both")
            self._call(name, byref(args), byref(out), *update[1:])
        else:
            with Tree(batch, moved, where="batch") as tree:
                args.batch = tree
                self._call(name, byref(args), byref(out), *update[1:])
        return StepResult(take_tree(out.outputs, self._convert), tuple(out.weights[:out.num_weights]))

    def training_step(self, batch: Any = None, *, announced: int = 0, batch_index: int = 0, dataloader_index: int = 0, global_step: int = 0,
                      detect_anomaly: bool = False) -> StepResult:
        """Every replica's forward; keeps the graphs for backward."""
        return self._step("training_step", batch, announced, True, batch_index=batch_index, dataloader_index=dataloader_index, global_step=global_step,
                          flags=abi.STG_BATCH_DETECT_ANOMALY if detect_anomaly else 0)

    def backward(self, *, last: bool = True, detect_anomaly: bool = False) -> None:
        """Consumes the latest graphs. `last`: the update follows this micro-batch."""
        self._call("backward", _flags(last, detect_anomaly))

    def optimizer_step(self, lr: float, *, clip_norm: float = 0.0, clip_value: float = 0.0) -> UpdateResult:
        """Reduces, clips, updates, and clears gradients."""
        out = sized(abi.stg_update_result)
        self._call("optimizer_step", byref(_update(lr, clip_norm, clip_value)), byref(out))
        return _update_result(out)

    def train_batch(self, batch: Any = None, lr: float = 0.0, *, last: bool = True, clip_norm: float = 0.0, clip_value: float = 0.0, announced: int = 0,
                    batch_index: int = 0, dataloader_index: int = 0, global_step: int = 0,
                    detect_anomaly: bool = False) -> tuple[StepResult, UpdateResult]:
        """training_step, backward and, with `last`, optimizer_step in one; bitwise equal to them."""
        out = sized(abi.stg_update_result)
        step = self._step("train_batch", batch, announced, False, (pointer(_update(lr, clip_norm, clip_value)) if last else None, byref(out)),
                          batch_index=batch_index, dataloader_index=dataloader_index, global_step=global_step, flags=_flags(last, detect_anomaly))
        return step, _update_result(out)

    def zero_grad(self) -> None:
        """Drops gradients, weights and graphs gathered since the last update."""
        self._call("zero_grad")

    def gradients(self) -> dict[str, Any]:
        """The reduced gradients by main name; views, valid until the strategy's next call that is no query."""
        out = abi.stg_tree()
        self._call("gradients", byref(out))
        return take_tree(out, self._convert)

    def parameters_changed(self) -> None:
        """Parameters were written in place on the root: replicas are refreshed, gradients dropped."""
        self._call("parameters_changed")

    def validation_step(self, batch: Any = None, *, announced: int = 0, batch_index: int = 0, dataloader_index: int = 0,
                        global_step: int = 0) -> StepResult:
        """One step without gradients, outputs gathered."""
        return self._step("validation_step", batch, announced, False, batch_index=batch_index, dataloader_index=dataloader_index, global_step=global_step)

    def test_step(self, batch: Any = None, *, announced: int = 0, batch_index: int = 0, dataloader_index: int = 0, global_step: int = 0) -> StepResult:
        """As validation_step, in the test stage."""
        return self._step("test_step", batch, announced, False, batch_index=batch_index, dataloader_index=dataloader_index, global_step=global_step)

    def predict_step(self, batch: Any = None, *, announced: int = 0, batch_index: int = 0, dataloader_index: int = 0,
                     global_step: int = 0) -> StepResult:
        """As validation_step, in the predict stage."""
        return self._step("predict_step", batch, announced, False, batch_index=batch_index, dataloader_index=dataloader_index, global_step=global_step)

    def reduce_gradients(self, sets: Sequence[GradientSet], op: str = "mean") -> None:
        """Reduces one set per device, in their order, in place: "mean" by the sets' weights, or "sum". Set up without a model."""
        given: list[tuple[GradientSet, Any]] = []
        with ExitStack() as stack:
            for number, one in enumerate(sets):
                tensors = (POINTER(abi.stg_tensor) * len(one.gradients))()
                stack.callback(_release_gradients, one, tensors, self._convert)
                for index, gradient in enumerate(one.gradients):
                    if gradient is not None:
                        tensors[index] = cast(give_tensor(gradient, f"sets/{number}/gradients/{index}"), POINTER(abi.stg_tensor))
                device = abi.stg_device(choose(DEVICE_KINDS, one.device[0], f"sets/{number}/device"), one.device[1])
                given.append((one, sized(abi.stg_gradient_set, device=device, weight=one.weight, num_gradients=len(tensors), gradients=tensors)))
            array = (POINTER(abi.stg_gradient_set) * len(given))(*(pointer(one) for _, one in given))
            args = sized(abi.stg_reduce_gradients_args, sets=array, num_sets=len(given), op=choose(REDUCTIONS, op, "op"))
            self._call("reduce_gradients", byref(args))

    # --- state

    def export_state(self, *, copy: bool = False) -> dict[str, Any]:
        """{"model": {name: tensor}, "optimizer": ..., ...}. Views, valid until the next call that changes weights, or copies."""
        out = abi.stg_tree()
        self._call("export_state", abi.STG_EXPORT_COPY if copy else 0, byref(out))
        return take_tree(out, self._convert)

    def import_state(self, state: Any, *, strict: bool = True) -> dict[str, list[str]]:
        """Takes a state, and copies it. The report lists names: missing, unexpected, unknown_keys."""
        report = abi.stg_tree()
        with Tree(state, moved=False, where="state") as tree:
            self._call("import_state", tree, abi.STG_IMPORT_STRICT if strict else 0, byref(report))
        return take_tree(report)

    def save(self, path: Union[str, "os.PathLike[str]"], host: Any = None) -> None:
        """Writes a checkpoint folder as a whole or not at all. `host`, JSON, is kept beside the state."""
        self._call("save", byref(sized(abi.stg_checkpoint_args, path=text(os.fspath(path)), host_json=text(json.dumps(host)))))

    def load(self, path: Union[str, "os.PathLike[str]"], *, strict: bool = True) -> tuple[Any, dict[str, list[str]]]:
        """Reads a checkpoint: what `host` was for save, and the report of import_state."""
        host, report = abi.stg_tree(), abi.stg_tree()
        args = sized(abi.stg_checkpoint_args, path=text(os.fspath(path)), flags=abi.STG_IMPORT_STRICT if strict else 0)
        self._call("load", byref(args), byref(host), byref(report))
        kept = take_tree(host)
        return json.loads(kept) if kept else None, take_tree(report)


def _flags(last: bool, detect_anomaly: bool) -> int:
    return (abi.STG_BATCH_LAST_MICRO_BATCH if last else 0) | (abi.STG_BATCH_DETECT_ANOMALY if detect_anomaly else 0)


def _update(lr: float, clip_norm: float, clip_value: float) -> abi.stg_update_args:
    if clip_norm and clip_value:
        raise invalid_argument("clip_norm and clip_value are both given; a gradient is clipped one way")
    clip = abi.STG_CLIP_NORM if clip_norm else abi.STG_CLIP_VALUE if clip_value else abi.STG_CLIP_NONE
    return sized(abi.stg_update_args, lr=lr, clip=clip, clip_limit=clip_norm or clip_value)


def _update_result(out: abi.stg_update_result) -> UpdateResult:
    return UpdateResult(OUTCOMES.get(out.outcome, str(out.outcome)), out.gradient_norm, out.total_weight, out.loss_scale)


def _release_gradients(one: GradientSet, tensors: Any, convert: Optional[Convert]) -> None:
    """Handles are dropped; what was made for a None is the caller's."""
    for index, gradient in enumerate(one.gradients):
        if not tensors[index]:
            continue
        address = addressof(tensors[index].contents)
        if gradient is not None:
            delete_tensor(address)
        else:
            tensor = Tensor(address)
            one.made[index] = convert(tensor) if convert else tensor
