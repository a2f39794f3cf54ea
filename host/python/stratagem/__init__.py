# SPDX-License-Identifier: Apache-2.0
"""Stratagem for Python: runs from a config, step by step or whole, and strategies driven by a loop of your own.

Nothing here is compiled: libstratagem is used by ctypes, tensors cross by DLPack.
"""
from ._library import version
from ._steps import GradientSet
from .errors import Code, Error
from .events import Progress
from .model import PythonModel, Replica, ReplicaArgs, StepContext, StepOutput, TorchModel
from .plugin import Model, Plugin, config_schema, describe_plugin, doctor, inspect_plugin, list_plugins, options_schema
from .results import Parameter, Ranks, Status, StepResult, UpdateResult
from .services import Services
from .session import Session, fit, predict, test, validate
from .sources import Arrays, Source
from .strategy import Strategy
from .tensors import Tensor
from .trees import Opaque

__all__ = ["Arrays", "Code", "Error", "GradientSet", "Model", "Opaque", "Parameter", "Plugin", "Progress", "PythonModel", "Ranks", "Replica",
           "ReplicaArgs", "Services", "Session", "Source", "Status", "StepContext", "StepOutput", "StepResult", "Strategy", "Tensor", "TorchModel",
           "UpdateResult", "config_schema", "describe_plugin", "doctor", "fit", "inspect_plugin", "list_plugins", "options_schema", "predict", "test",
           "validate", "version"]
