# SPDX-License-Identifier: Apache-2.0
"""Text across the ABI: UTF-8 with a length."""
from __future__ import annotations

from ctypes import PYFUNCTYPE, c_char_p, c_void_p, cast, py_object, pythonapi, string_at

from . import _generated as abi

#: The address of the memory of a bytes object, which lives as long as the object.
address_of_bytes = PYFUNCTYPE(c_void_p, py_object)(("PyBytes_AsString", pythonapi))
EMPTY = abi.stg_string()


def text(value: str) -> abi.stg_string:
    """`value` as a stg_string, which keeps the bytes alive as long as it, or the struct that it is put in, lives."""
    if not value:
        return EMPTY
    encoded = value.encode("utf-8", "surrogateescape")
    return abi.stg_string(cast(c_char_p(encoded), c_void_p), len(encoded))


def read_text(value: abi.stg_string) -> str:
    size_bytes = value.size_bytes
    return string_at(value.data, size_bytes).decode("utf-8", "replace") if size_bytes else ""
