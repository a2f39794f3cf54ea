# SPDX-License-Identifier: Apache-2.0
"""Tensors in and out without a copy, by DLPack: what NumPy, PyTorch and others make goes in, and a Tensor that comes out is one of theirs.

What goes in is handed over as its library's own DLPack handle, so whoever drops it last, on whatever thread, runs that library's deleter
and none of this code. (What has a buffer and no DLPack, such as array.array, gets a handle of ours.)
"""
from __future__ import annotations

import ctypes
import math
import sys
from ctypes import POINTER, Structure, addressof, byref, c_char_p, c_int, c_int64, c_ssize_t, c_uint8, c_void_p, cast, py_object, pythonapi
from typing import Any, Callable, Optional, Union

from . import _generated as abi
from .errors import failed_precondition, invalid_argument

_DELETER = dict(abi.stg_tensor._fields_)["deleter"]

# Names of dtypes: DLPack's code and bits, the buffer protocol's letter (none for what it can't say).
_DTYPES = {"bool": (abi.STG_DTYPE_BOOL, 8, "?"), "int8": (abi.STG_DTYPE_INT, 8, "b"), "int16": (abi.STG_DTYPE_INT, 16, "h"),
           "int32": (abi.STG_DTYPE_INT, 32, "i"), "int64": (abi.STG_DTYPE_INT, 64, "q"), "uint8": (abi.STG_DTYPE_UINT, 8, "B"),
           "uint16": (abi.STG_DTYPE_UINT, 16, "H"), "uint32": (abi.STG_DTYPE_UINT, 32, "I"), "uint64": (abi.STG_DTYPE_UINT, 64, "Q"),
           "float16": (abi.STG_DTYPE_FLOAT, 16, "e"), "float32": (abi.STG_DTYPE_FLOAT, 32, "f"), "float64": (abi.STG_DTYPE_FLOAT, 64, "d"),
           "bfloat16": (abi.STG_DTYPE_BFLOAT, 16, ""), "complex64": (abi.STG_DTYPE_COMPLEX, 64, ""), "complex128": (abi.STG_DTYPE_COMPLEX, 128, "")}
_NAMES = {(code, bits): (name, letter) for name, (code, bits, letter) in _DTYPES.items()}
_KINDS = {**dict.fromkeys("bhilqn", abi.STG_DTYPE_INT), **dict.fromkeys("BHILQN", abi.STG_DTYPE_UINT), **dict.fromkeys("efd", abi.STG_DTYPE_FLOAT),
          "?": abi.STG_DTYPE_BOOL}


class _Legacy(Structure):
    """DLManagedTensor, DLPack's handle before 1.0."""


_LEGACY_DELETER = ctypes.CFUNCTYPE(None, POINTER(_Legacy))
_Legacy._fields_ = [("view", abi.stg_tensor_view), ("owner", c_void_p), ("deleter", _LEGACY_DELETER)]


class _Buffer(Structure):
    """Py_buffer."""

    _fields_ = [("buf", c_void_p), ("obj", c_void_p), ("len", c_ssize_t), ("itemsize", c_ssize_t), ("readonly", c_int), ("ndim", c_int),
                ("format", c_char_p), ("shape", POINTER(c_ssize_t)), ("strides", POINTER(c_ssize_t)), ("suboffsets", POINTER(c_ssize_t)),
                ("internal", c_void_p)]


_PyBUF_RECORDS_RO = 0x0018 | 0x0004
_VERSIONED, _LEGACY, _USED, _USED_LEGACY = (c_char_p(name) for name in (b"dltensor_versioned", b"dltensor", b"used_dltensor_versioned",
                                                                       b"used_dltensor"))


def _python(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function = getattr(pythonapi, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


# Twice where a destructor needs it: there the capsule is a dying object, which must not become a Python one again.
_capsule_new = _python("PyCapsule_New", py_object, c_void_p, c_char_p, c_void_p)
_capsule_name = _python("PyCapsule_GetName", c_char_p, py_object)
_capsule_pointer = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", pythonapi))
_capsule_rename = _python("PyCapsule_SetName", c_int, py_object, c_char_p)
_dying_is = _python("PyCapsule_IsValid", c_int, c_void_p, c_char_p)
_dying_pointer = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", pythonapi))
_get_buffer = _python("PyObject_GetBuffer", c_int, py_object, POINTER(_Buffer), c_int)
_release_buffer = _python("PyBuffer_Release", None, POINTER(_Buffer))

# Handles of ours that somebody holds, by address: the handle, what it points to, and what is to be done when it is dropped.
_held: dict[int, tuple[Structure, Any, Optional[Callable[[], None]]]] = {}


# With what they need at hand: they may be called when the interpreter ends, and this module's names are gone.
def _drop(address: int, handles: dict[int, Any] = _held) -> None:
    held = handles.pop(address, None)
    if held is not None and held[2] is not None:
        held[2]()


@_DELETER
def _delete(tensor: Any, drop: Callable[[int], None] = _drop, address_of: Callable[[Any], int] = addressof) -> None:
    drop(address_of(tensor.contents))


@_LEGACY_DELETER
def _delete_legacy(tensor: Any, drop: Callable[[int], None] = _drop, address_of: Callable[[Any], int] = addressof) -> None:
    drop(address_of(tensor.contents))


def _hold(view: abi.stg_tensor_view, keep: Any, done: Optional[Callable[[], None]] = None, flags: int = 0) -> int:
    """A handle of ours over memory that `keep` keeps. `done` is called when it is dropped. The address of a stg_tensor."""
    tensor = abi.stg_tensor(abi.STG_DLPACK_MAJOR, abi.STG_DLPACK_MINOR, None, _delete, flags, view)
    _held[addressof(tensor)] = (tensor, keep, done)
    return addressof(tensor)


def delete_tensor(address: int) -> None:
    """Drops a stg_tensor that is ours to drop."""
    tensor = abi.stg_tensor.from_address(address)
    deleter = tensor.deleter
    if deleter:
        deleter(tensor)


# --- in

Place = Union[str, tuple[Any, Any]]  # where a value stands: a text, or (the place around it, key); for messages


def place_text(where: Place, whole: str = "") -> str:
    """`whole` is what to call the value that stands in no other."""
    return (where or whole) if isinstance(where, str) else f"{place_text(where[0])}/{where[1]}"


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "__dlpack__") or _has_buffer(value)


def _has_buffer(value: Any) -> bool:
    try:
        memoryview(value)
    except TypeError:
        return False
    return True


def give_tensor(value: Any, where: Place) -> int:
    """The address of a stg_tensor over the memory of `value`, owned by whoever gets it. `where` is the place, for messages."""
    if hasattr(value, "__dlpack__"):
        try:
            return _from_capsule(_capsule_of(value))
        except Exception as error:
            raise invalid_argument(f"{place_text(where, 'the tensor')}: a {_type_name(value)} that can't be handed over by DLPack: {error}") from error
    return _from_buffer(value, where)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _capsule_of(value: Any) -> Any:
    try:
        return value.__dlpack__(max_version=(abi.STG_DLPACK_MAJOR, abi.STG_DLPACK_MINOR))
    except TypeError:  # a library from before DLPack 1.0
        return value.__dlpack__()


def _from_capsule(capsule: Any) -> int:
    name = _capsule_name(capsule)
    if name == _VERSIONED.value:
        address = _capsule_pointer(capsule, _VERSIONED)
        _capsule_rename(capsule, _USED)
        return address
    if name != _LEGACY.value:
        raise ValueError(f"__dlpack__ gave a capsule of {name!r}")
    legacy = cast(_capsule_pointer(capsule, _LEGACY), POINTER(_Legacy))
    _capsule_rename(capsule, _USED_LEGACY)
    return _hold(legacy.contents.view, None, lambda: legacy.contents.deleter and legacy.contents.deleter(legacy))


def _from_buffer(value: Any, where: Place) -> int:
    buffer = _Buffer()
    _get_buffer(memoryview(value), byref(buffer), _PyBUF_RECORDS_RO)  # memoryview: it sets strides where others leave them out
    letter = (buffer.format or b"B").decode().lstrip("@=<")
    strides = [buffer.strides[i] for i in range(buffer.ndim)]
    if letter not in _KINDS or any(stride % buffer.itemsize for stride in strides):
        _release_buffer(byref(buffer))
        raise invalid_argument(f"{place_text(where, 'the tensor')}: a buffer of format \"{letter}\", strides {strides}; give one of "
                               f"{''.join(_KINDS)}, with strides in whole elements")
    shape = (c_int64 * buffer.ndim)(*(buffer.shape[i] for i in range(buffer.ndim)))
    steps = (c_int64 * buffer.ndim)(*(stride // buffer.itemsize for stride in strides))
    view = abi.stg_tensor_view(buffer.buf, abi.stg_device(abi.STG_DEVICE_CPU, 0), buffer.ndim, abi.stg_dtype(_KINDS[letter], 8 * buffer.itemsize, 1),
                               shape, steps, 0)
    return _hold(view, (shape, steps), lambda: _release_buffer(byref(buffer)), abi.STG_TENSOR_READ_ONLY if buffer.readonly else 0)


# --- out

@ctypes.CFUNCTYPE(None, c_void_p)
def _capsule_unused(capsule: int) -> None:
    """The destructor of a capsule: whoever used it has renamed it."""
    for name in (_VERSIONED, _LEGACY):
        if _dying_is(capsule, name):
            _drop(_dying_pointer(capsule, name))


class Tensor:
    """A tensor that came out. Its memory lives as long as it, or anything made from it, does; nothing here copies it.

    >>> import array
    >>> from stratagem.trees import Tree, take_tree
    >>> tensor = take_tree(Tree(array.array("d", [1, 2])).abi)
    >>> tensor.dtype, tensor.shape, tensor.tolist()
    ('float64', (2,), [1.0, 2.0])

    `numpy.from_dlpack(t)` and `torch.from_dlpack(t)` take it, as any library does that knows DLPack; `memoryview(t.buffer())` needs none.
    """

    __slots__ = ("_address", "_borrowed", "__weakref__")

    def __init__(self, address: int, borrowed: bool = False) -> None:
        self._address: Optional[int] = address
        self._borrowed = borrowed

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter ends, this module's names are gone, and all memory is about to be.
        if not self._borrowed and self._address is not None and not is_finalizing():
            delete_tensor(self._address)

    def _expire(self) -> None:
        """A borrowed tensor's memory is gone."""
        self._address = None

    def _live_view(self) -> abi.stg_tensor_view:
        if self._address is None:
            raise failed_precondition("this tensor was lent for the time of a callback, which is over; keep a copy: tensor.numpy(), tensor.torch()")
        return abi.stg_tensor.from_address(self._address).view

    @property
    def shape(self) -> tuple[int, ...]:
        view = self._live_view()
        return tuple(view.shape[i] for i in range(view.num_dims))

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        view = self._live_view()
        return tuple(view.strides[i] for i in range(view.num_dims))

    @property
    def dtype(self) -> str:
        """"float32" and so on."""
        dtype = self._live_view().dtype
        return _NAMES.get((dtype.code, dtype.bits), (f"dtype({dtype.code}, {dtype.bits})", ""))[0]

    @property
    def device(self) -> tuple[int, int]:
        """(kind, index), as in DLPack: a CPU is (1, 0)."""
        device = self._live_view().device
        return device.kind, device.index

    @property
    def data_ptr(self) -> int:
        """The address of the first element."""
        view = self._live_view()
        return (view.data or 0) + view.byte_offset

    @property
    def read_only(self) -> bool:
        self._live_view()
        return bool(abi.stg_tensor.from_address(self._address).flags & abi.STG_TENSOR_READ_ONLY)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return "Tensor(expired)" if self._address is None else f"Tensor({self.dtype}, {self.shape})"

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None, max_version: Optional[tuple[int, int]] = None, dl_device: Optional[tuple[int, int]] = None,
                   copy: Optional[bool] = None) -> Any:
        """See DLPack. What is ready is so on the device's default stream."""
        if dl_device is not None and tuple(dl_device) != self.device:
            raise BufferError(f"the tensor is on device {self.device}, not {dl_device}; to_host copies")
        if stream not in (None, -1, 0, 1):
            raise BufferError(f"results are ordered on the default stream, not on {stream}")
        source = self.copy() if copy or self._borrowed else self
        flags = (abi.STG_TENSOR_READ_ONLY if source.read_only else 0) | (abi.STG_TENSOR_IS_COPIED if source is not self else 0)
        if max_version is not None and max_version[0] >= 1:
            return _capsule_new(_hold(source._live_view(), source, flags=flags), _VERSIONED, cast(_capsule_unused, c_void_p))
        if source.read_only:
            raise BufferError("the tensor is read-only, which DLPack before 1.0 can't say")
        legacy = _Legacy(source._live_view(), None, _delete_legacy)
        _held[addressof(legacy)] = (legacy, source, None)
        return _capsule_new(addressof(legacy), _LEGACY, cast(_capsule_unused, c_void_p))

    def copy(self) -> "Tensor":
        """The same in memory of its own, with the same strides. Only on a CPU: from elsewhere a strategy's to_host copies."""
        view, shape, strides = self._live_view(), self.shape, self.strides
        if self.device[0] != abi.STG_DEVICE_CPU:
            raise BufferError(f"the tensor is on device {self.device}, from where only a strategy's to_host copies")
        num_elements = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
        memory = (c_uint8 * max(1, num_elements * view.dtype.bits // 8))()
        ctypes.memmove(memory, self.data_ptr, num_elements * view.dtype.bits // 8)
        sizes, steps = (c_int64 * len(shape))(*shape), (c_int64 * len(shape))(*strides)
        copied = abi.stg_tensor_view(addressof(memory), view.device, len(shape), view.dtype, sizes, steps, 0)
        return Tensor(_hold(copied, (memory, sizes, steps)))

    def numpy(self) -> Any:
        """A NumPy array over the same memory (of a tensor lent to a callback: over a copy)."""
        import numpy
        return numpy.from_dlpack(self)

    def torch(self) -> Any:
        """A torch.Tensor over the same memory (of a tensor lent to a callback: over a copy)."""
        import torch
        return torch.from_dlpack(self)

    def buffer(self) -> memoryview:
        """A view of the memory for Python without NumPy (of a tensor lent to a callback: of a copy). Only of a contiguous one, on a CPU, of a
        dtype that `array` knows."""
        if self._borrowed:
            return self.copy().buffer()
        view, shape = self._live_view(), self.shape
        letter = _NAMES.get((view.dtype.code, view.dtype.bits), ("", ""))[1].replace("e", "")  # memoryview doesn't know half floats
        dense = [math.prod(shape[i + 1:]) for i in range(len(shape))]
        contiguous = 0 in shape or all(size == 1 or stride == wanted for size, stride, wanted in zip(shape, self.strides, dense))
        if not letter or not contiguous or self.device[0] != abi.STG_DEVICE_CPU:
            raise BufferError(f"{self!r} with strides {self.strides} on device {self.device} can't be a memoryview")
        num_bytes = math.prod(shape) * view.dtype.bits // 8
        memory = (c_uint8 * num_bytes).from_address(self.data_ptr) if num_bytes else (c_uint8 * 0)()
        memory._owner = self
        whole = memoryview(memory).cast("B")
        whole = whole.toreadonly() if self.read_only else whole
        return whole.cast(letter, list(shape)) if 0 not in shape else whole.cast(letter)

    def tolist(self) -> Any:
        """Its elements as Python numbers, in nested lists; a number for a 0-dim one."""
        return self.buffer().tolist()

    def item(self) -> Any:
        """The only element."""
        if math.prod(self.shape) != 1:
            raise invalid_argument(f"{self!r} has {math.prod(self.shape)} elements, not one")
        value = self.tolist()
        while isinstance(value, list):
            value = value[0]
        return value
