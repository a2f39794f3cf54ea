# SPDX-License-Identifier: Apache-2.0
"""Where LibTorch is, and what keeps the pack from running here. Nothing is imported from it: that would take seconds, and fail in its own way."""
import importlib.util
import json
import os
import pathlib
import platform
import re
import subprocess
import sys

VARIABLE = "STRATAGEM_TORCH"


class Missing(Exception):
    """Something that this machine lacks; the text says what, and the way out."""


class Torch:
    def __init__(self, folder):
        self.folder = folder
        text = (folder / "version.py").read_text()
        self.version = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)[1]
        self.has_cuda = (folder / "lib" / "libtorch_cuda.so").exists()

    @property
    def minor(self):
        return minor(self.version)

    @property
    def library_folders(self):
        """Its own, and those of the CUDA packages beside it."""
        beside = sorted((self.folder.parent / "nvidia").glob("*/lib"))
        return [self.folder / "lib", *beside]


def minor(version):
    return ".".join(version.split(".")[:2])


def find_torch(given=None):
    """The torch package in, or at, a folder that is given; else the one of this Python."""
    named = given or os.environ.get(VARIABLE)
    if named:
        candidates = [pathlib.Path(named).absolute(), pathlib.Path(named).absolute() / "torch"]
    else:
        spec = importlib.util.find_spec("torch")
        candidates = [pathlib.Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    for folder in candidates:
        if (folder / "lib" / "libtorch_cpu.so").exists() and (folder / "version.py").exists():
            return Torch(folder)
    if named:
        raise Missing(f"{named} is no folder of Python's package torch, nor has one in it (there would be torch/lib/libtorch_cpu.so)")
    raise Missing(f"{sys.executable} has no package torch; run gpu-check with the Python that has it, or name its folder by --torch or {VARIABLE}")


def check_torch(torch, pack, accelerator):
    if torch.minor != minor(pack["torch"]):
        raise Missing(f"{torch.folder} is torch {torch.version}; this pack was built with {pack['torch']}, and runs with any {minor(pack['torch'])}")
    if accelerator == "cuda" and not torch.has_cuda:
        raise Missing(f"{torch.folder} is torch {torch.version} without CUDA: it has no libtorch_cuda.so")


def check_libc(pack):
    name, version = platform.libc_ver()
    numbers = [tuple(map(int, text.split("."))) for text in (version or "0", pack["glibc"])]
    if name == "glibc" and numbers[0] < numbers[1]:
        raise Missing(f"this system has glibc {version}; the pack needs {pack['glibc']} or newer")


def environment(root, torch):
    """For everything of the pack that runs: its files and LibTorch's are found by the loader's path alone."""
    folders = [root / "lib", *torch.library_folders, *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))]
    packages = [root, root / "python", torch.folder.parent]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, folders)), "PYTHONPATH": ":".join(map(str, packages)),
            "PYTHONDONTWRITEBYTECODE": "1", "STRATAGEM_LIBRARY": str(root / "lib" / "libstratagem.so.1"),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # sums of the same bits at each run


def ask_doctor(root, variables, accelerator, folder):
    """The report of `stratagem doctor` for a run on the accelerator."""
    config = folder / "doctor.json"
    config.write_text(json.dumps({"strategy": {"name": "data_parallel", "accelerator": accelerator}, "plugin_path": [str(root / "lib" / "stratagem")]}))
    try:
        result = subprocess.run([str(root / "bin" / "stratagem"), "doctor", str(config), "--json"], env=variables, timeout=30,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
        return json.loads(result.stdout)
    except subprocess.TimeoutExpired as error:
        raise Missing("`stratagem doctor` gave no answer in 30 s: is the driver stuck? See nvidia-smi") from error
    except (OSError, ValueError) as error:
        said = result.stderr.strip() if isinstance(error, ValueError) else str(error)
        raise Missing(f"the pack's programs don't run on this system: {said}") from error


def check_gpus(report):
    """A driver, and a GPU that it has."""
    for check in report["checks"]:
        if check["id"] in ("driver", "devices"):
            for problem in check["problems"]:
                if problem["status"] == "fault":
                    raise Missing(f"{problem['wrong']}; {problem['remedy']}")
