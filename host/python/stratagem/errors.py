# SPDX-License-Identifier: Apache-2.0
"""Errors in both directions: a stg_error becomes an Error, an exception in a callback becomes a stg_error.

Where an Error ends in an exception that one of the caller's own callbacks raised, that very exception is its cause.

>>> error = Error(Code.NOT_FOUND, "there is no file weights.pt")
>>> print(error)
NOT_FOUND: there is no file weights.pt
>>> error.code is Code.NOT_FOUND, error.replica, error.device
(True, None, None)
"""
from __future__ import annotations

import enum
from ctypes import addressof, cast, c_void_p
from typing import NoReturn, Optional

from . import _generated as abi
from ._text import read_text, text


class Code(enum.IntEnum):
    """What kind of error it is: the codes of gRPC and Abseil."""

    CANCELLED = abi.STG_CANCELLED
    UNKNOWN = abi.STG_UNKNOWN
    INVALID_ARGUMENT = abi.STG_INVALID_ARGUMENT
    DEADLINE_EXCEEDED = abi.STG_DEADLINE_EXCEEDED
    NOT_FOUND = abi.STG_NOT_FOUND
    ALREADY_EXISTS = abi.STG_ALREADY_EXISTS
    PERMISSION_DENIED = abi.STG_PERMISSION_DENIED
    RESOURCE_EXHAUSTED = abi.STG_RESOURCE_EXHAUSTED
    FAILED_PRECONDITION = abi.STG_FAILED_PRECONDITION
    ABORTED = abi.STG_ABORTED
    OUT_OF_RANGE = abi.STG_OUT_OF_RANGE
    UNIMPLEMENTED = abi.STG_UNIMPLEMENTED
    INTERNAL = abi.STG_INTERNAL
    UNAVAILABLE = abi.STG_UNAVAILABLE
    DATA_LOSS = abi.STG_DATA_LOSS
    UNAUTHENTICATED = abi.STG_UNAUTHENTICATED


class Error(Exception):
    """What went wrong, where, and what would be right."""

    def __init__(self, code: int, message: str, *, flags: int = abi.STG_ERROR_INSTANCE_USABLE, replica: Optional[int] = None,
                 rank: Optional[int] = None, device: Optional[tuple[int, int]] = None) -> None:
        super().__init__(code, message)
        self.code = Code(code) if code in iter(Code) else Code.UNKNOWN
        self.message = message
        self.flags = flags
        self.replica, self.rank = replica, rank
        self.device = device  #: (kind, index), as in DLPack

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"

    @property
    def cause(self) -> Optional[BaseException]:
        """The error behind this one: another Error, or the exception that a callback raised."""
        return self.__cause__

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later."""
        return bool(self.flags & abi.STG_ERROR_RETRYABLE)

    @property
    def instance_usable(self) -> bool:
        """Whether the session or strategy takes further calls."""
        return bool(self.flags & abi.STG_ERROR_INSTANCE_USABLE)


def invalid_argument(message: str) -> Error:
    return Error(Code.INVALID_ARGUMENT, message)


def failed_precondition(message: str) -> Error:
    return Error(Code.FAILED_PRECONDITION, message)


# --- from the ABI

def check(address: Optional[int]) -> None:
    """Raises the error that a function returned, and releases it. None is success."""
    if address is not None:
        _raise(address)


def _raise(address: int) -> NoReturn:
    error = read_error(address)
    abi.stg_error.from_address(address).release(abi.stg_error.from_address(address))
    origin = _origin_of(error)
    if origin is not None and not isinstance(origin, Exception):
        raise origin  # KeyboardInterrupt, SystemExit: what stops a program stops it
    raise error


def _origin_of(error: BaseException) -> Optional[BaseException]:
    while isinstance(error, Error) and error.__cause__ is not None:
        error = error.__cause__
    return None if isinstance(error, Error) else error


def read_error(address: int) -> Error:
    """The error at this address with its causes; it stays its owner's."""
    given = abi.stg_error.from_address(address)
    error = Error(given.code, read_text(given.message), flags=given.flags, replica=None if given.replica < 0 else given.replica,
                  rank=None if given.rank < 0 else given.rank,
                  device=(given.device.kind, given.device.index) if given.device.kind != abi.STG_DEVICE_NONE else None)
    own = _own(given)
    if own is not None:
        error.__cause__ = own
    elif given.cause:
        # Our own exception is the cause itself; what it was told as in between says the same.
        cause = addressof(given.cause.contents)
        error.__cause__ = _own(given.cause.contents) or read_error(cause)
    return error


# --- to the ABI

_given: dict[int, tuple[abi.stg_error, BaseException]] = {}  # by address, until release


@dict(abi.stg_error._fields_)["release"]
def _release(error: "abi.POINTER(abi.stg_error)") -> None:  # type: ignore[valid-type]
    _given.pop(addressof(error.contents), None)


_release_address = cast(_release, c_void_p).value


def _own(given: abi.stg_error) -> Optional[BaseException]:
    if cast(given.release, c_void_p).value != _release_address:
        return None
    known = _given.get(given.owner)
    return None if known is None else known[1]


def _code_of(exception: BaseException) -> int:
    if isinstance(exception, Error):
        return exception.code
    for kinds, code in ((MemoryError, Code.RESOURCE_EXHAUSTED), (NotImplementedError, Code.UNIMPLEMENTED), (FileNotFoundError, Code.NOT_FOUND),
                        (PermissionError, Code.PERMISSION_DENIED), ((ValueError, TypeError), Code.INVALID_ARGUMENT),
                        (LookupError, Code.OUT_OF_RANGE), ((KeyboardInterrupt, SystemExit), Code.CANCELLED)):
        if isinstance(exception, kinds):  # type: ignore[arg-type]
            return code
    return Code.UNKNOWN


def give_error(exception: BaseException, place: str = "") -> int:
    """A stg_error that says what `exception` does, after `place`, owned by whoever gets it."""
    try:
        words = exception.message if isinstance(exception, Error) else f"{type(exception).__name__}: {exception}"
    except BaseException:  # its __str__ raises
        words = type(exception).__name__
    error = abi.stg_error(code=_code_of(exception), flags=abi.STG_ERROR_INSTANCE_USABLE, replica=-1, rank=-1,
                          device=abi.stg_device(abi.STG_DEVICE_NONE, -1), message=text(place + words), release=_release)
    address = addressof(error)
    error.owner = address
    _given[address] = (error, exception)
    return address
