# SPDX-License-Identifier: Apache-2.0
"""Data of the caller's own: arrays, or a function that reads a batch. A config's data names it: {"source": "mine", "batch_size": 64}."""
from __future__ import annotations

import itertools
from ctypes import sizeof
from typing import Any, Callable, Mapping, Optional, Sequence, Union

from . import _generated as abi
from ._text import text
from .errors import give_error, invalid_argument
from .trees import Tree

_SOURCE = dict(abi.stg_data_source._fields_)
Read = Callable[[Sequence[int]], Any]


class Source:
    """`read(rows)` gives the samples of these numbers, in this order: a dict of tensors, say, each with len(rows) rows.

    With `any_thread` it may be called ahead of its use, on a thread of the session's; one call at a time.
    """

    def __init__(self, num_samples: int, read: Read, *, any_thread: bool = False) -> None:
        if not 1 <= num_samples < 2**63:
            raise invalid_argument(f"num_samples is {num_samples}; at least one, and below 2^63")
        self.num_samples, self.read, self.any_thread = num_samples, read, any_thread


class Arrays(Source):
    """Arrays with one sample per row: NumPy arrays or torch tensors. Rows that follow each other are handed over without a copy.

    >>> import array
    >>> Arrays({"inputs": memoryview(array.array("f", [1, 2, 3, 4])).cast("B").cast("f", [2, 2])}).num_samples
    2
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        lengths = {name: len(values) for name, values in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise invalid_argument(f"arrays of a source need equally many rows; there are {lengths or 'none'}")
        self.arrays = dict(arrays)
        super().__init__(next(iter(lengths.values())), self._rows)

    def _rows(self, rows: Sequence[int]) -> Any:
        first, count = rows[0], len(rows)
        if all(row == first + index for index, row in enumerate(rows)):
            return {name: values[first:first + count] for name, values in self.arrays.items()}
        return {name: _gather(values, rows) for name, values in self.arrays.items()}


def _gather(values: Any, rows: Sequence[int]) -> Any:
    if hasattr(values, "index_select"):  # torch
        import torch
        return values.index_select(0, torch.tensor(rows, device=values.device))
    if hasattr(values, "take"):
        return values.take(rows, axis=0)
    raise invalid_argument(f"rows of a {type(values).__qualname__} can't be shuffled; give a NumPy array or a torch tensor")


def as_source(given: Union[Source, Mapping[str, Any]]) -> Source:
    if isinstance(given, Source):
        return given
    if isinstance(given, Mapping):
        return Arrays(given)
    raise invalid_argument(f"a source is a dict of arrays or a stratagem.Source, not a {type(given).__qualname__}")


# --- to the ABI

_keys = itertools.count(1)
_lent: dict[int, Source] = {}  # until release


@_SOURCE["read"]
def _read(key: int, rows: Any, num_rows: int, batch: Any) -> Optional[int]:
    try:
        tree = Tree(_lent[key].read(rows[:num_rows]), where="batch")
        batch[0] = tree.abi  # handed over: what is in it belongs to the release that went with it
        return None
    except BaseException as error:
        return give_error(error)


@_SOURCE["release"]
def _release(key: int) -> None:
    _lent.pop(key, None)


def give_source(name: str, source: Source) -> abi.stg_data_source:
    """A struct whose receiver calls release."""
    key = next(_keys)
    _lent[key] = source
    flags = abi.STG_SOURCE_ANY_THREAD if source.any_thread else 0
    return abi.stg_data_source(sizeof(abi.stg_data_source), text(name), key, source.num_samples, flags, _read, _release)
