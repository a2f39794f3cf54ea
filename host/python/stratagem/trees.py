# SPDX-License-Identifier: Apache-2.0
"""Python's values as value trees, and back: None, bool, int, float, str, bytes, list, tuple, dict with str keys, tensors, and objects that
pass through unread (Opaque).
"""
from __future__ import annotations

import itertools
import numbers
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, addressof, c_uint64, cast, create_string_buffer, pointer, sizeof, string_at
from typing import Any, Callable, Optional

from . import _generated as abi
from ._text import address_of_bytes, read_text, text
from .errors import give_error, invalid_argument
from .tensors import Place, Tensor, delete_tensor, give_tensor, is_tensor, place_text

Convert = Callable[[Tensor], Any]  # what a tensor that comes out is made into

_TREE = dict(abi.stg_tree._fields_)
_OPAQUE = dict(abi.stg_opaque._fields_)


# --- objects that pass through

class Opaque:
    """An object that passes through a strategy unread: what comes out is the same object. In a batch every replica gets it.

    `reduce`, where given, makes one of the objects that the replicas gave, in their order: how a metric brings its own reduction.
    """

    def __init__(self, value: Any, reduce: Optional[Callable[[list[Any]], Any]] = None) -> None:
        self.value, self.reduce = value, reduce


# Our opaques by address, once per reference. Lists, whose append and pop need no lock: a release may come on any thread, and out of a
# garbage collection.
_references: dict[int, list[tuple[abi.stg_opaque, Opaque]]] = {}


@_OPAQUE["retain"]
def _retain(opaque: Any) -> None:
    references = _references[addressof(opaque.contents)]
    references.append(references[0])


@_OPAQUE["release"]
def _release_opaque(opaque: Any) -> None:
    address = addressof(opaque.contents)
    references = _references[address]
    last = references.pop()
    if not references:
        _references.pop(address, None)
    del last


@_OPAQUE["reduce"]
def _reduce(objects: Any, num_objects: int, out: Any) -> Optional[int]:
    try:
        given = [_references[addressof(objects[i].contents)][0][1] for i in range(num_objects)]
        merged = given[0].reduce([opaque.value for opaque in given])
        out[0] = cast(_give_opaque(Opaque(merged, given[0].reduce)), POINTER(abi.stg_opaque))
        return None
    except BaseException as error:
        return give_error(error)


def _give_opaque(value: Opaque) -> int:
    opaque = abi.stg_opaque(sizeof(abi.stg_opaque), text("python object"), _retain, _release_opaque)
    if value.reduce is not None:
        opaque.reduce = _reduce
    _references[addressof(opaque)] = [(opaque, value)]
    return addressof(opaque)


class _Foreign(Opaque):
    """An object of somebody else's, which can be handed back and nothing else."""

    def __init__(self, address: int) -> None:
        super().__init__(None)
        self.address = address
        self.type_name = read_text(abi.stg_opaque.from_address(address).type_name)

    def give(self) -> int:
        opaque = abi.stg_opaque.from_address(self.address)
        opaque.retain(opaque)
        return self.address

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():
            return  # see Tensor
        opaque = abi.stg_opaque.from_address(self.address)
        opaque.release(opaque)


# --- in

# stg_value and stg_entry as numbers: a union is the 64 bits of whichever member it is.
_VALUE, _ENTRY = struct.Struct("=IIq"), struct.Struct("=QQIIq")
_VALUE_AT = abi.stg_entry.value.offset
assert (_VALUE.size, _ENTRY.size, _VALUE_AT, abi.stg_value.as_.offset) == (sizeof(abi.stg_value), sizeof(abi.stg_entry), 16, 8)
_Node = tuple[int, int, int]  # type, count, bits


class Tree:
    """A Python value as a stg_tree, for one call.

    >>> take_tree(Tree({"b": (1, None), "a": [0.5, "text"]}).abi)
    {'b': (1, None), 'a': [0.5, 'text']}

    With `moved` the callee owns what is in it, and may keep its tensors; else it is borrowed and dropped when this is closed.
    """

    __slots__ = ("abi", "_memory", "_num_nodes")

    def __init__(self, value: Any, moved: bool = True, where: str = "") -> None:
        self.abi = abi.stg_tree()
        self._memory: list[Any] = []  # what the tree points to
        self._num_nodes = 0
        handles: list[_Node] = []
        try:
            node = self._node(value, where, 0, handles)
        except BaseException:
            for kind, _, bits in handles:
                _drop_leaf(kind, bits)
            raise
        _VALUE.pack_into(self.abi, 0, *node)
        if moved:
            key = next(_keys)
            _moved[key] = self._memory
            self.abi.owner, self.abi.release = key, _release

    def __enter__(self) -> Any:
        return pointer(self.abi)

    def __exit__(self, *_: Any) -> None:
        """Drops what was borrowed, or what the callee did not take."""
        if self.abi.release:
            self.abi.release(self.abi)
        elif self.abi.root.type != abi.STG_NONE:
            _release_leaves(addressof(self.abi))

    def _node(self, value: Any, where: Place, depth: int, handles: list[_Node]) -> _Node:
        self._num_nodes += 1
        if depth > abi.STG_MAX_TREE_DEPTH or self._num_nodes > abi.STG_MAX_TREE_NODES:
            raise invalid_argument(f"{place_text(where)}: a tree has at most {abi.STG_MAX_TREE_DEPTH} levels and {abi.STG_MAX_TREE_NODES} values; "
                                   "does it hold itself?")
        kind = type(value)  # the usual types first: a check by isinstance takes longer than all that is done for some of them
        if kind is dict:
            return self._dict(value, where, depth, handles)
        if kind is list or kind is tuple:
            return self._list(value, where, depth, handles)
        if kind is int or kind is float or kind is bool or value is None:
            return _number(value, where)
        if kind is str:
            return (abi.STG_STRING, *self._bytes(_encode(value, where)))
        if hasattr(kind, "__dlpack__"):
            handles.append((abi.STG_TENSOR, 0, give_tensor(value, where)))
            return handles[-1]
        return self._unusual(value, where, depth, handles)

    def _unusual(self, value: Any, where: Place, depth: int, handles: list[_Node]) -> _Node:
        if isinstance(value, Mapping):
            return self._dict(value, where, depth, handles)
        if isinstance(value, (list, tuple)):
            return self._list(value, where, depth, handles)
        if isinstance(value, str):
            return (abi.STG_STRING, *self._bytes(_encode(value, where)))
        if isinstance(value, (bytes, bytearray)):
            return (abi.STG_BYTES, *self._bytes(bytes(value)))
        if isinstance(value, Opaque):
            handles.append((abi.STG_OPAQUE, 0, value.give() if isinstance(value, _Foreign) else _give_opaque(value)))
            return handles[-1]
        if isinstance(value, numbers.Real):
            return _number(value, where)
        if is_tensor(value):
            handles.append((abi.STG_TENSOR, 0, give_tensor(value, where)))
            return handles[-1]
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise invalid_argument(f"{place_text(where, 'the value')}: a {name} is no value of a tree: None, bool, int, float, str, bytes, list, tuple, "
                               "dict or a tensor; other objects pass as stratagem.Opaque(...)")

    def _list(self, value: Sequence[Any], where: Place, depth: int, handles: list[_Node]) -> _Node:
        nodes = [_VALUE.pack(*self._node(item, (where, index), depth + 1, handles)) for index, item in enumerate(value)]
        return abi.STG_LIST if isinstance(value, list) else abi.STG_TUPLE, len(nodes), self._keep(b"".join(nodes))

    def _dict(self, value: Mapping[str, Any], where: Place, depth: int, handles: list[_Node]) -> _Node:
        entries = []
        for key, item in value.items():
            if not isinstance(key, str):
                raise invalid_argument(f"{place_text(where, 'the dict')}: the key {key!r} is no str")
            size_bytes, address = self._bytes(_encode(key, where))
            entries.append(_ENTRY.pack(address, size_bytes, *self._node(item, (where, key), depth + 1, handles)))
        return abi.STG_DICT, len(entries), self._keep(b"".join(entries))

    def _bytes(self, value: bytes) -> tuple[int, int]:
        self._memory.append(value)
        return len(value), address_of_bytes(value)

    def _keep(self, items: bytes) -> int:
        """The address of a copy that can be written to: whoever takes a leaf out says so there."""
        memory = create_string_buffer(items, len(items)) if items else None
        self._memory.append(memory)
        return addressof(memory) if memory is not None else 0


def _number(value: Any, where: Place) -> _Node:
    if value is None:
        return abi.STG_NONE, 0, 0
    if isinstance(value, bool):
        return abi.STG_BOOL, 0, int(value)
    if isinstance(value, numbers.Integral):
        if not -2**63 <= value < 2**63:
            raise invalid_argument(f"{place_text(where)}: {value} doesn't fit into 64 bits")
        return abi.STG_INT64, 0, int(value)
    return abi.STG_DOUBLE, 0, struct.unpack("=q", struct.pack("=d", value))[0]


def _encode(value: str, where: Place) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise invalid_argument(f"{place_text(where, 'the text')}: {value!r} is no valid text: {error}") from error


_keys = itertools.count(1)
_moved: dict[int, list[Any]] = {}  # memory of trees that were handed over, by their owner field


@_TREE["release"]
def _release(tree: Any) -> None:
    tree = tree.contents
    memory = _moved.pop(tree.owner, None)
    if memory is not None:
        _release_leaves(addressof(tree))
        tree.release = _TREE["release"]()


def _nodes(address: int, count: int, is_dict: bool) -> Iterator[tuple[int, _Node]]:
    """Each value of a list or a dict, with its address."""
    step, at = (_ENTRY.size, _VALUE_AT) if is_dict else (_VALUE.size, 0)
    items = string_at(address, count * step)
    for offset in range(at, count * step, step):
        yield address + offset, _VALUE.unpack_from(items, offset)


def _release_leaves(address: int) -> None:
    kind, count, bits = _VALUE.unpack(string_at(address, _VALUE.size))
    if kind in (abi.STG_TENSOR, abi.STG_OPAQUE):
        _take_out(address)
        _drop_leaf(kind, bits)
    elif count and kind in (abi.STG_LIST, abi.STG_TUPLE, abi.STG_DICT):
        for place, _ in _nodes(bits, count, kind == abi.STG_DICT):
            _release_leaves(place)


def _take_out(address: int) -> None:
    c_uint64.from_address(address).value = abi.STG_NONE  # type and count


def _drop_leaf(kind: int, address: int) -> None:
    if kind == abi.STG_TENSOR:
        delete_tensor(address)
    else:
        opaque = abi.stg_opaque.from_address(address)
        opaque.release(opaque)


# --- out

def take_tree(tree: abi.stg_tree, convert: Optional[Convert] = None) -> Any:
    """The Python value of a tree that is ours, which is then released; its tensors live on by themselves."""
    try:
        return _read(addressof(tree), _VALUE.unpack_from(tree), convert, None)
    finally:
        if tree.release:
            tree.release(tree)


class Borrowed:
    """The Python value of a tree that was lent for a callback. Its tensors expire with it."""

    def __init__(self, value: abi.stg_value, convert: Optional[Convert] = None) -> None:
        self._tensors: list[Tensor] = []
        self.value = _read(addressof(value), _VALUE.unpack_from(value), convert, self._tensors)

    def expire(self) -> None:
        for tensor in self._tensors:
            tensor._expire()


def _read(address: int, node: _Node, convert: Optional[Convert], lent: Optional[list[Tensor]]) -> Any:
    kind, count, bits = node
    if kind == abi.STG_TENSOR:
        tensor = Tensor(bits, borrowed=lent is not None)
        if lent is None:
            _take_out(address)
        else:
            lent.append(tensor)
        return convert(tensor) if convert else tensor
    if kind == abi.STG_DICT:
        keys = _ENTRY.iter_unpack(string_at(bits, count * _ENTRY.size)) if count else ()
        return {string_at(key[0], key[1]).decode("utf-8", "replace"): _read(place, item, convert, lent)
                for key, (place, item) in zip(keys, _nodes(bits, count, True) if count else ())}
    if kind in (abi.STG_LIST, abi.STG_TUPLE):
        items = [_read(place, item, convert, lent) for place, item in _nodes(bits, count, False)] if count else []
        return items if kind == abi.STG_LIST else tuple(items)
    if kind == abi.STG_OPAQUE:
        return _read_opaque(bits)
    if kind == abi.STG_STRING:
        return string_at(bits, count).decode("utf-8", "replace") if count else ""
    if kind == abi.STG_BYTES:
        return string_at(bits, count) if count else b""
    if kind == abi.STG_BOOL:
        return bits != 0
    return bits if kind == abi.STG_INT64 else struct.unpack("=d", struct.pack("=q", bits))[0] if kind == abi.STG_DOUBLE else None


def _read_opaque(address: int) -> Opaque:
    own = _references.get(address)
    if own is not None:
        return own[0][1]
    opaque = abi.stg_opaque.from_address(address)
    opaque.retain(opaque)
    return _Foreign(address)
