# SPDX-License-Identifier: Apache-2.0
"""What a strategy's functions give back, and the words for what the ABI numbers."""
from __future__ import annotations

from ctypes import sizeof
from dataclasses import dataclass
from typing import Any, Mapping

from . import _generated as abi
from .errors import invalid_argument

STAGES = {"fit": abi.STG_STAGE_FIT, "validate": abi.STG_STAGE_VALIDATE, "test": abi.STG_STAGE_TEST, "predict": abi.STG_STAGE_PREDICT}
STAGE_NAMES = {number: name for name, number in STAGES.items()}
STATES = {abi.STG_STATE_CREATED: "created", abi.STG_STATE_FIT: "fit", abi.STG_STATE_EVALUATE: "evaluate",
          abi.STG_STATE_MODELLESS: "modelless", abi.STG_STATE_DRAINING: "draining"}
REDUCTIONS = {"mean": abi.STG_REDUCE_MEAN, "sum": abi.STG_REDUCE_SUM, "min": abi.STG_REDUCE_MIN, "max": abi.STG_REDUCE_MAX}
OUTCOMES = {abi.STG_UPDATE_NONE: "none", abi.STG_UPDATE_DONE: "done", abi.STG_UPDATE_SKIPPED_OVERFLOW: "skipped: overflow",
            abi.STG_UPDATE_SKIPPED_NO_WEIGHT: "skipped: no weight"}
DEVICE_KINDS = {"cpu": abi.STG_DEVICE_CPU, "cuda": abi.STG_DEVICE_CUDA}


def choose(table: Mapping[str, int], value: str, what: str) -> int:
    if value not in table:
        raise invalid_argument(f"{what} is {value!r}; it can be {', '.join(table)}")
    return table[value]


def sized(kind: Any, **fields: Any) -> Any:
    """A growing struct with its size."""
    return kind(struct_size=sizeof(kind), **fields)


@dataclass(frozen=True)
class Status:
    state: str  #: created, fit, evaluate, modelless or draining
    num_micro_batches: int  #: backward calls since the last update
    num_updates: int
    has_graph: bool  #: a training_step waits for its backward


@dataclass(frozen=True)
class Ranks:
    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int  #: processes, not devices


@dataclass(frozen=True)
class Parameter:
    """One parameter or buffer. Its values: export_state."""

    names: tuple[str, ...]  #: the main one first
    shape: tuple[int, ...]
    requires_grad: bool
    persistent: bool


@dataclass(frozen=True)
class StepResult:
    outputs: Any  #: in training with the loss
    weights: tuple[float, ...]  #: one per replica that ran: its rows, or its denominator


@dataclass(frozen=True)
class UpdateResult:
    outcome: str  #: none (more micro-batches follow), done, skipped: overflow, skipped: no weight
    gradient_norm: float  #: NaN where it was not needed
    total_weight: float
    loss_scale: float
