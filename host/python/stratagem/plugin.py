# SPDX-License-Identifier: Apache-2.0
"""Plugins: what there is, and one that is loaded. Loading checks all that libstratagem checks, and never unloads."""
from __future__ import annotations

import json
import os
import sys
from ctypes import POINTER, byref
from typing import Any, Callable, Mapping, Optional, Union

from . import _generated as abi
from ._library import ask, function
from ._text import read_text, text
from .errors import check, failed_precondition, invalid_argument
from .services import Services

Path = Union[str, "os.PathLike[str]"]


def list_plugins(config_path: Path = "") -> dict[str, Any]:
    """What is in the search folders, without loading it: {"folders": [...], "plugins": [...]}. With a config, its plugin_path is searched first."""
    return ask("stg_list_plugins", text(os.fspath(config_path)))


def inspect_plugin(path: Path) -> dict[str, Any]:
    """The note of a plugin file, without loading it."""
    return ask("stg_inspect_plugin", text(os.fspath(path)))


def describe_plugin(path: Path) -> dict[str, Any]:
    """What a plugin offers, with the schemas of the options. Loads it."""
    return ask("stg_describe_plugin", text(os.fspath(path)))


def doctor(config_path: Path = "") -> dict[str, Any]:
    """What a run needs on this machine, what is wrong, and what to do: docs/doctor.md. With a config: its needs, too."""
    return ask("stg_doctor", text(os.fspath(config_path)))


def config_schema() -> dict[str, Any]:
    """The JSON Schema of a config."""
    return ask("stg_config_schema")


def options_schema(name: str, kind: str = "strategy") -> dict[str, Any]:
    """The JSON Schema of the options of a "strategy" or a "model", by name. Loads its plugin."""
    if kind not in ("strategy", "model"):
        raise invalid_argument(f'kind is {kind!r}; there are "strategy" and "model"')
    return ask("stg_options_schema", text(name), int(kind == "model"))


class Plugin:
    """A loaded plugin: strategies and models by name."""

    def __init__(self, path: Path) -> None:
        table = POINTER(abi.stg_plugin)()
        check(function("stg_load_plugin")(text(os.fspath(path)), byref(table)))
        self.path = os.fspath(path)
        self._table = table.contents  # lives as long as the process
        self.name, self.version = read_text(self._table.name), read_text(self._table.version)
        self._strategies = {read_text(f.contents.name): f.contents for f in self._table.strategies[:self._table.num_strategies]}
        self._models = {read_text(f.contents.name): f.contents for f in self._table.models[:self._table.num_models]}

    def __repr__(self) -> str:
        return f"Plugin({self.path!r})"

    @property
    def strategies(self) -> list[str]:
        return list(self._strategies)

    @property
    def models(self) -> list[str]:
        return list(self._models)

    def strategy_factory(self, name: Optional[str]) -> abi.stg_strategy_factory:
        return self._find(self._strategies, name, "strategy")

    def _find(self, offered: Mapping[str, Any], name: Optional[str], kind: str) -> Any:
        if name is None and len(offered) == 1:
            return next(iter(offered.values()))
        if name not in offered:
            raise invalid_argument(f"{self.path} offers no {kind} {name!r}; available: {', '.join(offered) or 'none'}")
        return offered[name]

    def model(self, name: Optional[str] = None, options: Optional[Mapping[str, Any]] = None, services: Optional[Services] = None) -> "Model":
        """A model of this plugin's."""
        factory = self._find(self._models, name, "model")
        out = POINTER(abi.stg_model)()
        services = services or Services()
        check(factory.create(text(json.dumps(options or {})), services.pointer, byref(out)))
        services.failure.raise_it()
        return Model(out, read_text(factory.name))


class Model:
    """A model that a strategy can be set up with. Strategies keep it as long as they need it."""

    _table: Any = None

    def __init__(self, table: Any, name: str) -> None:
        self._table, self.name = table, name

    @property
    def pointer(self) -> Any:
        if self._table is None:
            raise failed_precondition(f"the model {self.name} is closed")
        return self._table

    def close(self) -> None:
        """Drops this reference; a strategy that was set up with it has its own."""
        table, self._table = self._table, None
        if table is not None and table.contents.release:
            table.contents.release(table.contents.self)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # see Tensor
            self.close()
