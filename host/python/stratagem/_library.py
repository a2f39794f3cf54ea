# SPDX-License-Identifier: Apache-2.0
"""libstratagem: where it is, and its functions."""
from __future__ import annotations

import ctypes
import json
import os
from ctypes import byref
from typing import Any, Callable, Optional

from . import _generated as abi
from ._text import read_text
from .errors import Code, Error, check
from .trees import take_tree

FILE = f"libstratagem.so.{abi.STG_ABI_MAJOR}"
VARIABLE = "STRATAGEM_LIBRARY"

_loaded: Optional[ctypes.CDLL] = None
_functions: dict[str, Callable[..., Any]] = {}


def _load() -> ctypes.CDLL:
    path = os.environ.get(VARIABLE) or FILE
    try:
        return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise Error(Code.UNAVAILABLE, f"{path} can't be loaded: {error}; {VARIABLE} (now {os.environ.get(VARIABLE)!r}) may name the file, else the "
                                      f"system's loader looks for {FILE}") from error


def function(name: str) -> Callable[..., Any]:
    """A function of libstratagem, which is loaded at the first one."""
    global _loaded
    found = _functions.get(name)
    if found is None:
        _loaded = _loaded or _load()
        try:
            found = _functions[name] = abi.EXPORTED[name]((name, _loaded))
        except AttributeError as error:
            raise Error(Code.UNIMPLEMENTED, f"{_loaded._name} has no {name}: it is older than this package; install the libstratagem of the same "
                                            "version") from error
    return found


def ask(name: str, *arguments: Any) -> Any:
    """What a function answers as JSON."""
    result = abi.stg_tree()
    check(function(name)(*arguments, byref(result)))
    return json.loads(take_tree(result))


def version() -> str:
    """libstratagem's version."""
    return read_text(function("stg_version")())
